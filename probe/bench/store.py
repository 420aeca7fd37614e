"""The store's speed and size: ingest, rollups, bytes a sample, and how soon a month of one target is read.

Scrapes look like those of a fleet: many targets, each with some hundred series of which a third are gauges and the rest
counters, half of them growing. Nothing is laid down in another way than the watch does it. Wall times depend on what
else the machine does; the processor times beside them much less.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from probe.bench import Report
from probe.store import Sample, Store
from probe.store.settings import DEFAULTS

START = 1_790_002_800.0  # on the hour
INTERVAL_S = 5.0
HOUR_S, DAY_S = 3_600.0, 86_400.0
DAYS = 30
MONTH_TARGETS = 2
VIEW_METRICS = 12  # what a page of one target draws


def bench_store(
    *, report: Report, targets: int = 50, series: int = 120, minutes: int = 5, rounds: int = 5, url: str | None = None
) -> dict[str, Any]:
    """Figures by name, on SQLite in a temporary directory, or in the (empty) database at `url`."""
    with tempfile.TemporaryDirectory(prefix="kvoncall-bench-") as name, Store.open(url or Path(name)) as store:
        for target in range(targets):
            store.targets.upsert(f"t{target}", url="http://127.0.0.1:1", kind="external")
        report(f"{DAYS} days of {min(targets, MONTH_TARGETS)} targets, a sample an hour")
        _month(store, min(targets, MONTH_TARGETS), series)
        result: dict[str, Any] = {"targets": targets, "series_per_target": series, "interval_s": INTERVAL_S}
        report(f"{targets} targets x {series} series, a scrape every {INTERVAL_S:.0f} s for {minutes} minutes")
        result |= _ingest(store, targets, series, minutes)
        result |= _roll_up(store, minutes, result["samples"], result["raw_bytes_per_sample"])
        report(f"{DAYS} days of one target, {rounds} rounds")
        return result | _view(store, rounds)


def _scrapes(targets: int, series: int, start: float, count: int, interval_s: float) -> Iterator[list[Sample]]:
    """One target's scrape after the other, as they come in."""
    rng = random.Random(0)
    labels = [{"engine": "0", "model_name": "m", "le": str(i)} for i in range(series)]
    names = [f"gauge_{i // 10}" if i % 3 == 0 else f"events_{i // 10}_total" for i in range(series)]
    values = [[0.0] * series for _ in range(targets)]
    for scrape in range(count):
        for target, now in enumerate(values):
            ts = start + (scrape + target / targets) * interval_s
            for i in range(series):
                if i % 3 == 0:
                    now[i] = rng.random() if i % 2 else float(rng.randrange(200))
                elif i % 2:
                    now[i] += rng.randrange(50)
            yield [Sample(f"t{target}", *row[:2], ts, row[2]) for row in zip(names, labels, now, strict=True)]


def _month(store: Store, targets: int, series: int) -> None:
    for scrape in _scrapes(targets, series, START - DAYS * DAY_S, int(DAYS * DAY_S / HOUR_S), HOUR_S):
        store.samples.write_scrape(scrape)
    store.flush()
    store.rollups.advance(START)


def _ingest(store: Store, targets: int, series: int, minutes: int) -> dict[str, Any]:
    scrapes = list(_scrapes(targets, series, START, int(minutes * 60 / INTERVAL_S), INTERVAL_S))
    samples = len(scrapes) * series
    before = store.used_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    for scrape in scrapes:
        store.samples.write_scrape(scrape)
    store.flush()
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "samples": samples,
        "ingest_samples_per_s": round(samples / elapsed),
        "ingest_samples_per_cpu_s": round(samples / cpu),
        "raw_bytes_per_sample": round((store.used_bytes() - before) / samples, 1),
    }


def _roll_up(store: Store, minutes: int, samples: int, raw_bytes: float) -> dict[str, Any]:
    """Bytes a sample after rollup: of all that is kept of 30 days, by the settings' defaults."""
    before, start = store.used_bytes(), time.perf_counter()
    store.rollups.advance(START + minutes * 60 + 60)
    elapsed, minute_bytes = time.perf_counter() - start, (store.used_bytes() - before) / samples
    raw_share = min(1.0, DEFAULTS["retention_days"] / DAYS)
    minute_share = min(1.0, DEFAULTS["minute_retention_days"] / DAYS)
    return {
        "rollup_s_per_minute": round(elapsed / minutes, 3),
        "minute_bytes_per_sample": round(minute_bytes, 1),
        # An hour's row is as long as a minute's, and there is one for sixty.
        "kept_bytes_per_sample": round(raw_bytes * raw_share + minute_bytes * (minute_share + 1 / 60), 1),
    }


def _view(store: Store, rounds: int) -> dict[str, Any]:
    """A page of 30 days: `VIEW_METRICS` metrics of one target by hours; medians."""
    names = [name for i in range(VIEW_METRICS // 2) for name in (f"gauge_{i}", f"events_{i}_total")]
    times, points = [], 0
    for _ in range(rounds):
        start, cpu = time.perf_counter(), time.process_time()
        frames = store.samples.ranges("t0", names, START - DAYS * DAY_S, step_s=HOUR_S)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
        points = sum(len(frame) for frame in frames.values())
    return {
        "view_30d_points": points,
        "view_30d_ms": round(statistics.median(t for t, _ in times) * 1e3, 1),
        "view_30d_cpu_ms": round(statistics.median(t for _, t in times) * 1e3, 1),
    }
