"""`kvoncall watch`: collector and alert evaluator without the app."""

from __future__ import annotations

import argparse

from probe.commands.output import add_data_dir, open_store, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="attach a server before watching (may be repeated)",
    )
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="stop after this long")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """Watches until interrupted."""
    from probe.monitor import watch
    from probe.targets import attach_target

    with open_store(options) as store:
        for spec in options.target:
            target = attach_target(store, spec)
            report(f"attached {target.name} at {target.url} ({target.engine})")
        return watch(store, seconds=options.seconds, report=report)
