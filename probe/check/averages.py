"""Means that hide: of KV usage over replicas, of ratios, of quantiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from probe.check.expression import RATES, bare, function, grouping, operator, uses, walk
from probe.check.finding import Finding
from probe.check.query import PANEL
from probe.check.subject import Subject, text_of
from probe.check.units import quantity

_OF_REPLICA = {"instance", "pod", "node", "host", "hostname", "kubernetes_pod_name", "replica", "engine", "server"}
_KV_USAGE = re.compile(r"(cache_usage_perc|token_usage|kv_cache_utilization)$")
_IS_AVERAGE = re.compile(r"average_kv_cache_(utilization|usage)$")
_HIDES = "one full replica preempts and queues while the mean of ten says 55%"


def check_averages(subject: Subject) -> Iterator[Finding]:
    for use in subject.uses:
        if _IS_AVERAGE.search(use.name) and subject.meaning(use).status == "neighbour":
            yield subject.finding(
                "average-hides-full",
                f"{use.name} is a mean over the pool: {_HIDES}.",
                "max by (model_name) (...) of the engines' own usage, such as vllm:kv_cache_usage_perc",
                at=use.name,
            )
    for node, _ in walk(subject.tree):
        op = operator(node)
        if not isinstance(node, promql.AggregateExpr) or op not in ("avg", "sum"):
            continue
        inner = bare(node.expr)
        name = next((use.name for use in uses(inner)), "")
        if any(function(part) == "histogram_quantile" for part, _ in walk(inner)):
            yield subject.finding(
                "ratio-average",
                f"{op}() of quantiles is no quantile: that of two replicas' p99 says nothing about the service.",
                "histogram_quantile(..., sum by (le) (rate(..._bucket[...])))",
                at=name,
            )
        elif isinstance(inner, promql.BinaryExpr) and operator(inner) == "/" and _per_series_ratio(subject, inner):
            yield _ratio_finding(subject, node, inner, name)
        else:
            yield from _gauge_average(subject, node, inner)


def _per_series_ratio(subject: Subject, quotient: Any) -> bool:
    """A quotient of rates of counters before any aggregation."""
    sides = (bare(quotient.lhs), bare(quotient.rhs))
    return all(function(side) in RATES and all(subject.meaning(use).grows for use in uses(side)) for side in sides)


def _ratio_finding(subject: Subject, node: Any, quotient: Any, name: str) -> Finding:
    word, labels = grouping(node)
    by = f"{word} ({', '.join(labels)}) " if word else ""
    total = f"sum {by}({text_of(quotient.lhs)}) / sum {by}({text_of(quotient.rhs)})"
    return subject.finding(
        "ratio-average",
        f"{operator(node)}() of ratios gives an idle replica the weight of a busy one"
        + (", and two full ones 200%." if operator(node) == "sum" else "."),
        total,
        at=name,
        corrected=subject.rewrite(node, f"({total})"),
    )


def _gauge_average(subject: Subject, node: Any, inner: Any) -> Iterator[Finding]:
    op = operator(node)
    word, labels = grouping(node)
    measured = quantity(subject, inner)
    if measured is None or measured.kind != "ratio" or any(function(part) in RATES for part, _ in walk(inner)):
        return
    if (word == "by" and _OF_REPLICA & set(labels)) or (word == "without" and not _OF_REPLICA & set(labels)):
        return
    usage = bool(_KV_USAGE.search(measured.name))
    if usage and subject.query.kind == PANEL and (subject.query.file, measured.name) in subject.file.unhidden:
        return  # the mean beside the highest
    by = f"{word} ({', '.join(labels)}) " if word else ""
    if usage:
        hides = _HIDES if op == "avg" else "shares of different caches add up to more than 100%"
        yield subject.finding(
            "average-hides-full" if op == "avg" else "ratio-average",
            f"{op}() of {measured.name}: {hides}.",
            f"max {by}({text_of(inner)})",
            at=measured.name,
            corrected=subject.rewrite(node, f"max {by}({text_of(inner)})"),
        )
    elif re.search(r"hit_rate$|acceptance_rate$", measured.name):
        yield subject.finding(
            "ratio-average",
            f"{op}() of {measured.name}: an idle replica weighs as much as a busy one.",
            "the quotient of the sums of the two counters",
            at=measured.name,
        )
