"""Evaluating expressions on samples, to the letter as Prometheus 2.42 does (promql/functions.go, quantile.go).

Ranges include both ends. A counter's growth adds what was lost at each reset and is extrapolated to the window's
edges: by the distance to the edge where that is less than 1.1 of the mean distance between samples, else by half
that distance, and never below zero. The newest sample is none once a later scrape did not bring it. Growth that
really happened, for people who count requests, is `growth`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from probe.alerts.expr import (
    Aggregate,
    Arithmetic,
    Changes,
    ClampMin,
    Compare,
    Derivative,
    Expr,
    Increase,
    Instant,
    Leaf,
    Logical,
    Match,
    OverTime,
    Quantile,
)
from probe.alerts.window import Labels, Series, Window, to_ms

Vector = dict[Labels, float]
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}

# Read from the driver in a rhythm of its own, so a later scrape says nothing about it.
OWN_RHYTHM = "device_"


@dataclass(frozen=True)
class Growth:
    """Growth of a counter as it was seen: not extrapolated. Times of the first and last sample used, in seconds."""

    value: float
    resets: int
    first_ts: float
    last_ts: float


@dataclass(frozen=True)
class QuantileReading:
    """A quantile; `above_last`: it lies above the last finite bucket, whose bound `value` is then."""

    value: float
    above_last: bool


class Moment:
    """One window of samples, looked at as of `now` (Unix seconds). `lookback_s`: age past which no sample counts."""

    def __init__(self, window: Window, now: float, lookback_s: float) -> None:
        self.window = window
        self.now_ms = to_ms(now)
        self._lookback_ms = to_ms(lookback_s)
        self._tried = window.attempted_ms(self.now_ms)
        self._fresh: dict[str, list[Series]] = {}
        self._leaves: dict[Expr, Vector] = {}
        self._parts: dict[int, tuple[Expr, Vector]] = {}

    def newest(self, series: Series, metric: str) -> float | None:
        """A series' value now; None when it is stale or too old."""
        point = series.at(self.now_ms)
        if point is None or point[0] < self.now_ms - self._lookback_ms:
            return None
        if self._tried is not None and point[0] < self._tried and not metric.startswith(OWN_RHYTHM):
            return None
        return point[1]

    def fresh(self, metric: str) -> list[Series]:
        """The series of a metric that have a value now."""
        found = self._fresh.get(metric)
        if found is None:
            found = [s for s in self.window.series(metric) if self.newest(s, metric) is not None]
            self._fresh[metric] = found
        return found

    def value(self, expr: Expr) -> Vector:
        """The vector of an expression, evaluated once; not to be changed.

        Readings are told apart by what they say, what is made of them by identity: hashing a tree costs more than
        evaluating it.
        """
        known = self._parts.get(id(expr))
        if known is not None:
            return known[1]
        combine = _COMBINE.get(type(expr))
        if combine is not None:
            vector = combine(expr, self)
        elif (found := self._leaves.get(expr)) is not None:
            vector = found
        else:
            vector = self._leaves[expr] = _leaf(cast("Leaf", expr), self)
        self._parts[id(expr)] = (expr, vector)  # the expression too, so that its id stays its own
        return vector


def evaluate(expr: Expr, at: Moment) -> Vector:
    """The vector of an expression; empty where there is nothing to say."""
    return at.value(expr)


def _leaf(expr: Leaf, at: Moment) -> Vector:
    if isinstance(expr, Quantile):
        reading = quantile(expr.q, bucket_increases(expr.metric, expr.window_s, at))
        return {} if reading is None else {(): reading.value}
    vector: Vector = {}
    for series in at.window.series(expr.metric):
        if expr.match and not matches(series.labels, expr.match):
            continue
        value = _read(expr, series, at)
        if value is not None:
            vector[series.key] = value
    return vector


