"""Rollups against the definition, computed here from all samples at once; on both databases."""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict

import pandas as pd
import pytest
from sqlalchemy import select

from probe.store import Sample, Store, apply_retention
from probe.store.models import SeriesRow

T0 = 1_800_000_000.0 - 1_800_000_000.0 % 3600
DAY = 86_400.0


@pytest.fixture
def watched(store: Store) -> Store:
    store.targets.upsert("e", url="http://x", kind="external")
    return store


def trace(seed: int, minutes: int) -> list[Sample]:
    """Two counters that are reset now and then and a gauge, with pauses of minutes and one of more than an hour."""
    rng = random.Random(seed)
    samples = []
    for metric, labels in (("c_total", {"engine": "0"}), ("c_total", {"engine": "1"}), ("g", {})):
        at, value = T0 + rng.uniform(0, 30), 0.0
        while at < T0 + 60 * minutes:
            if metric == "g":
                value = rng.choice([0.0, 0.25, rng.random()])
            else:
                value = rng.randint(0, 3) if rng.random() < 0.05 else value + rng.choice([0, 1, 7])
            samples.append(Sample("e", metric, labels, round(at, 3), float(value)))
            pause = rng.random()
            at += 5000.0 if pause < 0.004 else 200.0 if pause < 0.03 else rng.uniform(4, 20)
    return samples


def expected(samples: list[Sample], metric: str, step_s: int) -> dict[tuple[str, float], dict[str, float]]:
    """Per engine and step: the columns of a coarse frame."""
    by_engine: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: s.ts):
        if sample.metric == metric:
            by_engine[sample.labels.get("engine", "")].append(sample)
    found: dict[tuple[str, float], dict[str, float]] = {}
    for engine, line in by_engine.items():
        before: float | None = None
        for sample in line:
            key = (engine, sample.ts - sample.ts % step_s)
            row = found.setdefault(key, {"count": 0, "increase": 0, "resets": 0, "total": 0, "low": 9, "high": -9})
            row["count"] += 1
            row["total"] += sample.value
            row["low"], row["high"] = min(row["low"], sample.value), max(row["high"], sample.value)
            row["last"] = sample.value
            if before is not None:
                is_reset = sample.value < before
                row["increase"] += sample.value if is_reset else sample.value - before
                row["resets"] += is_reset
            before = sample.value
    return found


def check(frame: pd.DataFrame, want: dict[tuple[str, float], dict[str, float]], *, gauge: bool) -> None:
    engines = frame["engine"] if "engine" in frame else [""] * len(frame)
    rows = {(e, r.ts): r for e, r in zip(engines, frame.itertuples(index=False), strict=True)}
    assert list(rows) == sorted(want)
    for key, row in rows.items():
        assert (row.count, row.last) == (want[key]["count"], want[key]["last"])
        if gauge:
            assert row.value == pytest.approx(want[key]["total"] / want[key]["count"])
            assert (row.low, row.high) == (want[key]["low"], want[key]["high"])
            assert math.isnan(row.increase)
        else:
            assert (row.increase, row.resets, row.value) == tuple(want[key][n] for n in ("increase", "resets", "last"))
            assert math.isnan(row.low)


def test_rollups_agree_with_the_definition_whenever_samples_come(watched: Store) -> None:
    """Every twelfth sample comes late, some by hours; rollups are made now and then."""
    rng = random.Random(1)
    samples = trace(seed=1, minutes=150)
    arrivals = sorted((s.ts + (rng.choice([40.0, 400.0, 9000.0]) if rng.random() < 1 / 12 else 0), s) for s in samples)
    next_rollup = T0 + 600
    for at, sample in arrivals:
        if at > next_rollup:
            watched.flush()
            watched.rollups.advance(at)
            next_rollup = at + rng.choice([60, 300, 3000])
        watched.samples.write([sample])
    watched.flush()
    for now in (T0, T0 + 10 * DAY):  # the last hour from raw samples, then from rollups
        watched.rollups.advance(now)
        for step_s in (60, 600, 7200):
            for metric in ("c_total", "g"):
                frame = watched.samples.range("e", metric, T0, step_s=step_s)
                check(frame, expected(samples, metric, step_s), gauge=metric == "g")
    assert watched.rollups.advance(T0 + 10 * DAY) == 0


