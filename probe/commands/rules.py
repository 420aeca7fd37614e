"""`kvoncall rules`: the alert rules, and the files that other programs take them from."""

from __future__ import annotations

import argparse
import sys

from probe.commands.output import print_json, report
from probe.export import command


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    command.add_options(parser)
    parser.add_argument("--json", action="store_true", help="list: print one JSON value")


def run(options: argparse.Namespace) -> int:
    """Lists or exports."""
    if options.action == "list" and options.json:
        print_json(command.listing_data())
        return 0
    text = command.run(options, report)
    if text is not None:
        sys.stdout.write(text)
    return 0
