"""`kvoncall watch`: collector and alert evaluator without the app."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from probe.commands.output import add_data_dir, open_store, report

if TYPE_CHECKING:
    from probe.store import Store


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="attach a server before watching (may be repeated)",
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help="attach every engine that this Prometheus server scrapes, read from there"
    )
    parser.add_argument(
        "--prometheus-auth-env", metavar="NAME", help="environment variable with its Authorization header"
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
            version = target.facts.get("version") or "version unknown"
            report(f"attached {target.name} at {target.url} ({target.engine} {version})")
            _say_coverage(target.facts.get("coverage") or {})
        if options.prometheus:
            _attach_fleet(options, store)
        return watch(store, seconds=options.seconds, report=report)


def _say_coverage(found: Mapping[str, Any]) -> None:
    """What is not read of a server, and what to do about it."""
    rows = found.get("rows", [])
    read = [row for row in rows if row["status"] in ("present", "renamed")]
    report(f"  {len(read)} of {len(rows)} metrics are read")
    for row in rows:
        if row["status"] in ("hidden", "missing"):
            report(f"  {row['status']}: {row['canonical']}: {row.get('todo') or 'no reason known'}")


def _attach_fleet(options: argparse.Namespace, store: Store) -> None:
    from probe.fleet import access_options, attach_found, look_around

    access = access_options(options.prometheus_auth_env)
    found = look_around(options.prometheus, access)
    for warning in found.warnings:
        report(f"Prometheus warns: {warning}")
    for target in attach_found(store, options.prometheus, found.candidates, access):
        report(f"attached {target.name} ({target.engine}), read from {target.url}")
    if not found.candidates:
        report(f"{options.prometheus} scrapes no engine known here now")
