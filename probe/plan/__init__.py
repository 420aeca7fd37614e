"""`kvoncall plan`: memory and capacity of a server from its model, GPUs, engine and flags, or read off a live one.

`options` are the flags, `describe` makes a `Deployment` of them, `live` of a running server; `engine.memory.plan` does
the arithmetic; `text` and `compare` show it, `check` runs published anchors through it.
"""
