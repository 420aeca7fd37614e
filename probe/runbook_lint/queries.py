"""Queries a page gives: PromQL that parses, and that says something in the newest version the page is for."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser

from probe.check.check import check_queries
from probe.check.documents import Located
from probe.check.engines import vocabulary
from probe.check.finding import ERROR, WARNING
from probe.check.query import PANEL, Query
from probe.check.subject import Settings
from probe.check.vocabulary import Vocabulary
from probe.runbook_lint.document import Document, Span
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.metrics import METRIC
from probe.runbook_lint.versions import metric_versions

_FUNCTION = re.compile(
    r"(?:(?:sum|max|min|avg|count|topk)(?: by ?\([a-z_, ]*\))? ?|rate|irate|increase|changes|delta|deriv|resets|absent|"
    r"histogram_quantile|quantile|(?:min|max|avg|sum|last|present|absent)_over_time|clamp_\w+|label_replace)\(.+"
)
_COMPARED = re.compile(r"[a-zA-Z_:][\w:]* ?(?:==|!=|>=|<=|>|<) ?[\d.]+")


def check_promql(page: Document) -> Iterator[LintFinding]:
    """Findings of the page's queries."""
    queries = []
    for block in page.blocks:
        for span in block.spans:
            if not is_query(span):
                continue
            if block.section == "Do not":  # wrong on purpose, and still PromQL
                yield from _unparsed(page, span)
            else:
                queries.append(Query(page.file, Located(span.text, span.line), span.text, PANEL, block.section))
    for finding in check_queries(queries, _vocabulary(page), Settings()):
        if finding.severity in (ERROR, WARNING):
            write = finding.corrected or finding.write
            yield LintFinding(page.file, finding.line, "query", f"[{finding.code}] {finding.why}", write)


def is_query(span: Span) -> bool:
    """Whether a code span is PromQL and more than a metric's name."""
    text = span.text
    if _FUNCTION.match(text) or _COMPARED.fullmatch(text):
        return True
    named = METRIC.search(text)
    return bool(named) and bool(re.search(r"[({\[]|\s(?:/|\*|\+|-|>|<|==|and|or|unless)\s", text))


def _unparsed(page: Document, span: Span) -> Iterator[LintFinding]:
    try:
        promql_parser.parse(span.text)
    except ValueError as error:
        yield LintFinding(
            page.file, span.line, "query", f"not PromQL: {' '.join(str(error).split())}", "one that parses"
        )


def _vocabulary(page: Document) -> Vocabulary:
    """Every engine of the page in the newest version of its range; vLLM's names are the embedded engine's only where
    the page is for that alone.
    """
    asked: dict[str, str | None] = {}
    for engine in page.meta["engines"]:
        if engine != "kvoncall":
            asked[engine] = next(reversed(metric_versions(page.meta, engine)), None)
    return vocabulary(asked or {"kvoncall": None})[0]
