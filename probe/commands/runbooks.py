"""`kvoncall runbooks`: what to do about an alert."""

from __future__ import annotations

import argparse

from probe.commands.output import print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("action", choices=("list", "show"))
    parser.add_argument("id", nargs="?")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Lists the runbooks, or shows one."""
    from runbooks.load import RunbookError, get_runbook, list_runbooks

    if options.action == "list":
        runbooks = list_runbooks()
        if options.json:
            print_json([{"id": r.id, "title": r.title, "severity": r.severity} for r in runbooks])
        else:
            for runbook in runbooks:
                print(f"{runbook.id:24} {runbook.severity:9} {runbook.title}")
        return 0
    if not options.id:
        raise RunbookError("which runbook? `kvoncall runbooks list` names them")
    runbook = get_runbook(options.id)
    if options.json:
        print_json({"id": runbook.id, "meta": runbook.meta, "sections": runbook.sections})
    else:
        print(runbook.markdown)
    return 0
