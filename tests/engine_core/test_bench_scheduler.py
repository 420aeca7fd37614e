from __future__ import annotations

from engine.bench_scheduler import bench_step


def test_bench_measures_decoding_under_eviction() -> None:
    result = bench_step(num_seqs=8, steps=20)
    assert result["running_at_end"] == 8
    assert result["blocks_evicted"] >= 8  # each sequence starts at least one block in 20 steps
    assert 0 < result["step_ms_median"] <= result["step_ms_p95"]
