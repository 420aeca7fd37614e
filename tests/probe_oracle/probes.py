"""Random expressions over what a trace holds, with the PromQL that says the same."""

from __future__ import annotations

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
    Logical,
    Match,
    OverTime,
    Quantile,
)
from probe.export.naming import Selected, le_matcher
from probe.export.promql import duration, promql
from tests.probe_oracle.traces import BOUNDS, COUNTERS, GAUGES

HISTOGRAMS = tuple(BOUNDS)
PER = ("engine",)


class Canonical:
    """Names for `promql`: metrics keep their canonical names, a target is all there is."""

    def labels(self, by: tuple[str, ...]) -> tuple[str, ...]:
        return by

    def select(self, canonical: str, match: Match = ()) -> Selected:
        matchers = [le_matcher(float(v)) if k == "le" else f'{k}="{v}"' for k, v in match]
        return Selected(f"{canonical}{{{','.join(matchers)}}}")


def text_of(expr: Expr) -> str:
    """PromQL over canonical names, as the exports write it."""
    return promql(expr, Canonical())  # type: ignore[arg-type]


def probes(rng: np.random.Generator, count: int) -> list[tuple[str, Expr, str]]:
    """(kind, expression, PromQL); every kind is among the first eight."""
    return [_probe(rng, i) for i in range(count)]


def _probe(rng: np.random.Generator, index: int) -> tuple[str, Expr, str]:
    window = float(rng.choice([60, 75, 120, 300, 600, 1800, 3600, 5400]))
    counter, gauge = str(rng.choice(COUNTERS)), str(rng.choice(GAUGES))
    histogram = str(rng.choice(HISTOGRAMS))
    offset = float(rng.choice([0, 0, 60, 600]))
    how = ("avg", "min", "max")[int(rng.integers(3))]
    match index % 8:
        case 0:
            expr: Expr = Increase(counter, window, offset_s=offset)
            return "increase", expr, text_of(expr)
        case 1:  # our rate is growth by time
            name, matched = f"{histogram}_bucket", (("le", repr(float(rng.choice(BOUNDS[histogram])))),)
            leaf = Increase(name, window, matched)
            selector = Canonical().select(name, matched).selector
            return "rate", Arithmetic("/", leaf, window), f"rate({selector}[{duration(window)}])"
        case 2:
            by = PER if rng.random() < 0.5 else ()
            top = Aggregate("sum", Increase(counter, window), by)
            expr = Arithmetic("/", top, Aggregate("sum", Increase(str(rng.choice(COUNTERS)), window), by))
            return "ratio", expr, text_of(expr)
        case 3:
            expr = Quantile(float(rng.choice([0.5, 0.9, 0.99])), histogram, window)
            return "quantile", expr, text_of(expr)
        case 4:
            expr = OverTime(how, gauge, window)  # type: ignore[arg-type]
            return f"{how}_over_time", expr, text_of(expr)
        case 5:
            driver = rng.random() < 0.5
            expr = Derivative("device_memory_used_bytes" if driver else gauge, window)
            return "deriv", expr, text_of(expr)
        case 6:
            expr = Changes(str(rng.choice([gauge, counter])), window)
            return "changes", expr, text_of(expr)
        case _:
            expr = _combined(rng, gauge, window)
            return "combined", expr, text_of(expr)


def _combined(rng: np.random.Generator, gauge: str, window: float) -> Expr:
    now = Aggregate(("sum", "max", "min")[int(rng.integers(3))], Instant(gauge), PER)  # type: ignore[arg-type]
    other = Aggregate("max", OverTime("avg", str(rng.choice(GAUGES)), window), PER)
    compare = Compare((">", "<", ">=", "<=", "==")[int(rng.integers(5))], now, float(rng.integers(0, 9)))  # type: ignore[arg-type]
    logical = Logical(("and", "or", "unless")[int(rng.integers(3))], now, compare)  # type: ignore[arg-type]
    return (
        Logical("unless", other, compare),
        Arithmetic(("+", "-", "*", "/")[int(rng.integers(4))], now, other),  # type: ignore[arg-type]
        ClampMin(Arithmetic("-", now, other), float(rng.integers(0, 3))),
        Compare(">=", other, now),
        logical,
        now,
    )[int(rng.integers(6))]
