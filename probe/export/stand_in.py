"""Rules as Prometheus can evaluate them on one engine's version.

Most are exported as they are. A rule that reads events or a store of rounds here reads something else there, that
says the same as far as metrics can: `stand_in` answers with that rule, or raises `NotExposedError`.
"""

from __future__ import annotations

import dataclasses

from probe.alerts.expr import Aggregate, Changes, Compare, Expr, Instant, Logical, OverTime
from probe.alerts.fit import UnfitError, carries, fitted
from probe.alerts.rule import AbsenceSignal, BreachSignal, EventSignal, QualitySignal, Rule, ValueSignal
from probe.export.naming import RULE_BREACH, UP, Names, NotExposedError

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
    return _engine_rule(rule, names)


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


def _engine_rule(rule: Rule, names: Names) -> Rule:
    for metric in sorted(rule.metrics - {UP}):
        names.select(metric)
    try:
        found = fitted(rule, names.dialect, names.version)
    except UnfitError as error:
        raise NotExposedError(str(error)) from None
    assert isinstance(rule.signal, ValueSignal)
    assert isinstance(found.signal, ValueSignal)
    for label in set(rule.signal.per) - set(found.signal.per):
        told = [m for m in sorted(rule.metrics - {UP}) if not carries(names.dialect, m, label, names.version)]
        unlabelled = ", ".join(names.exposed_name(metric) for metric in told)
        names.notes[rule.id] = f"{rule.id} looks at whole targets: no {label} is told of {unlabelled}"
    return found
