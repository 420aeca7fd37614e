"""How a value is said to people: its number by unit, what it rests on (n of m engines, span, resets)."""

from __future__ import annotations

import math

from probe.alerts.arithmetic import Moment
from probe.alerts.expr import Increase, metric_of
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.window import Labels, Series, to_ms


def sentence(
    rule: Rule,
    signal: ValueSignal,
    value: float | None,
    numerator: float | None,
    denominator: float | None,
    key: Labels,
) -> str:
    """The rule's sentence with its figures."""
    is_rate = signal.unit == "percent" and rule.signal is signal and denominator is not None and denominator <= 1
    part = "percent" if is_rate else "count"
    return signal.sentence.format(
        value=number(value, signal.unit),
        numerator=number(numerator, part),
        denominator=number(denominator, part),
        window=seconds(rule.window_s),
        threshold=number(rule.threshold, signal.unit),
        where="".join(f" on {name} {label or 'unnamed'}" for name, label in key),
    )


def number(value: float | None, unit: str) -> str:
    """A value in its unit, short."""
    if value is None or math.isnan(value):
        return "nothing known"
    if math.isinf(value):
        return "infinitely many" if value > 0 else "minus infinity"
    if unit == "percent":
        return f"{value:.1%}"
    if unit == "seconds":
        return seconds(value)
    return f"{value:,.1f}".removesuffix(".0")


def seconds(span_s: float) -> str:
    """A span of time."""
    for size, name in ((3600, "h"), (60, "min")):
        if span_s >= 2 * size or (span_s >= size and span_s % size == 0):
            return f"{span_s / size:.3g} {name}"
    return f"{span_s:.3g} s"


def coverage(rule: Rule, signal: ValueSignal, at: Moment) -> str:
    """What the value rests on: engines that have data now, its age, how much of the window is covered, resets in it."""
    first = metric_of(signal.readings[0])
    said = engines(first, at)
    ranges = [leaf.window_s for leaf in signal.readings if isinstance(leaf, Increase)]
    window_s = max(ranges, default=rule.window_s)
    start_ms, resets = at.now_ms - to_ms(window_s), 0
    spans, newest = [], 0
    for series in at.window.series(first):
        i, j = series.span(start_ms, at.now_ms)
        if j > i:
            newest = max(newest, series.times[j - 1])
            spans.append((series.times[j - 1] - series.times[i]) / 1000)
            resets += len(series.drops(series.times[i], series.times[j - 1])) if ranges else 0
    if spans:
        said += f", {(at.now_ms - newest) / 1000:.0f} s old, {max(spans):.0f} of {window_s:.0f} s"
    return said + (f", {resets} counter reset{'s' if resets > 1 else ''} counted from 0" if resets else "")


def engines(metric: str, at: Moment) -> str:
    """How many of the engines that were ever seen with a metric have a value now."""
    series, now = at.window.series(metric), at.fresh(metric)
    known = len({_engine(s) for s in series}) if len(series) > 1 else len(series)
    fresh = len({_engine(s) for s in now}) if len(now) > 1 else len(now)
    return f"{fresh} of {known} engine{'s' if known > 1 else ''}"


def why_stale(metric: str, at: Moment, now: float) -> str | None:
    """Why a metric has no value now, or None if it has."""
    if at.fresh(metric):
        return None
    newest = max((s.newest_ms for s in at.window.series(metric)), default=None)
    if newest is None:
        return f"no data: {metric} was never read"
    return f"no data for {now - newest / 1000:.0f} s: state frozen"


def _engine(series: Series) -> tuple[str, str]:
    return series.labels.get("model_name", ""), series.labels.get("engine", "")
