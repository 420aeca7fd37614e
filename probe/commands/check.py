"""`kvoncall check`: the user's own Prometheus rules and Grafana dashboards, for an engine's version."""

from __future__ import annotations

import argparse

from probe.check import command
from probe.commands.output import print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    command.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Findings, and the exit code for CI."""
    outcome = command.run(options, report)
    if options.json:
        print_json(outcome.value)
    else:
        print(command.text(outcome.value))
    return outcome.code
