"""`kvoncall bench collect`: measures what it says, on few targets."""

from __future__ import annotations

from probe.bench.collect import bench_collect


def test_figures_of_a_short_run() -> None:
    said: list[str] = []
    found = bench_collect(report=said.append, targets=6, interval_s=0.5, seconds=2.0)
    assert said == ["watching 6 targets every 0.5 s for 2 s"]
    assert found["targets"] == 6
    assert 55_000 < found["page_bytes"] < 80_000
    assert found["failures"] == 0
    assert found["scrapes_per_s"] > 0
    assert found["samples_per_s"] > 20 * found["scrapes_per_s"]
    assert found["cpu_share"] > 0
    assert found["rss_mib"] > 10
    assert found["alert_s"] > 0
