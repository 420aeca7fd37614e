"""Checks of files: parses their queries, runs every check, and sums up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import promql_parser as promql

from probe.check.alerts import check_alerts
from probe.check.averages import check_averages
from probe.check.documents import DocumentError, read_file
from probe.check.expression import COMPARISONS, function, operator, uses, walk
from probe.check.finding import CODES, INFO, RANK, WARNING, Finding
from probe.check.grafana import is_variable, variables_in
from probe.check.labels import check_labels
from probe.check.names import check_names
from probe.check.query import PANEL, RECORD, VARIABLE, Query, find_queries
from probe.check.rates import check_rates
from probe.check.subject import Absence, File, Settings, Subject, job_of
from probe.check.units import check_units
from probe.check.vocabulary import Vocabulary

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    check_names,
    check_labels,
    check_rates,
    check_units,
    check_averages,
    check_alerts,
)


MAX_PARTS = 200  # the parser recurses on the machine's stack and would take the process down
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`")
_PARTS = re.compile(r"[-+*/%^(\[{]|[<>=!]=?|\b(?:and|or|unless|atan2)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Checked:
    """`findings` in the order of the files; `errors`: files that could not be read."""

    queries: int
    findings: list[Finding]
    errors: list[str]


def check_files(paths: Iterable[Path], vocabulary: Vocabulary, settings: Settings) -> Checked:
    """Every query in the files."""
    queries: list[Query] = []
    errors = []
    for path in paths:
        try:
            queries += find_queries(read_file(path), str(path))
        except DocumentError as error:
            errors.append(str(error))
    return Checked(len(queries), check_queries(queries, vocabulary, settings), errors)


def check_queries(queries: Sequence[Query], vocabulary: Vocabulary, settings: Settings) -> list[Finding]:
    """Findings of all queries, which may refer to each other's recording rules."""
    trees = []
    findings: list[Finding] = []
    for query in queries:
        parts = len(_PARTS.findall(_QUOTED.sub("", query.expr)))
        if parts > MAX_PARTS:
            why = f"{parts:,} operators and brackets, of which at most {MAX_PARTS} are followed"
            findings.append(_unchecked(query, WARNING, why))
            continue
        try:
            trees.append((query, promql.parse(query.expr)))
        except ValueError as error:
            findings += _unparsed(query, str(error))
    recorded = frozenset(query.where for query in queries if query.kind == RECORD)
    absent = frozenset(name for query, tree in trees if query.kind == "alert" for name in _asked_absent(tree))
    unhidden = frozenset((query.file, name) for query, tree in trees for name in _unhidden(tree))
    for query, tree in trees:
        subject = Subject(query, tree, vocabulary, settings, File(recorded, absent, unhidden))
        for check in CHECKS:
            findings += check(subject)
    order = {query.file: place for place, query in reversed(list(enumerate(queries)))}
    findings = _without_repeated_notes(findings)
    return sorted(set(findings), key=lambda one: (order[one.file], one.line, -RANK[one.severity], one.code, one.why))


def _without_repeated_notes(findings: list[Finding]) -> list[Finding]:
    """What a server may have to set is said once a file."""
    told: set[tuple[str, str]] = set()
    kept = []
    for finding in findings:
        is_note = finding.severity == INFO and finding.code == "unknown-metric"
        if not is_note or (finding.file, finding.why) not in told:
            kept.append(finding)
        told.add((finding.file, finding.why))
    return kept


def _asked_absent(tree: object) -> set[Absence]:
    return {
        Absence(use.name, job_of(use.selector), any(operator(part) in COMPARISONS for part, _ in walk(node)))
        for node, _ in walk(tree)
        if function(node) in ("absent", "absent_over_time")
        for use in uses(node)
    }


def _unchecked(query: Query, severity: str, why: str) -> Finding:
    return Finding(
        query.file, query.line, query.where, "parse-error", severity, f"not checked: {why}.",
        "something simpler, if it should be", " ".join(query.text.split())[:200],
    )  # fmt: skip


def _unhidden(tree: object) -> set[str]:
    """Metrics that no mean or sum hides here."""
    return {use.name for use in uses(tree) if not any(operator(node) in ("avg", "sum") for node in use.path)}


def _unparsed(query: Query, message: str) -> Iterator[Finding]:
    if query.kind in (PANEL, VARIABLE) and is_variable(query.expr):
        yield _unchecked(query, INFO, f"no value is known that fits {', '.join(sorted(variables_in(query.text)))}")
        return
    if "{{" in query.expr:
        message = "a Helm template must be rendered first (`helm template`)"
    effect = "the whole file is refused" if query.kind not in (PANEL, VARIABLE) else "the panel shows an error"
    yield Finding(
        query.file, query.line, query.where, "parse-error", CODES["parse-error"][0],
        f"not PromQL: {' '.join(message.split())}; {effect}.", "an expression that parses",
        " ".join(query.text.split()),
    )  # fmt: skip
