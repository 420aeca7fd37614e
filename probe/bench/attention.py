"""The attention kernels' benchmark in short, for `kvoncall bench all`; `kvoncall bench attention` has the tables."""

from __future__ import annotations

from typing import Any

from probe.bench import Report


def bench_attention(*, report: Report, quick: bool = False) -> dict[str, Any]:
    """How many cases were measured, the goals met so far, and how many results were wrong (or raised)."""
    from kernels.bench.attention import failures, run_bench
    from kernels.bench.report import goals

    report("attention over the paged cache, checked against float64 and compared with copies")
    found = run_bench(quick=quick, progress=report)
    return {
        "device": found["device"]["name"],
        "backend": found["backend"],
        "cases_measured": sum(row["status"] == "ok" for row in found["results"]),
        "wrong": len(failures(found)),
        **{what: measured for what, _, measured in goals(found)},
    }
