"""What only alerts get wrong: silence in an outage, fleets written as a number, no `for`, burn rates of one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from probe.check.expression import (
    Comparison,
    bare,
    constant,
    grouping,
    metric_name,
    operator,
    same_number,
    uses,
    walk,
)
from probe.check.finding import Finding
from probe.check.subject import Subject, job_of, text_of

_COUNTING = ("count", "sum", "avg", "max", "min")
_BELOW = ("<", "<=", "==")
_BUDGETS = (0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0001, 0.00001)
_RATE_SUFFIX = re.compile(r"(?:rate|ratio|increase)_?(\d+(?:ms|[smhdwy]))")
_RUNBOOK_KEYS = ("runbook_url", "runbook", "runbook_link")
_OUR_RUNBOOKS = {
    "preemptions_total": "eviction-storm",
    "kv_usage_ratio": "kv-saturated",
    "requests_waiting": "kv-saturated",
    "ttft_seconds": "ttft-slo-burn",
    "itl_seconds": "itl-slo-burn",
    "prefix_hits_total": "prefix-hit-collapse",
    "up": "target-missing",
}


def check_alerts(subject: Subject) -> Iterator[Finding]:
    if not subject.is_alert:
        return
    yield from _silent(subject)
    yield from _fleet_size(subject)
    yield from _no_for(subject)
    yield from _burn_rate(subject)
    yield from _no_runbook(subject)


def _silent(subject: Subject) -> Iterator[Finding]:
    """`count(up == 1) < N` has no result when nothing is up, `sum(up) == 0` none when discovery finds nothing."""
    for comparison in subject.comparisons:
        aggregate = _first_count(subject, comparison.value) if comparison.op in _BELOW else None
        if aggregate is None or _is_covered(subject, aggregate):
            continue
        name = uses(aggregate)[0].name
        inner = bare(aggregate.expr)
        filtered = operator(inner) in ("==", ">", ">=", "!=")
        gone = f"no {name} is left that fits" if filtered else f"no series of {name} is left"
        moment = "every target is down" if filtered else "the targets vanish from service discovery"
        yield subject.finding(
            "silent-in-outage",
            f"`{text_of(aggregate)}` has no result when {gone}, so the alert is silent exactly when {moment}.",
            "count what is missing as zero (`or vector(0)`), or ask for absence (`or absent(...)`)",
            at=name,
            corrected=_spoken(subject, comparison, aggregate),
        )
        return


def _first_count(subject: Subject, value: Any) -> Any | None:
    """The first aggregation over `up`, or count of an engine's series, that nothing stands in for when it is empty."""
    for node, path in walk(value):
        if not isinstance(node, promql.AggregateExpr) or operator(node) not in _COUNTING:
            continue
        names = {use.name for use in uses(node)}
        counted = operator(node) == "count" and all(subject.meaning(use).engine for use in uses(node))
        if names != {"up"} and not counted:
            continue
        return None if any(operator(above) == "or" for above in path) else node
    return None


def _is_covered(subject: Subject, aggregate: Any) -> bool:
    """Whether another alert asks for the absence of the same: of targets that are up, where only those are counted."""
    filtered = operator(bare(aggregate.expr)) in ("==", ">", ">=", "!=")
    use = uses(aggregate)[0]
    return any(
        asked.name == use.name and (asked.filtered or not filtered) and asked.job in ("", job_of(use.selector))
        for asked in subject.file.absent
    )


def _spoken(subject: Subject, comparison: Comparison, aggregate: Any) -> str | None:
    word, _ = grouping(aggregate)
    if (
        not word
        and operator(aggregate) in ("count", "sum")
        and bare(comparison.value).prettify() == aggregate.prettify()
    ):
        return subject.rewrite(aggregate, f"({text_of(aggregate)} or vector(0))")
    selector = next(node for node, _ in walk(aggregate) if isinstance(node, promql.VectorSelector))
    inner = text_of(comparison.node)
    asked = f"{text_of(selector)} == 1" if operator(bare(aggregate.expr)) == "==" else text_of(selector)
    return subject.rewrite(comparison.node, f"({inner} or absent({asked}))")


def _fleet_size(subject: Subject) -> Iterator[Finding]:
    for comparison in subject.comparisons:
        aggregate = bare(comparison.value)
        while operator(aggregate) == "or":
            aggregate = bare(aggregate.lhs)
        size = comparison.threshold
        if not isinstance(aggregate, promql.AggregateExpr) or operator(aggregate) not in ("count", "sum"):
            continue
        inside = uses(aggregate)
        counts_up = bool(inside) and {use.name for use in inside} == {"up"}
        if not (counts_up or operator(aggregate) == "count") or comparison.op not in ("<", "<=", "!=", "=="):
            continue
        if size < 2 or not float(size).is_integer():
            continue
        yield subject.finding(
            "fixed-fleet-size",
            f"{size:g} replicas are written into the rule: it fires on every planned scale-down, and after a scale-up "
            "lets new replicas die unseen.",
            "a share of what is known, as count(up == 0) / count(up) > 0.1, or the count an hour ago (offset 1h)",
            at=inside[0].name if inside else "",
        )


