"""`kvoncall backtest`: would a rule have fired?"""

from __future__ import annotations

import argparse

from probe.alerts import backtest_command
from probe.commands.output import add_data_dir, open_store, print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    backtest_command.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """One result a target; 0 whether or not it would have fired."""
    with open_store(options) as store:
        results = backtest_command.run(options, store)
    if options.json:
        print_json([result.to_dict() for result in results])
    else:
        print("\n".join(backtest_command.text(result) for result in results))
    return 0
