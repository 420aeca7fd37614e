"""Expressions against values computed by hand, and what happens to them at the edges of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from probe.alerts.arithmetic import Moment, evaluate, quantile
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
    OverTime,
    Quantile,
)
from probe.alerts.window import Window
from probe.store import Sample

T0 = 1_800_000_000.0
INF = math.inf
Row = tuple[str, str, float, float]


def moment(rows: Iterable[Row], now: float, lookback_s: float = 300.0) -> Moment:
    """Rows are (metric, labels as `engine` or `engine le`, seconds after T0, value)."""
    rows = list(rows)
    window = Window({metric: 10_000.0 for metric, *_ in rows})
    for metric, text, at, value in sorted(rows, key=lambda row: row[2]):
        engine, _, le = text.partition(" ")
        labels = {} if metric == "up" else {"engine": engine} | ({"le": le} if le else {})
        window.add([Sample("t", metric, labels, T0 + at, value)])
    return Moment(window, T0 + now, lookback_s)


def one(expr: Expr, at: Moment) -> float | None:
    """The single value of a vector of one target, None if there is none."""
    found = evaluate(Aggregate("sum", expr), at)
    assert set(found) <= {()}
    return found.get(())


def counter(*values: float, start: float = 0.0, step: float = 15.0, engine: str = "0") -> list[Row]:
    return [("c", engine, start + step * i, value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("rows", "now", "expected"),
    [
        # 15 s apart, the first 5 s after the edge, the last 10 s before the other: 30 s become 45 s.
        (counter(100, 103, 106, start=5), 45, 6 * 45 / 30),
        # More than 1.1 steps to either edge: half a step. 10 s become 5 + 10 + 5.
        (counter(100, 103, start=15, step=10), 45, 3 * 20 / 10),
        # Just started: it was 0 a second before the first sample, and is not carried below zero.
        (counter(3, 48, 93, start=10), 40, 90 * (30 + 1) / 30),
        # A reset: 2 before it, then from 0.
        (counter(10, 12, 3, 6, start=0), 45, 2 + 3 + 3),
        (counter(7, 7, 7), 30, 0.0),
        (counter(7), 30, None),
        ([], 30, None),
    ],
)
def test_increase_reaches_the_edges_of_the_window(rows: list[Row], now: float, expected: float | None) -> None:
    grown = one(Increase("c", 45.0), moment([*rows, ("d", "0", 0, 0)], now))
    assert grown == (None if expected is None else pytest.approx(expected, rel=1e-12))


def test_both_ends_of_a_window_belong_to_it() -> None:
    at = moment(counter(0, 10, 20, 30), 45)
    assert one(Increase("c", 45.0), at) == 30.0
    assert one(OverTime("min", "c", 45.0), at) == 0.0
    assert one(OverTime("min", "c", 44.999), at) == 10.0


def test_an_offset_moves_the_window_back() -> None:
    at = moment(counter(0, 15, 30, 130, 230), 60)
    assert one(Increase("c", 30.0, offset_s=30.0), at) == 30.0
    assert one(Increase("c", 30.0), at) == 200.0


def test_the_newest_sample_counts_until_a_scrape_without_it() -> None:
    rows: list[Row] = [("g", "0", 0, 5.0), ("up", "", 0, 1.0)]
    assert one(Instant("g"), moment(rows, 300)) == 5.0
    assert one(Instant("g"), moment(rows, 300.001)) is None
    assert one(Instant("g"), moment([*rows, ("up", "", 15, 0.0)], 14)) == 5.0
    assert one(Instant("g"), moment([*rows, ("up", "", 15, 0.0)], 15)) is None
    # The driver is asked apart from the engine.
    rows = [("device_memory_used_bytes", "0", 0, 5.0), ("up", "", 15, 1.0)]
    assert one(Instant("device_memory_used_bytes"), moment(rows, 20)) == 5.0


def test_over_time_and_changes() -> None:
    rows = counter(4, 4, 1, 7, 4)
    at = moment(rows, 60)
    assert [one(OverTime(how, "c", 60.0), at) for how in ("avg", "min", "max")] == [4.0, 1.0, 7.0]
    assert one(Changes("c", 60.0), at) == 3.0
    assert one(Changes("c", 15.0), at) == 1.0
    assert one(Changes("c", 1.0), at) == 0.0  # one sample
    assert one(Changes("c", 1.0), moment(rows, 70)) is None


def test_derivative_by_hand() -> None:
    # (0, 1), (10, 2), (20, 6): mean time 10, covariance -10*-2 + 10*3 = 50, variance 200.
    at = moment(counter(1, 2, 6, step=10), 20)
    assert one(Derivative("c", 20.0), at) == pytest.approx(0.25, rel=1e-12)
    assert one(Derivative("c", 9.0), at) is None
    assert one(Derivative("c", 60.0), moment(counter(0.1, 0.1, 0.1, 0.1), 45)) == 0.0


BUCKETS = [(0.1, 10.0), (0.5, 30.0), (1.0, 40.0), (INF, 50.0)]


@pytest.mark.parametrize(
    ("q", "buckets", "value", "above_last"),
    [
        (0.5, BUCKETS, 0.1 + 0.4 * (25 - 10) / 20, False),
        (0.1, BUCKETS, 0.05, False),  # half of the first bucket, which begins at 0
        (0.6, BUCKETS, 0.5, False),
        (0.9, BUCKETS, 1.0, True),  # 45 of 50: beyond the last finite bound
        (0.5, [(-1.0, 10.0), (1.0, 12.0), (INF, 12.0)], -1.0, False),
        (0.5, [(1.0, 4.0), (2.0, 3.9), (INF, 8.0)], 1.0, False),  # put in order before it is read
    ],
)
def test_quantile_by_hand(q: float, buckets: list[tuple[float, float]], value: float, above_last: bool) -> None:
    found = quantile(q, buckets)
    assert found is not None
    assert (found.value, found.above_last) == (pytest.approx(value, rel=1e-12), above_last)


@pytest.mark.parametrize("buckets", [[], [(INF, 5.0)], [(1.0, 0.0), (INF, 0.0)], [(1.0, 5.0), (2.0, 5.0)]])
def test_no_quantile_without_observations_or_the_last_bucket(buckets: list[tuple[float, float]]) -> None:
    assert quantile(0.5, buckets) is None


def test_quantile_merges_engines_and_spellings_of_a_bound() -> None:
    """Ten observations below 1 on one engine, ten between 1 and 2 on the other: the median is 1."""
    grown = {"0 1": 10, "0 2.0": 10, "0 +Inf": 10, "1 1.0": 0, "1 2": 10, "1 +Inf": 10}
    rows = [("h_bucket", text, at, 100.0 + rise * at / 60) for text, rise in grown.items() for at in (0, 30, 60)]
    assert one(Quantile(0.5, "h", 60.0), moment(rows, 60)) == pytest.approx(1.0, rel=1e-12)
    assert one(Quantile(0.75, "h", 60.0), moment(rows, 60)) == pytest.approx(1.5, rel=1e-12)


def test_a_bound_is_matched_as_a_number() -> None:
    rows: list[Row] = [("h_bucket", "0 2.50", 0, 3.0), ("h_bucket", "0 25", 0, 4.0)]
    assert one(Instant("h_bucket", match=(("le", "2.5"),)), moment(rows, 0)) == 3.0


def test_a_bucket_without_a_bound_is_none() -> None:
    rows = [("h_bucket", text, at, 10.0 * at) for text in ("0 1", "0 +Inf", "0", "0 many") for at in (0, 30, 60)]
    assert one(Quantile(0.5, "h", 60.0), moment(rows, 60)) == pytest.approx(0.5, rel=1e-12)
    assert one(Instant("h_bucket", match=(("le", "1.0"),)), moment(rows, 60)) == 600.0


PER = ("engine",)
X, Y = Aggregate("sum", Instant("x"), PER), Aggregate("sum", Instant("y"), PER)
TWO: list[Row] = [("x", "0", 0, 1.0), ("x", "1", 0, 5.0), ("y", "1", 0, 2.0), ("y", "2", 0, 3.0)]


def by_engine(expr: Expr, rows: Iterable[Row] = TWO) -> dict[str, float]:
    return {dict(labels)["engine"]: value for labels, value in evaluate(expr, moment(rows, 0)).items()}


def test_vectors_meet_where_their_labels_are_equal() -> None:
    assert by_engine(Arithmetic("-", X, Y)) == {"1": 3.0}
    assert by_engine(Compare(">", X, Y)) == {"1": 5.0}
    assert by_engine(Compare("<", X, Y)) == {}
    assert by_engine(Logical("and", X, Y)) == {"1": 5.0}
    assert by_engine(Logical("unless", X, Y)) == {"0": 1.0}
    assert by_engine(Logical("or", X, Y)) == {"0": 1.0, "1": 5.0, "2": 3.0}
    assert by_engine(ClampMin(X, 2.0)) == {"0": 2.0, "1": 5.0}
    assert evaluate(Aggregate("max", X), moment(TWO, 0)) == {(): 5.0}
    assert evaluate(Aggregate("min", X), moment(TWO, 0)) == {(): 1.0}
    assert evaluate(Aggregate("sum", Instant("z")), moment(TWO, 0)) == {}


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(1.0, 0.0, INF), (-1.0, 0.0, -INF), (0.0, 0.0, math.nan), (INF, 2.0, INF), (6.0, 3.0, 2.0)]
)
def test_division(a: float, b: float, expected: float) -> None:
    found = by_engine(Arithmetic("/", X, Y), [("x", "0", 0, a), ("y", "0", 0, b)])
    assert found == pytest.approx({"0": expected}, nan_ok=True)


@pytest.mark.parametrize("op", [">", "<", ">=", "<=", "=="])
def test_nothing_compares_with_what_is_no_number(op: str) -> None:
    nothing = Arithmetic("/", Aggregate("sum", Instant("z")), Aggregate("sum", Instant("z")))
    at = moment([("z", "0", 0, 0.0)], 0)
    assert len(evaluate(nothing, at)) == 1
    assert evaluate(Compare(op, nothing, 0.0), at) == {}  # type: ignore[arg-type]
    assert evaluate(Compare(op, nothing, nothing), at) == {}  # type: ignore[arg-type]


def test_the_greatest_number_is_found_beside_what_is_none() -> None:
    ratio = Arithmetic("/", X, Y)
    rows: list[Row] = [("x", "0", 0, 0.0), ("y", "0", 0, 0.0), ("x", "1", 0, 4.0), ("y", "1", 0, 2.0)]
    assert evaluate(Aggregate("max", ratio), moment(rows, 0)) == {(): 2.0}
    assert evaluate(Aggregate("min", ratio), moment(rows, 0)) == {(): 2.0}