def _read(expr: Instant | Increase | OverTime | Changes | Derivative, series: Series, at: Moment) -> float | None:
    if isinstance(expr, Instant):
        return at.newest(series, expr.metric)
    if isinstance(expr, Increase):
        end = at.now_ms - to_ms(expr.offset_s)
        return increase(series, end - to_ms(expr.window_s), end)
    i, j = series.span(at.now_ms - to_ms(expr.window_s), at.now_ms)
    if isinstance(expr, Derivative):
        return _slope(series, i, j) if j - i >= 2 else None
    if i == j:
        return None
    values = series.values[i:j]
    if isinstance(expr, Changes):
        return float(sum(a != b for a, b in itertools.pairwise(values)))
    if expr.how == "avg":
        return _mean(values)
    return min(values) if expr.how == "min" else max(values)


def matches(labels: Mapping[str, str], match: Match) -> bool:
    """Whether a series carries the labels; `le` by its number, as exporters spell it differently."""
    for name, wanted in match:
        found = labels.get(name, "")
        if found != wanted and not (name == "le" and _bound(found) == float(wanted)):
            return False
    return True


def increase(series: Series, start_ms: int, end_ms: int) -> float | None:
    """Growth of a counter in [start, end], extrapolated; None with fewer than two samples."""
    i, j = series.span(start_ms, end_ms)
    if j - i < 2:
        return None
    first_ms, last_ms = series.times[i], series.times[j - 1]
    first = series.values[i]
    grown = series.values[j - 1] - first
    for lost in series.drops(first_ms, last_ms):
        grown += lost
    sampled = (last_ms - first_ms) / 1000
    mean_step = sampled / (j - i - 1)
    to_start, to_end = (first_ms - start_ms) / 1000, (end_ms - last_ms) / 1000
    if grown > 0 and first >= 0:
        to_start = min(to_start, sampled * (first / grown))  # a counter was never below zero
    limit = mean_step * 1.1
    covered = sampled
    covered += to_start if to_start < limit else mean_step / 2
    covered += to_end if to_end < limit else mean_step / 2
    return grown * (covered / sampled)


def growth(series: Series, start: float, end: float) -> Growth | None:
    """Growth of a counter between its first and last sample in [start, end] seconds; None with fewer than two."""
    i, j = series.span(to_ms(max(start, 0.0)), to_ms(end))
    if j - i < 2:
        return None
    lost = series.drops(series.times[i], series.times[j - 1])
    grown = series.values[j - 1] - series.values[i] + sum(lost)
    return Growth(grown, len(lost), series.times[i] / 1000, series.times[j - 1] / 1000)


def _bound(le: str) -> float | None:
    """A bucket's bound; None for what is no number, which is no bucket."""
    try:
        return float(le)
    except ValueError:
        return None


def bucket_increases(metric: str, window_s: float, at: Moment, match: Match = ()) -> list[tuple[float, float]]:
    """(upper bound, growth) of a histogram's buckets, those of all engines (that `match`) added up, by bound."""
    merged: dict[float, float] = {}
    for series in at.window.series(f"{metric}_bucket"):
        if not matches(series.labels, match):
            continue
        bound = _bound(series.labels.get("le", ""))
        grown = increase(series, at.now_ms - to_ms(window_s), at.now_ms)
        if grown is not None and bound is not None:
            merged[bound] = merged.get(bound, 0.0) + grown
    return sorted(merged.items())


def quantile(q: float, buckets: Sequence[tuple[float, float]]) -> QuantileReading | None:
    """The q-quantile (0 < q < 1) of cumulative buckets [(bound, count)] by bound; None without observations.

    Linear within a bucket; the first one begins at 0 when its bound is positive.
    """
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]):
        return None
    counts: list[float] = []
    for _, count in buckets:
        counts.append(max(count, counts[-1]) if counts else count)  # extrapolation may break the order by a hair
    if counts[-1] == 0:
        return None
    rank = q * counts[-1]
    b = next((i for i, count in enumerate(counts[:-1]) if count >= rank), len(counts) - 1)
    if b == len(counts) - 1:
        return QuantileReading(buckets[-2][0], above_last=True)
    bound = buckets[b][0]
    if b == 0 and bound <= 0:
        return QuantileReading(bound, above_last=False)
    start, below = (buckets[b - 1][0], counts[b - 1]) if b > 0 else (0.0, 0.0)
    return QuantileReading(start + (bound - start) * ((rank - below) / (counts[b] - below)), above_last=False)