def _no_for(subject: Subject) -> Iterator[Finding]:
    if subject.query.hold_s > 0:
        return
    for use in subject.uses:
        meaning = subject.meaning(use)
        gauge = meaning.type == "gauge" or use.name == "up"
        if not gauge or use.function or not use.counts or use.name.endswith("_info"):
            continue
        if any(isinstance(node, promql.SubqueryExpr) for node in use.path):
            continue
        yield subject.finding(
            "gauge-without-for",
            f"{use.name} is a gauge and the alert has no `for`: one sample is enough to fire, the next resolves.",
            "for: 5m",
            at=use.name,
        )
        return


def _burn_rate(subject: Subject) -> Iterator[Finding]:
    """Two windows above the same error budget: that is a burn rate of 1, which every service has now and then."""
    by_budget: dict[float, set[str]] = {}
    for comparison in subject.comparisons:
        budget = _budget(comparison)
        if budget is not None:
            by_budget.setdefault(budget, set()).update(_windows(comparison.value))
    named = re.search(r"burn", f"{subject.query.where} {' '.join(subject.query.annotations.values())}", re.I)
    for budget, windows in by_budget.items():
        if len(windows) < 2 and not (named and windows):
            continue
        yield subject.finding(
            "burn-rate-is-one",
            f"the error ratio is compared with the error budget itself ({budget:g}): that is a burn rate of 1, at "
            "which the budget just lasts; a short dip pages. 14.4 and 6 are what the method asks for.",
            f"more than 14.4 * {budget:g} over 1h and 5m (page), more than 6 * {budget:g} over 6h and 30m",
            corrected=_burning(subject, budget, windows),
        )
        return


def _burning(subject: Subject, budget: float, windows: set[str]) -> str | None:
    """The text with the factor that belongs to its windows, where the budget is written as a plain number."""
    factor = {frozenset({"3600", "300"}): "14.4", frozenset({"21600", "1800"}): "6"}.get(frozenset(windows))
    number = re.compile(r"([>]=?\s*)(\d*\.\d+)(?![\w.])")
    matches = [match for match in number.finditer(subject.query.text) if same_number(float(match[2]), budget)]
    if factor is None or len(matches) != len(windows):
        return None
    return number.sub(
        lambda match: f"{match[1]}{factor} * {match[2]}" if same_number(float(match[2]), budget) else match[0],
        subject.query.text,
    )


def _budget(comparison: Comparison) -> float | None:
    """The error budget when an error ratio, or a success ratio, is compared with the target as it is."""
    if not _is_ratio(comparison.value) or _is_product(comparison):
        return None
    budget = comparison.threshold if comparison.op in (">", ">=") else 1 - comparison.threshold
    if comparison.op not in (">", ">=", "<", "<=") or not math.isfinite(budget):
        return None
    return next((known for known in _BUDGETS if math.isclose(budget, known, rel_tol=1e-6)), None)


def _is_ratio(value: Any) -> bool:
    inner = bare(value)
    if operator(inner) == "-" and constant(inner.lhs) is not None and same_number(constant(inner.lhs) or 0, 1.0):
        inner = bare(inner.rhs)
    if operator(inner) == "/":
        return constant(inner.rhs) is None
    name = metric_name(inner) if isinstance(inner, promql.VectorSelector) else ""
    return name.count(":") > 1 and "ratio" in name


def _is_product(comparison: Comparison) -> bool:
    side = comparison.node.rhs if constant(comparison.node.rhs) is not None else comparison.node.lhs
    return any(operator(node) == "*" for node, _ in walk(side))


def _windows(value: Any) -> set[str]:
    """The windows an error ratio looks at, by its ranges or by the name of its recording rule."""
    found = set()
    for use in uses(value):
        if use.window_s:
            found.add(f"{use.window_s:g}")
        match = _RATE_SUFFIX.search(use.name)
        if match:
            found.add(f"{promql.parse_duration(match[1]).total_seconds():g}")
    return found


def _no_runbook(subject: Subject) -> Iterator[Finding]:
    if any(subject.query.annotations.get(key, "").strip() for key in _RUNBOOK_KEYS):
        return
    recorded = subject.file.recorded
    names = [subject.meaning(use).canonical or use.name for use in subject.uses]
    if all(subject.meaning(use).status == "foreign" and use.name not in ("up", *recorded) for use in subject.uses):
        return
    ours = next((_OUR_RUNBOOKS[name] for name in names if name in _OUR_RUNBOOKS), "")
    yield subject.finding(
        "no-runbook",
        "the alert says what is wrong, not what to do.",
        "annotations: runbook_url" + (f" (`kvoncall runbooks show {ours}` has one)" if ours else ""),
    )
