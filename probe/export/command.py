"""`kvoncall rules list` and `kvoncall rules export`: which rules there are, and their files for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probe.alerts.rules import DEFAULT_RULES
from probe.export.alertmanager import alertmanager_text
from probe.export.alerts import DEFAULT_BASE_URL, DEFAULT_DIALECT, Options, Selection, alert_name, select
from probe.export.grafana import DASHBOARD_FILE, dashboard, dashboard_text
from probe.export.naming import ExportError
from probe.export.prometheus import RULES_FILE, prometheusrule_text, rules_text
from probe.export.promtool_tests import test_files

Report = Callable[[str], None]

ALERTMANAGER_FILE = "kvoncall-alertmanager.yaml"
PROMETHEUSRULE_FILE = "kvoncall-prometheusrule.yaml"
TESTS_FOLDER = "tests"

# Format -> (file name, text).
_ONE_FILE: dict[str, tuple[str, Callable[[Selection], str]]] = {
    "prometheus": (RULES_FILE, rules_text),
    "prometheusrule": (PROMETHEUSRULE_FILE, prometheusrule_text),
    "alertmanager": (ALERTMANAGER_FILE, alertmanager_text),
    "grafana": (DASHBOARD_FILE, dashboard_text),
}
FORMATS = (*_ONE_FILE, "promtool-tests")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("action", choices=("list", "export"))
    add("--to", choices=FORMATS, help="export: for which program")
    add(
        "--dialect",
        default=DEFAULT_DIALECT,
        metavar="ENGINE[@VERSION]",
        help=f"whose names (default {DEFAULT_DIALECT})",
    )
    add("--spelling", metavar="PREFIX", help="of the engine's names where it has several, as sglang_")
    add("--base-url", default=DEFAULT_BASE_URL, metavar="URL", help="where this app answers, for links")
    add("--job", action="append", default=[], metavar="NAME", help="Prometheus job of the targets (may be repeated)")
    add("--by", choices=("model",), help="an alert for each model of a target")
    add("--scrape-interval", type=float, default=15.0, metavar="SECONDS", help="of those targets in Prometheus")
    add("--out", type=Path, metavar="DIR", help="write files here instead of to stdout")


def run(options: argparse.Namespace, report: Report) -> str | None:
    """What goes to stdout, or None; what was left out, and which files were written, is reported. `ExportError`."""
    if options.action == "list":
        return listing()
    if options.to is None:
        raise ExportError(f"For which program? Name one with --to: {', '.join(FORMATS)}.")
    selection = select(options_of(options))
    texts = _texts(selection, options.to)
    for line in said(selection, options.to):
        report(line)
    if options.out is None:
        if len(texts) > 1:
            raise ExportError(f"--to {options.to} writes several files: name a folder with --out DIR.")
        return next(iter(texts.values()))
    for name, text in texts.items():
        _write(options.out / name, text)
        report(f"wrote {options.out / name}")
    return None


def options_of(options: argparse.Namespace) -> Options:
    """What the command line asks for."""
    if not 0.1 <= options.scrape_interval <= 3600:
        raise ExportError("--scrape-interval must be 0.1 to 3600 seconds.")
    if any(not job for job in options.job):
        raise ExportError("--job needs a name.")
    return Options(
        dialect=options.dialect,
        base_url=options.base_url,
        jobs=tuple(dict.fromkeys(options.job)),
        by_model=options.by == "model",
        scrape_interval_s=options.scrape_interval,
        spelling=options.spelling,
    )


def _texts(selection: Selection, to: str) -> dict[str, str]:
    """File name -> text."""
    if to in _ONE_FILE:
        name, text = _ONE_FILE[to]
        return {name: text(selection)}
    tests = {f"{TESTS_FOLDER}/{name}": text for name, text in test_files(selection).items()}
    return {RULES_FILE: rules_text(selection), **tests}


def said(selection: Selection, to: str) -> list[str]:
    """What to know about an export: what was assumed, and what is not in it."""
    lines = [f"{selection.dialect}: {note}" for note in selection.notes]
    left_out = dashboard(selection).left_out if to == "grafana" else selection.left_out
    return lines + [f"left out: {name}: {reason}" for name, reason in left_out]


def listing() -> str:
    """The rules by name, severity and title."""
    rows = [f"{r.id:24} {r.severity:9} {alert_name(r.id):24} {r.title}" for r in DEFAULT_RULES]
    return "\n".join(rows) + "\n"


def listing_data() -> list[dict[str, Any]]:
    """The rules as JSON-ready data."""
    return [
        {
            "id": rule.id,
            "alert": alert_name(rule.id),
            "severity": rule.severity,
            "title": rule.title,
            "comparison": rule.comparison,
            "threshold": rule.threshold,
            "window_s": rule.window_s,
            "hold_s": rule.hold_s,
            "keep_firing_s": rule.keep_firing_s,
            "inhibited_by": list(rule.inhibited_by),
            "runbook": rule.runbook,
        }
        for rule in DEFAULT_RULES
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}.") from None
