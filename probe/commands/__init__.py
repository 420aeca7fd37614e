"""The commands of `kvoncall`, one module each: `add_options(parser)` and `run(options) -> exit code`.

Results go to stdout, progress to stderr. A module imports its room when it runs, not when it is read.
"""