def _mean(values: Sequence[float]) -> float:
    """Running mean with compensated sums: a threshold met exactly must be met exactly here too."""
    mean = lost = 0.0
    for count, value in enumerate(values, 1):
        step = value / count - mean / count
        total = mean + step
        lost += (mean - total) + step if abs(mean) >= abs(step) else (step - total) + mean
        mean = total
    return mean + lost


def _slope(series: Series, i: int, j: int) -> float:
    """Least squares, from the first sample, so that nothing is lost on great numbers; a constant has no slope."""
    y = np.array(series.values[i:j])
    y -= y[0]
    if not y.any():
        return 0.0
    x = np.array(series.times[i:j], dtype=float)
    x = (x - x[0]) / 1000
    sum_x = x.sum()
    return float((x @ y - sum_x * y.sum() / len(x)) / (x @ x - sum_x * sum_x / len(x)))


def _aggregate(expr: Aggregate, at: Moment) -> Vector:
    vector = at.value(expr.of)
    if len(vector) == 1:  # most targets have one engine
        ((labels, value),) = vector.items()
        return {tuple([lb for lb in labels if lb[0] in expr.by and lb[1]]) if expr.by else (): value}
    if expr.by:
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(tuple([lb for lb in labels if lb[0] in expr.by and lb[1]]), []).append(value)
    else:
        groups = {(): list(vector.values())} if vector else {}
    join = _JOIN[expr.how]
    return {key: values[0] if len(values) == 1 else join(values) for key, values in groups.items()}


def _greatest(values: list[float]) -> float:
    """NaN only where there is no number."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _least(values: list[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _clamp_min(expr: ClampMin, at: Moment) -> Vector:
    return {key: max(value, expr.least) for key, value in at.value(expr.of).items()}


def _arithmetic(expr: Arithmetic, at: Moment) -> Vector:
    operate, left, right = _OPERATE[expr.op], at.value(expr.left), expr.right
    if type(right) in _NUMBERS:
        return {key: operate(value, right) for key, value in left.items()}
    others = at.value(right)  # type: ignore[arg-type]
    return {key: operate(value, others[key]) for key, value in left.items() if key in others}


def _divide(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def _compare(expr: Compare, at: Moment) -> Vector:
    compare, left, right = _HOLDS[expr.op], at.value(expr.left), expr.right
    if type(right) in _NUMBERS:
        return {key: value for key, value in left.items() if compare(value, right)}
    others = at.value(right)  # type: ignore[arg-type]
    return {key: value for key, value in left.items() if key in others and compare(value, others[key])}


def _logical(expr: Logical, at: Moment) -> Vector:
    left, right = at.value(expr.left), at.value(expr.right)
    if expr.op == "or":
        return {**right, **left}
    return {key: value for key, value in left.items() if (key in right) == (expr.op == "and")}


def holds(op: str, a: float, b: float) -> bool:
    """Whether a comparison holds; with NaN none does."""
    return _HOLDS[op](a, b)


_COMBINE: dict[type, Callable[[Any, Moment], Vector]] = {
    Aggregate: _aggregate,
    ClampMin: _clamp_min,
    Arithmetic: _arithmetic,
    Compare: _compare,
    Logical: _logical,
}
_JOIN: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": _greatest, "min": _least}
_OPERATE: dict[str, Callable[[float, Any], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
}
_NUMBERS = frozenset((float, int))
