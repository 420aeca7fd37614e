"""Windowed lines against plain arithmetic: resets, gaps, sums over engines, quantiles; the memory of recent samples."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.history import History
from app.ui import blocks, series, words
from probe.alerts.arithmetic import increase
from probe.alerts.window import Series
from probe.store import Sample, Store

FOREVER = 1e9


@given(
    st.lists(st.tuples(st.integers(500, 20_000), st.floats(0, 100)), min_size=0, max_size=40),
    st.integers(1_000, 60_000),
    st.integers(0, 300_000),
)
@settings(deadline=None, max_examples=200)
def test_increase_agrees_with_the_alert_evaluator(
    steps: list[tuple[int, float]], window_ms: int, moment_ms: int
) -> None:
    ts_ms = np.cumsum([gap for gap, _ in steps])
    values = np.array([value for _, value in steps])  # any order of values: drops are resets
    points = [(ms / 1000, value) for ms, value in zip(ts_ms.tolist(), values.tolist(), strict=True)]
    expected = increase(Series({}, points), moment_ms - window_ms, moment_ms)
    # Milliseconds on both sides, so that a sample at the very edge is in or out for both.
    got = series.increases(ts_ms.astype(float), values, np.array([float(moment_ms)]), float(window_ms), FOREVER)[0]
    if expected is None:
        assert np.isnan(got)
    else:
        assert got == pytest.approx(expected)


def test_rate_is_exact_for_a_steady_counter_that_was_reset() -> None:
    ts = np.arange(0.0, 100.0, 2.0)
    values = np.where(ts < 50, 10 * ts, 10 * (ts - 50))
    got = series.rates(ts, values, np.array([40.0, 98.0]), 20.0, 10.0)
    assert got == pytest.approx([10.0, 10.0])
    across = series.increases(ts, values, np.array([60.0]), 20.0, 10.0)[0]
    assert across == pytest.approx(180.0)  # 10 x 20 less the 20 of the reset interval, counted from 0


def test_a_gap_is_a_gap() -> None:
    ts, values = np.array([0.0, 2.0, 4.0, 60.0]), np.array([1.0, 1.0, 1.0, 2.0])
    held = series.held(ts, values, np.array([-1.0, 5.0, 30.0, 61.0]), max_age=8.0)
    assert np.isnan(held[[0, 2]]).all()
    assert held[[1, 3]].tolist() == [1.0, 2.0]


def test_sums_leave_out_what_is_unknown_and_hottest_is_no_mean() -> None:
    parts = [np.array([1.0, np.nan, np.nan]), np.array([2.0, 3.0, np.nan])]
    assert series.total(parts, 3)[:2].tolist() == [3.0, 3.0]
    assert np.isnan(series.total(parts, 3)[2])
    assert series.hottest(parts, 3)[:2].tolist() == [2.0, 3.0]
    assert np.isnan(series.total([], 2)).all()


def test_quantile_interpolates_and_never_invents_a_value_in_the_open_bucket() -> None:
    bounds = np.array([0.1, 1.0, np.inf])
    increases = np.array([[50.0, 0.0, 0.0], [100.0, 10.0, 0.0], [100.0, 100.0, 0.0]])
    got = series.quantile(0.95, bounds, increases)
    assert got[0] == pytest.approx(0.91)
    assert got[1] == 1.0
    assert np.isnan(got[2])


def test_grid_stands_still_between_redraws() -> None:
    first, later = series.grid(100.0, 1000.0, 90), series.grid(103.0, 1003.0, 90)
    assert first.tolist() == later.tolist()
    assert np.diff(first).tolist() == pytest.approx([10.0] * 89)
    assert first[-1] <= 1000.0


def test_history_reads_on_and_matches_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.history.SHARED_FOR_S", 0.0)
    store.targets.upsert("t", url="http://127.0.0.1:1", kind="external")
    now = time.time()
    history = History(store)

    def write(start: float, engines: tuple[str, ...]) -> None:
        store.samples.write(
            Sample("t", "requests_running", {"engine": e}, start + i, i) for e in engines for i in range(10)
        )
        store.samples.flush()

    write(now - 100, ("0",))
    assert [len(line.ts) for line in history.lines("t", "requests_running", now - 200)] == [10]
    write(now - 50, ("0", "1"))
    lines = {line.labels["engine"]: line for line in history.lines("t", "requests_running", now - 200)}
    assert {engine: len(line.ts) for engine, line in lines.items()} == {"0": 20, "1": 10}
    write(now - 42, ("0",))  # overlaps what was read already
    again = {line.labels["engine"]: line for line in history.lines("t", "requests_running", now - 200)}
    frame = store.samples.range("t", "requests_running", now - 200, labels={"engine": "0"})
    assert again["0"].ts.tolist() == frame["ts"].tolist()
    assert again["0"].values.tolist() == frame["value"].tolist()
    assert len(history.lines("t", "requests_running", now - 45)[0].ts) < 20


def test_blocks_are_counted_and_thinned_without_hiding_use() -> None:
    states = blocks.expand([[0, 3000], [2, 1], [1, 1999]])
    assert blocks.counts(states) == {"free": 3000, "cached": 1999, "used": 1, "shared": 0}
    cells, per_cell = blocks.thin(states, 2048)
    assert per_cell == 3
    assert max(cells) == 2
    assert len(cells) <= 2048
    assert blocks.svg([2] * 64).count("<rect") == 1
    assert blocks.svg([2, 0] * 32).count("<rect") == 64


def test_words() -> None:
    assert words.span(8.2) == "8 s"
    assert words.span(250) == "4 min 10 s"
    assert words.span(3 * 3600 + 300) == "3 h 5 min"
    assert words.seconds(0.0421) == "42 ms"
    assert words.size(6553600) == "6.2 MiB"
    assert words.ratio(0.0534) == "5.3%"
    assert words.count(None) == words.ratio(float("nan")) == "—"
