"""Rules as Prometheus can evaluate them on one engine's version.

Most are exported as they are. A rule that reads events or a store of rounds here reads something else there, that
says the same as far as metrics can: `stand_in` answers with that rule, or raises `NotExposedError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from probe.alerts.expr import (
    Aggregate,
    Arithmetic,
    Changes,
    ClampMin,
    Compare,
    Expr,
    Increase,
    Instant,
    Logical,
    OverTime,
    leaves,
    metric_of,
)
from probe.alerts.rule import AbsenceSignal, BreachSignal, EventSignal, QualitySignal, Rule, ValueSignal
from probe.export.naming import RULE_BREACH, UP, Names, NotExposedError, split_histogram

REQUIRED_MISSING = "required_metrics_missing"
PROCESS_START = "process_start_time_seconds"
# Where metrics show up at their first event, this one tells that there was one.
FIRST_EVENT = "requests_finished_total"


def stand_in(rule: Rule, names: Names) -> Rule:
    """The rule with a signal that PromQL can read, of the same id, times and severity."""
    signal = rule.signal
    if isinstance(signal, EventSignal):
        # Every process tells its start: only those count that were this engine's within the window.
        known = Aggregate("max", OverTime("max", sign_of(names), rule.window_s))
        restarts = Aggregate("max", Changes(PROCESS_START, rule.window_s))
        found = _reading(rule, restarts, "restarted, by its start time, {value} times in {window}")
        assert isinstance(found.signal, ValueSignal)
        return dataclasses.replace(found, signal=dataclasses.replace(found.signal, when=known))
    if isinstance(signal, AbsenceSignal):
        return _reading(rule, Aggregate("max", Instant(UP)), "the last scrape failed")
    if isinstance(signal, QualitySignal | BreachSignal):
        flag = Aggregate("max", Instant(RULE_BREACH, (("rule", rule.id),)), ("target",))
        said = "kvoncall sees it now, on the target it watches under that name"
        return dataclasses.replace(_reading(rule, flag, said), comparison="==", threshold=1.0)
    if REQUIRED_MISSING in rule.metrics:
        return _schema(rule, names)
    return _engine_rule(rule, signal, names)


def sign_of(names: Names) -> str:
    """A metric that only this engine exposes."""
    candidates = (*names.dialect.required, "requests_running", FIRST_EVENT)
    found = [name for name in candidates if names.has(name)]
    if not found:
        raise NotExposedError(f"no metric tells that a target is {names.dialect.engine}")
    return found[0]


def _reading(rule: Rule, value: Expr, sentence: str) -> Rule:
    return dataclasses.replace(rule, signal=ValueSignal(value=value, sentence=sentence))


def needed(names: Names) -> list[str]:
    """Metrics that every target exposes, as soon as it has served a request."""
    sure = [name for name in names.dialect.required if names.has(name)]
    return [name for name in sure if not (names.dialect.lazy and name == FIRST_EVENT)]


def _schema(rule: Rule, names: Names) -> Rule:
    """Up, and some required metric is not there. Where metrics show up at their first event, only after one."""
    required = [Aggregate("max", Instant(name)) for name in needed(names)]
    if not required:
        raise NotExposedError(f"every metric of {names.dialect.engine} may be missing for a good reason")
    answers: Expr = Compare("==", Aggregate("max", Instant(UP)), 1.0)
    if names.dialect.lazy:
        answers = Logical("and", answers, Aggregate("max", Instant(FIRST_EVENT)))
    there: Expr = required[0]
    for more in required[1:]:
        there = Logical("and", there, more)
    signal = ValueSignal(
        value=Aggregate("max", Instant(UP)),
        sentence="it answers, but not with all of " + ", ".join(names.exposed_name(name) for name in needed(names)),
        condition=Logical("unless", answers, there),
    )
    return dataclasses.replace(rule, signal=signal)


def _engine_rule(rule: Rule, signal: ValueSignal, names: Names) -> Rule:
    read = {metric_of(leaf) for part in signal.parts for leaf in leaves(part)}
    for metric in sorted(read):
        names.select(metric)
    if rule.comparison == "==" and "generation_tokens_total" in read and not names.live("generation_tokens_total"):
        raise NotExposedError("tokens are counted when a request ends, so that a long answer would look like a stall")
    signal = _with_bounds(signal, names.dialect.slo)
    for label in signal.per:
        without = sorted(metric for metric in read if not names.carries(metric, label))
        if without and len(without) < len(read):
            unlabelled = ", ".join(names.exposed_name(metric) for metric in without)
            names.notes[rule.id] = f"{rule.id} looks at whole targets: no {label} is told of {unlabelled}"
            signal = _mapped(signal, partial(_without, label=label))
            signal = dataclasses.replace(signal, per=tuple(name for name in signal.per if name != label))
    return dataclasses.replace(rule, signal=signal)


def _with_bounds(signal: ValueSignal, slo: Mapping[str, float]) -> ValueSignal:
    """The signal with latency bounds that are bucket bounds of this engine."""
    sentence = signal.sentence
    bounds = [(leaf, bound) for part in signal.parts for leaf in leaves(part) if (bound := _bound(leaf)) is not None]
    for leaf, bound in bounds:
        metric = split_histogram(metric_of(leaf))[0]
        if metric not in slo:
            raise NotExposedError(f"no bucket bound of {metric} is known to judge it by")
        sentence = sentence.replace(f"{bound:g} s", f"{slo[metric]:g} s")

    def fit(leaf: Expr) -> Expr:
        if not isinstance(leaf, Increase) or _bound(leaf) is None:
            return leaf
        fitted = f"{slo[split_histogram(leaf.metric)[0]]:g}"
        match = tuple((label, fitted if label == "le" else value) for label, value in leaf.match)
        return dataclasses.replace(leaf, match=match)

    return dataclasses.replace(_mapped(signal, lambda expr: _rebuilt(expr, fit)), sentence=sentence)


def _bound(leaf: Expr) -> float | None:
    match = leaf.match if isinstance(leaf, Increase) else ()
    return next((float(value) for label, value in match if label == "le"), None)


def _without(expr: Expr, label: str) -> Expr:
    """The expression aggregated by target where it was by a label that not all its metrics carry."""

    def drop(part: Expr) -> Expr:
        if not isinstance(part, Aggregate):
            return part
        return dataclasses.replace(part, by=tuple(name for name in part.by if name != label))

    return _rebuilt(expr, drop)


def _mapped(signal: ValueSignal, change: Callable[[Expr], Expr]) -> ValueSignal:
    """The signal with all its expressions changed."""

    def part(expr: Expr | None) -> Expr | None:
        return None if expr is None else change(expr)

    return dataclasses.replace(
        signal,
        value=change(signal.value),
        when=part(signal.when),
        floor=part(signal.floor),
        condition=part(signal.condition),
        numerator=part(signal.numerator),
        denominator=part(signal.denominator),
    )


def _rebuilt(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The expression with every part of it changed, from the inside out."""
    if isinstance(expr, Aggregate | ClampMin):
        return change(dataclasses.replace(expr, of=_rebuilt(expr.of, change)))
    if isinstance(expr, Logical):
        return change(Logical(expr.op, _rebuilt(expr.left, change), _rebuilt(expr.right, change)))
    if isinstance(expr, Arithmetic | Compare):
        right = expr.right if isinstance(expr.right, float | int) else _rebuilt(expr.right, change)
        return change(dataclasses.replace(expr, left=_rebuilt(expr.left, change), right=right))
    return change(expr)
