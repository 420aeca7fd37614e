"""`kvoncall quality`: what KV-cache formats do to answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from probe.commands.output import UsageError, add_data_dir, print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--target", default="embedded", metavar="embedded|URL|NAME", help="engines of its own, or a running server")
    add("--model", default="", metavar="PATH", help="embedded: as `kvoncall serve --model` (default: the testbed)")
    add("--engine-flags", default="", metavar="FLAGS", help="embedded: further flags of the engines, as one word")
    add("--dtypes", metavar="A,B,C", help="embedded: values of --kv-cache-dtype; the first is the baseline")
    add("--turns", type=int, default=20, metavar="N", help="questions a conversation")
    add("--conversations", type=int, default=16, metavar="N")
    add("--tasks", default="recall,add,brackets", metavar="LIST", help="of recall, add, brackets; or none")
    add("--suite", default="auto", choices=("auto", "testbed", "plain"), help="language (auto: by the model)")
    add("--chat", action="store_true", help="ask through /v1/chat/completions")
    add("--context", type=int, metavar="TOKENS", help="fill conversations up to this (default: 2048 or what fits)")
    add("--windows", type=int, default=4, metavar="N", help="windows of text for likelihoods (0: none)")
    add("--text", type=Path, metavar="FILE", help="text to judge (default: the suite's own)")
    add("--baseline", metavar="RUN_ID|URL", help="compare with a stored run, or measure this server first")
    add("--resume", metavar="RUN_ID", help="go on with an incomplete run")
    add("--canary", action="store_true", help="ask a running server a small fixed set again and again")
    add("--every", type=float, default=600.0, metavar="SECONDS", help="canary: from one round's start to the next's")
    add("--rounds", type=int, metavar="N", help="canary: stop after so many (default: go on)")
    add("--lm-eval", metavar="TASKS", help="run the user's lm-eval harness instead; its own flags follow `--`")
    add("lm_eval_args", nargs="*", metavar="-- ARGS", help="flags for lm-eval")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    add("--list", action="store_true", help="name the stored runs")
    add("--json", action="store_true", help="print one JSON object")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """Measures, watches, lists or runs the harness."""
    from probe.quality import command, table

    if options.lm_eval_args and not options.lm_eval:
        raise UsageError(f"{options.lm_eval_args[0]!r} means nothing here: arguments belong to --lm-eval TASKS")
    if options.list:
        runs = command.list_runs(options)
        if options.json:
            print_json(runs)
        else:
            print(table.listing(runs))
        return 0
    if options.lm_eval:
        value = command.run_harness(options, report)
        if options.json:
            print_json(value)
        else:
            print(table.harness(value))
        return 0
    outcome = (command.run_canary if options.canary else command.measure)(options, report)
    if options.json:
        print_json(outcome.value)
    else:
        print(table.report(outcome.value))
    return outcome.code
