"""`kvoncall check`: which files, against what, what is printed, and the exit code.

Codes: 0 nothing at or above --fail-on, 1 something, 2 a file or the target cannot be read.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric

from probe.check.check import Checked, check_files
from probe.check.engines import page_of, vocabulary
from probe.check.finding import ERROR, INFO, RANK, WARNING
from probe.check.subject import Settings
from probe.check.vocabulary import Vocabulary
from probe.collect.exposition import ExpositionReader
from probe.collect.scrape import ScrapeError, get, metrics_url
from probe.dialects import ENGINES, DialectError

Progress = Callable[[str], None]

CLEAN, FOUND, STOPPED = 0, 1, 2
_SUFFIXES = (".yaml", ".yml", ".json", ".rules")
_TIMEOUT_S = 10.0


class CheckError(Exception):
    """Nothing can be checked; the message is one sentence for the user."""


@dataclass(frozen=True)
class Outcome:
    """The exit code, and what `--json` prints."""

    code: int
    value: dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="rules or dashboards (YAML or JSON), or folders of them")
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--target", metavar="URL", help="check against what this server exposes now")
    against.add_argument(
        "--dialect",
        action="append",
        default=[],
        metavar="ENGINE[@VERSION]",
        help=f"check against this version (may be repeated; engines: {', '.join(ENGINES)}; default: the newest known)",
    )
    add("--scrape-interval", type=float, default=15.0, metavar="SECONDS", help="how often the targets are scraped")
    add("--fail-on", choices=(WARNING, ERROR), default=WARNING, help="exit 1 from this severity on")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace, report: Progress) -> Outcome:
    """Checks the files; raises `CheckError` when there is nothing to check or the target does not answer."""
    if options.scrape_interval <= 0:
        raise CheckError("--scrape-interval must be more than 0 seconds")
    paths = _files(options.files)
    known, notes = _of_target(options.target) if options.target else _of_dialects(options.dialect)
    for note in notes:
        report(note)
    checked = check_files(paths, known, Settings(options.scrape_interval))
    for error in checked.errors:
        report(error)
    if not checked.queries and not checked.errors:
        raise CheckError("no rule and no dashboard query is in these files")
    value = _value(options, paths, known, checked, notes)
    bad = any(RANK[finding.severity] >= RANK[options.fail_on] for finding in checked.findings)
    return Outcome(STOPPED if checked.errors else FOUND if bad else CLEAN, value)


def _files(given: Iterable[Path]) -> list[Path]:
    paths: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
            if not inside:
                raise CheckError(f"{path} holds no {', '.join(_SUFFIXES)} file")
            paths += inside
        else:
            paths.append(path)
    return list(dict.fromkeys(paths))


def _of_dialects(given: Iterable[str]) -> tuple[Vocabulary, list[str]]:
    asked: dict[str, str | None] = {}
    for text in given:
        engine, _, version = text.partition("@")
        if engine in asked:
            raise CheckError(f"--dialect names {engine} twice")
        asked[engine] = version or None
    try:
        return vocabulary(asked)
    except DialectError as error:
        raise CheckError(str(error)) from None


def _of_target(url: str) -> tuple[Vocabulary, list[str]]:
    """What the server at `url` exposes now, on top of what its version is known to."""
    from probe.targets import TargetError, look_at  # brings the store along

    try:
        look = look_at(url)
        families = asyncio.run(_families(metrics_url(look.url)))
    except (TargetError, ScrapeError) as error:
        raise CheckError(str(error)) from None
    engine, fitting = look.detection.engine, look.detection.versions
    version = look.version or (fitting[-1] if fitting else None)
    known, notes = vocabulary({engine: version}, page_of(families))
    if look.version is None:
        notes.append(f"{url} does not tell its version: {engine} {known.engines[engine].version} is taken.")
    return known, notes


async def _families(page: str) -> list[Metric]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await get(client, page, timeout_s=_TIMEOUT_S)
    return list(ExpositionReader().read(answer.body, answer.content_type, page, time.time()).families)


def _value(
    options: argparse.Namespace, paths: list[Path], known: Vocabulary, checked: Checked, notes: list[str]
) -> dict[str, Any]:
    severities = [finding.severity for finding in checked.findings]
    return {
        "files": [str(path) for path in paths],
        "queries": checked.queries,
        "against": known.met,
        "target": options.target,
        "notes": notes,
        "unreadable": checked.errors,
        "counts": {severity: severities.count(severity) for severity in (ERROR, WARNING, INFO)},
        "findings": [finding.to_dict() for finding in checked.findings],
    }


def text(value: dict[str, Any]) -> str:
    """The findings as lines, and what they were checked against."""
    lines = []
    for finding in value["findings"]:
        lines.append(
            f"{finding['file']}:{finding['line']}: {finding['severity']} [{finding['code']}] {finding['where']}"
        )
        lines.append(f"    {finding['why']}")
        lines.append(f"    write: {finding['write']}")
        if finding["corrected"]:
            lines.append(f"    corrected: {' '.join(finding['corrected'].split())}")
    counts = value["counts"]
    named = [(counts["error"], "error"), (counts["warning"], "warning"), (counts["info"], "note")]
    found = ", ".join(_counted(count, word) for count, word in named if count) or (
        "nothing wrong" if value["queries"] else "nothing was checked"
    )
    if value["unreadable"]:
        found += f"; {_counted(len(value['unreadable']), 'file')} could not be read"
    engines = ", ".join(f"{name} {version}" for name, version in value["against"].items()) or "no engine's metrics"
    against = f"{value['target']} ({engines})" if value["target"] else engines
    queries, files = (_counted(value["queries"], "expression"), _counted(len(value["files"]), "file"))
    lines.append(f"{queries} in {files} against {against}: {found}.")
    return "\n".join(lines)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
