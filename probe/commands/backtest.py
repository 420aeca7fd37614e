"""`kvoncall backtest`: would a rule have fired?"""

from __future__ import annotations

import argparse
import time

from probe.alerts import backtest_command
from probe.alerts.backtest import Backtest
from probe.commands.output import add_data_dir, open_store, print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    backtest_command.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """One result a target; 0 whether or not it would have fired."""
    if options.prometheus:
        results = _on_prometheus(options)
    else:
        with open_store(options) as store:
            results = backtest_command.run(options, store)
    if options.json:
        print_json([result.to_dict() for result in results])
    else:
        print("\n".join(backtest_command.text(result) for result in results))
    return 0


def _on_prometheus(options: argparse.Namespace) -> list[Backtest]:
    from probe.fleet import access_options, histories

    until = time.time()
    span_s = backtest_command.span_s
    found = histories(
        options.prometheus,
        backtest_command.find_rule(options.rule),
        until - span_s(options.since),
        until,
        name=options.target,
        options=access_options(options.prometheus_auth_env),
        step_s=span_s(options.step) if options.step else None,
        report=report,
    )
    hold_s = span_s(options.hold) if options.hold else None
    return [history.judge(options.threshold, hold_s) for history in found]
