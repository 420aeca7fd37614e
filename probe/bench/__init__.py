"""`kvoncall bench`: speed and memory of the embedded engine, the watch and the app, on the machine at hand.

Machines differ and are noisy, so what counts are ratios measured in one run, the two sides taking turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = Callable[[str], None]


def run_bench(what: str, *, model: str, against: str | None, report: Report) -> dict[str, dict[str, Any]]:
    """Runs the benchmark `what`, one of the names below or "all"; returns figures by benchmark.

    "all" includes attention, whose tables and flags `kvoncall bench attention` has.
    """
    results: dict[str, dict[str, Any]] = {}
    if what in ("scheduler", "all"):
        from engine.bench_scheduler import bench_step

        report("scheduler, block and prefix work of a step at 256 running sequences")
        results["scheduler"] = bench_step(num_seqs=256)
    if what in ("prefix", "all"):
        from probe.bench.prefix import bench_prefix

        results["prefix"] = bench_prefix(report=report)
    if what == "all":
        from probe.bench.attention import bench_attention

        results["attention"] = bench_attention(report=report)
    if what in ("decode", "all"):
        from probe.bench.decode import bench_decode, bench_http

        results["decode"] = bench_decode(model, report=report)
        if against:
            results["http"] = bench_http(model, against, report=report)
    if what in ("formats", "all"):
        from probe.bench.formats import bench_formats

        results["formats"] = bench_formats(model, report=report)
    if what in ("collect", "all"):
        from probe.bench.collect import bench_collect

        results["collect"] = bench_collect(report=report)
    if what in ("rules", "all"):
        from probe.bench.rules import bench_rules

        results["rules"] = bench_rules(report=report)
    if what in ("store", "all"):
        from probe.bench.store import bench_store

        results["store"] = bench_store(report=report)
    if what in ("memory", "all"):
        from probe.bench.memory import bench_memory

        results["memory"] = bench_memory(report=report)
    return results