def test_nothing_is_missed_that_another_process_writes_meanwhile(store_location: str) -> None:
    """Samples of minutes that are being rolled up: counted in them, or noted as late."""
    with Store.open(store_location) as leader, Store.open(store_location) as other:
        other.targets.upsert("e", url="http://x", kind="external")

        def write() -> None:
            for k in range(120):
                other.samples.write([Sample("e", "c_total", {"n": str(n)}, T0 + 7 * k, float(k)) for n in range(5)])
                other.flush()

        writing = threading.Thread(target=write)
        writing.start()
        at = T0
        while writing.is_alive():
            leader.rollups.advance(at)
            at += 60  # sooner than the samples come: most are late
        writing.join()
        leader.rollups.advance(T0 + DAY)
        frame = leader.samples.range("e", "c_total", T0, step_s=60)
        assert (frame["count"].sum(), frame["increase"].sum()) == (600, 5 * 119)


def test_increase_spans_a_pause_longer_than_raw_samples_are_kept(watched: Store) -> None:
    watched.samples.write([Sample("e", "c_total", {}, T0 + 10, 100.0), Sample("e", "c_total", {}, T0 + 20, 150.0)])
    watched.flush()
    apply_retention(watched, T0 + 20 * DAY)
    assert watched.samples.range("e", "c_total", 0).empty
    watched.samples.write([Sample("e", "c_total", {}, T0 + 20 * DAY + 5, 170.0)])
    watched.flush()
    for _ in range(2):  # from raw samples, then rolled up
        frame = watched.samples.range("e", "c_total", T0, step_s=60)
        assert frame["increase"].tolist() == [50.0, 20.0]
        watched.rollups.advance(T0 + 20 * DAY + 600)


def test_a_frame_says_what_it_was_read_from(watched: Store) -> None:
    """Hours where minutes are gone, minutes before raw samples, and the same sums in each."""
    ages = [100 * DAY, 40 * DAY, 20 * DAY, 3 * DAY, 30.0]
    now = T0 + 120 * DAY
    watched.samples.write(
        Sample("e", "c_total", {}, now - age - 60 * k, 10.0 * n + k)
        for n, age in enumerate(ages)
        for k in range(3, -1, -1)
    )
    watched.flush()
    apply_retention(watched, now)
    assert len(watched.samples.range("e", "c_total", 0)) == 8
    fine = watched.samples.range("e", "c_total", 0, step_s=60)
    coarse = watched.samples.range("e", "c_total", 0, step_s=3600)
    assert fine["resolution_s"].tolist() == [3600] * 4 + [60] * 12
    assert fine["increase"].sum() == coarse["increase"].sum()
    assert fine.attrs["resolution_s"] == 3600
    assert set(coarse["resolution_s"]) == {60, 3600}
    assert watched.samples.range("e", "c_total", now - 4 * DAY).attrs["resolution_s"] == 0


def test_a_sample_older_than_what_is_kept_changes_no_rollup(watched: Store) -> None:
    watched.samples.write([Sample("e", "c_total", {}, T0 + 10 * k, float(k)) for k in range(12)])
    watched.flush()
    apply_retention(watched, T0 + 10 * DAY)
    before = watched.samples.range("e", "c_total", 0, step_s=60)
    watched.samples.write([Sample("e", "c_total", {}, T0 + 15, 0.0)])
    watched.flush()
    apply_retention(watched, T0 + 11 * DAY)
    pd.testing.assert_frame_equal(watched.samples.range("e", "c_total", 0, step_s=60), before)


def test_rollups_go_when_their_time_is_over(watched: Store) -> None:
    watched.samples.write([Sample("e", "g", {"engine": str(k)}, T0 + k, 1.0) for k in range(5)])
    watched.flush()
    apply_retention(watched, T0 + 31 * DAY)
    assert set(watched.samples.range("e", "g", 0, step_s=60)["resolution_s"]) == {3600}
    apply_retention(watched, T0 + 399 * DAY)
    assert len(watched.samples.range("e", "g", 0, step_s=60)) == 5
    apply_retention(watched, T0 + 401 * DAY)
    assert watched.samples.range("e", "g", 0, step_s=60).empty
    with watched._database.read() as session:
        assert session.scalars(select(SeriesRow.id)).all() == []


def test_alerts_only_keeps_the_newest_value_and_what_was_measured(watched: Store) -> None:
    watched.settings.set("series_in_store", "alerts-only")
    watched.samples.write_scrape([Sample("e", "g", {}, T0 + k, float(k)) for k in range(3)])
    watched.samples.write([Sample("e", "quality_score", {}, T0, 0.9)])
    watched.flush()
    assert watched.samples.range("e", "g", 0).empty
    assert [s.value for s in watched.samples.latest("e")["g"]] == [2.0]
    assert watched.samples.range("e", "quality_score", 0)["value"].tolist() == [0.9]
    watched.settings.set("series_in_store", "all")
    watched.samples.write_scrape([Sample("e", "g", {}, T0 + 5, 5.0)])
    watched.flush()
    assert watched.samples.range("e", "g", 0)["value"].tolist() == [5.0]
