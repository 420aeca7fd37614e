"""`kvoncall check`: finds what is wrong in a user's own Prometheus rules and Grafana dashboards.

It reads files, never changes them. What engines expose comes from `probe.dialects`; PromQL is parsed, not matched
as text. A metric whose name no engine claims is never judged.
"""
