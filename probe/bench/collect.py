"""Watching many targets: CPU share, memory and lateness of the monitor, and how soon it sees a change.

The targets are pages of vLLM's size, served by another process, so that the figures are the monitor's alone: scraping,
parsing, evaluating every rule and storing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from probe.alerts.expr import Aggregate, Instant
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.rules import DEFAULT_RULES
from probe.bench import Report
from probe.monitor import Monitor
from probe.store import Store

TARGETS = 100
INTERVAL_S = 5.0
SECONDS = 30.0
QUEUE = 100_000  # a length that means the change under test

_SEEN = Rule(
    id="bench-queue",
    title="The change whose way to an alert is measured",
    severity="warning",
    signal=ValueSignal(value=Aggregate("max", Instant("requests_waiting")), sentence="{value} wait"),
    threshold=QUEUE - 1.0,
    window_s=60.0,
    hold_s=0.0,
)


def bench_collect(
    *, report: Report, targets: int = TARGETS, interval_s: float = INTERVAL_S, seconds: float = SECONDS
) -> dict[str, Any]:
    """Figures of one run on an otherwise idle machine; `cpu_share` is of one core, `alert_s` of one change."""
    report(f"watching {targets} targets every {interval_s:g} s for {seconds:g} s")
    with tempfile.TemporaryDirectory() as folder, _exporters() as base, Store.open(Path(folder)) as store:
        for i in range(targets):
            store.targets.upsert(f"t{i}", url=f"{base}/t{i}/metrics", kind="external", scrape_interval_s=interval_s)
        page_bytes = len(httpx.get(f"{base}/t0/metrics", timeout=10).content)
        monitor = Monitor(store, rules=(*DEFAULT_RULES, _SEEN))
        monitor.start()
        try:
            _wait(lambda: monitor.stats().scraped.scrapes >= 2 * targets, 60.0 + 4 * interval_s)
            figures = _measure(monitor, seconds)
            alert_s = _time_to_alert(store, base, f"t{targets // 2}", interval_s)
        finally:
            monitor.stop()
    bound_s = interval_s + 1.0
    return {
        "targets": targets,
        "interval_s": interval_s,
        "page_bytes": page_bytes,
        **figures,
        "alert_s": round(alert_s, 2),
        "alert_within_bound": alert_s <= bound_s,
    }


def _measure(monitor: Monitor, seconds: float) -> dict[str, Any]:
    before, cpu, begun = monitor.stats(), time.process_time(), time.monotonic()
    time.sleep(seconds)
    after, wall = monitor.stats(), time.monotonic() - begun
    cpu = time.process_time() - cpu
    scrapes = after.scraped.scrapes - before.scraped.scrapes
    return {
        "cpu_share": round(cpu / wall, 3),
        "cpu_ms_per_scrape": round(1e3 * cpu / max(1, scrapes), 2),
        "scrapes_per_s": round(scrapes / wall, 2),
        "samples_per_s": round((after.scraped.samples - before.scraped.samples) / wall),
        "failures": after.scraped.failures - before.scraped.failures,
        "late": after.scraped.late - before.scraped.late,
        "missed": after.scraped.missed - before.scraped.missed,
        "max_late_s": round(after.scraped.max_late_s, 3),
        "max_scrape_to_evaluation_s": round(after.max_lag_s, 3),
        "evaluation_ms_per_target": round(
            1e3 * (after.evaluation_s - before.evaluation_s) / max(1, after.evaluations - before.evaluations), 2
        ),
        "rss_mib": round(_rss_mib()),
    }


def _time_to_alert(store: Store, base: str, target: str, interval_s: float) -> float:
    httpx.get(f"{base}/{target}/queue/{QUEUE}", timeout=10)
    begun = time.monotonic()
    _wait(lambda: any(a.rule == _SEEN.id for a in store.alerts.active(target)), 60.0 + 4 * interval_s)
    return time.monotonic() - begun


def _wait(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the monitor did not get there within {seconds:g} s")
        time.sleep(0.05)


@contextlib.contextmanager
def _exporters() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "probe.bench.exporters"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _rss_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


if __name__ == "__main__":
    import json

    print(json.dumps(bench_collect(report=print), indent=1))
