"""The arithmetic of recommendations, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import MIB, EngineConfig, ModelDims, apply_changes
from engine.memory import kv_bytes_per_token, plan_kv_cache
from kernels.formats import KV_CACHE_DTYPES
from runbooks.changes import Recommendation, refusal_reason
from runbooks.load import RunbookError
from runbooks.recommend import FlagChange, TargetFacts, TrafficFacts, from_facts, recommend
from runbooks.remedies.pool import pool_that_fits

DIMS = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 256, 936, 2048, "float32")
PER_TOKEN = 2048  # 2 x 4 layers x 2 KV heads x 32 x 4 B


def debug_engine(args: list[str], *, weights: int = 3 * MIB, peak: int = 20 * MIB, records: int = 0) -> dict[str, Any]:
    """What /debug/engine of the embedded engine tells for these flags."""
    config = EngineConfig.from_args(args)
    plan = plan_kv_cache(
        config, DIMS, weights_bytes=weights, activation_peak_bytes=peak, bookkeeping_bytes_per_block=records
    )
    return {
        "engine": "kvoncall",
        "version": "0.1.0",
        "flags": config.flag_values(),
        "dims": vars(DIMS).copy(),
        "memory_plan": plan.to_dict(),
    }


def facts_of(args: list[str], traffic: dict[str, Any] | None = None, **more: Any) -> TargetFacts:
    peak = more.pop("peak", 20 * MIB)
    return from_facts({**debug_engine(args, peak=peak), "traffic": traffic, **more})


def change(advice: Recommendation, flag: str) -> FlagChange | None:
    return next((c for c in advice.changes if c.flag == flag), None)


def refused(advice: Recommendation, flag: str) -> str:
    return " | ".join(r.reason for r in advice.refused if r.flag == flag)


def test_bytes_per_token_of_the_example() -> None:
    assert kv_bytes_per_token(DIMS, "auto") == PER_TOKEN


@pytest.mark.parametrize("kv_dtype", KV_CACHE_DTYPES)
def test_pool_bytes_are_exact_in_every_format(kv_dtype: str) -> None:
    args = ["--kv-cache-dtype", kv_dtype, "--block-size", "24", "--device-memory", "128MiB"]
    told = debug_engine(args, records=768)
    plan, facts = told["memory_plan"], from_facts(told)
    assert facts.kv_cache_bytes == plan["kv_cache_bytes"]
    fits = pool_that_fits(facts)
    assert fits is not None
    assert fits // plan["kv_bytes_per_block"] == plan["num_gpu_blocks"]
    assert 0 <= fits - plan["kv_cache_bytes"] < plan["kv_bytes_per_block"]


SMALL_POOL = ["--device-memory", "128MiB", "--gpu-memory-utilization", "0.3", "--max-num-seqs", "32"]
BUSY = {"peak_running": 24, "peak_waiting": 8, "tokens_per_request_peak": 1800}


def test_eviction_storm_raises_the_pool_first_and_then_fits_the_sequences() -> None:
    facts = facts_of(SMALL_POOL, BUSY)
    advice = recommend("eviction-storm", facts)
    assert [c.flag for c in advice.changes] == ["--gpu-memory-utilization", "--max-num-seqs"]
    more, fewer = advice.changes
    assert (more.from_, more.to) == (0.3, 0.92)  # 32 x 1808 tokens x 2048 B = 113 MiB do not fit: the limit
    pool = facts.kv_cache_size_tokens
    assert pool is not None
    after = pool + int(128 * MIB * (0.92 - 0.3) / PER_TOKEN) // 16 * 16
    assert str(after) in more.why
    assert fewer.from_ == 32
    assert fewer.to == (after // 16) // 113  # 1800 tokens take 113 blocks of 16
    assert f"floor({after} / 1800)" in fewer.why
    assert "queue" in fewer.cost


def test_what_eviction_storm_recommends_is_what_the_engine_then_plans() -> None:
    facts = facts_of(SMALL_POOL, BUSY)
    advice = recommend("eviction-storm", facts)
    args = apply_changes(SMALL_POOL, advice.flag_values())
    then = from_facts(debug_engine(args))
    promised = int((change(advice, "--gpu-memory-utilization") or pytest.fail("no change")).expected.split()[3])
    assert then.kv_cache_size_tokens is not None
    assert abs(then.kv_cache_size_tokens - promised) <= 16
    assert then.max_num_seqs is not None
    assert then.max_num_seqs * 1800 <= then.kv_cache_size_tokens


def test_eviction_storm_asks_for_no_more_pool_than_the_demand_needs() -> None:
    traffic = {"peak_running": 10, "peak_waiting": 0, "tokens_per_request_peak": 1024}
    facts = facts_of(SMALL_POOL, traffic)
    more = change(recommend("eviction-storm", facts), "--gpu-memory-utilization")
    assert more is not None
    pool = facts.kv_cache_size_tokens or 0
    needed = 0.3 + (10 * 1024 - pool) * PER_TOKEN / (128 * MIB)
    assert needed <= more.to < needed + 0.01
    assert change(recommend("eviction-storm", facts), "--max-num-seqs") is not None  # 32 could still be admitted


def test_eviction_storm_never_lowers_utilization_and_says_why() -> None:
    advice = recommend("eviction-storm", facts_of(SMALL_POOL, BUSY))
    assert "wrong direction" in refused(advice, "--gpu-memory-utilization")
    reason = refusal_reason("eviction-storm", facts_of(SMALL_POOL), "--gpu-memory-utilization", 0.2)
    assert reason is not None
    assert "wrong direction" in reason


def test_eviction_storm_at_the_limit_refuses_more_utilization() -> None:
    advice = recommend("eviction-storm", facts_of(["--device-memory", "64MiB", "--max-num-seqs", "32"], BUSY))
    assert change(advice, "--gpu-memory-utilization") is None
    assert "0.92" in refused(advice, "--gpu-memory-utilization")
    assert change(advice, "--max-num-seqs") is not None


def test_no_change_is_recommended_where_the_pool_holds_everything() -> None:
    traffic = {"peak_running": 4, "peak_waiting": 0, "tokens_per_request_peak": 200}
    advice = recommend("eviction-storm", facts_of(["--device-memory", "512MiB", "--max-num-seqs", "8"], traffic))
    assert advice.changes == ()
    assert "not needed" in refused(advice, "--max-num-seqs")


def test_eviction_storm_with_an_explicit_pool_moves_that_flag() -> None:
    args = ["--device-memory", "128MiB", "--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "8"]
    advice = recommend("eviction-storm", facts_of(args, {"peak_running": 8, "tokens_per_request_peak": 2000}))
    more = change(advice, "--kv-cache-memory-bytes")
    assert more is not None
    assert more.to == (8 * 2000 + 16) * PER_TOKEN  # 8 requests of 125 blocks, and the null block
    assert "--kv-cache-memory-bytes is set" in refused(advice, "--gpu-memory-utilization")


HAND_SIZED = [
    "--device-memory", "192MiB", "--kv-cache-memory-bytes", "160MiB", "--max-num-batched-tokens", "8192",
]  # fmt: skip
LONG = {"peak_running": 40, "peak_waiting": 0, "tokens_per_request_peak": 2048}


def test_oom_gives_the_sizing_back_to_the_profile_with_the_sum_in_the_reason() -> None:
    facts = facts_of(HAND_SIZED, LONG, peak=60 * MIB)
    advice = recommend("oom", facts)
    pool = change(advice, "--kv-cache-memory-bytes")
    assert pool is not None
    assert (pool.from_, pool.to) == (160 * MIB, None)
    assert "3.0 MiB" in pool.why
    assert "60.0 MiB" in pool.why
    assert "223.0 MiB" in pool.why  # 3 + 60 + 160, more than 192
    assert "192.0 MiB" in pool.why


def test_oom_result_fits_the_device() -> None:
    facts = facts_of(HAND_SIZED, LONG, peak=60 * MIB)
    args = apply_changes(HAND_SIZED, recommend("oom", facts).flag_values())
    then = from_facts(debug_engine(args, peak=45 * MIB))  # a quarter of the peak does not shrink with the step
    assert then.kv_cache_bytes is not None
    assert 3 * MIB + 45 * MIB + then.kv_cache_bytes <= 192 * MIB
    assert (then.max_num_seqs or 0) * 2048 <= (then.kv_cache_size_tokens or 0)


def test_oom_halves_the_step_only_while_activations_take_too_much() -> None:
    large = recommend("oom", facts_of(HAND_SIZED, LONG, peak=60 * MIB))
    step = change(large, "--max-num-batched-tokens")
    assert step is not None
    assert (step.from_, step.to) == (8192, 4096)  # 60 of 173 MiB is 34%, 30 is 17%
    small = recommend("oom", facts_of(HAND_SIZED, LONG, peak=40 * MIB))
    assert change(small, "--max-num-batched-tokens") is None
    assert "not needed" in refused(small, "--max-num-batched-tokens")


def test_oom_leaves_a_hand_sized_pool_that_fits() -> None:
    args = ["--device-memory", "192MiB", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8"]
    advice = recommend("oom", facts_of(args, {"peak_running": 8, "tokens_per_request_peak": 2048}))
    assert change(advice, "--kv-cache-memory-bytes") is None
    assert "not the cause" in refused(advice, "--kv-cache-memory-bytes")


def test_oom_of_a_profiled_pool_leaves_more_outside_the_budget() -> None:
    facts = facts_of(
        ["--device-memory", "200MiB", "--gpu-memory-utilization", "0.95"], LONG, oom_allocation_bytes=20 * MIB
    )
    lower = change(recommend("oom", facts), "--gpu-memory-utilization")
    assert lower is not None
    assert (lower.from_, lower.to) == (0.95, 0.85)  # 20 of 200 MiB are a tenth
    assert "20.0 MiB" in lower.why


def test_an_unknown_activation_peak_is_bounded_by_the_failed_allocation() -> None:
    facts = replace(facts_of(HAND_SIZED, LONG), activation_peak_bytes=None, oom_allocation_bytes=50 * MIB)
    pool = change(recommend("oom", facts), "--kv-cache-memory-bytes")
    assert pool is not None
    assert "failed allocation (a lower bound) 50.0 MiB" in pool.why


def test_kv_saturated_bounds_the_queue_by_what_the_pool_holds() -> None:
    facts = facts_of(
        ["--device-memory", "128MiB"], {"peak_running": 8, "peak_waiting": 90, "tokens_per_request_peak": 1000}
    )
    advice = recommend("kv-saturated", facts)
    bound = change(advice, "--max-num-queued-reqs")
    assert bound is not None
    pool = facts.kv_cache_size_tokens or 0
    assert bound.to == (pool // 16) // 63
    assert "503" in bound.cost
    assert "full" in refused(advice, "--max-num-seqs")


def test_target_missing_recommends_nothing() -> None:
    assert recommend("target-missing", TargetFacts("vllm")).changes == ()


def test_an_unknown_runbook_is_one_sentence() -> None:
    with pytest.raises(RunbookError, match="oom"):
        recommend("no-such", TargetFacts("vllm"))


# A real vLLM, known only by its metrics.

VLLM = {
    "engine": "vllm",
    "version": "0.32.0",
    "max_model_len": 1024,
    "cache_config_info": {
        "block_size": "32",
        "num_gpu_blocks": "48",
        "gpu_memory_utilization": "0.8",
        "cache_dtype": "auto",
        "kv_cache_size_tokens": "1504",
        "kv_cache_memory_bytes": "None",
        "num_gpu_blocks_override": "None",
        "enable_prefix_caching": "True",
    },
    "traffic": {"peak_running": 16, "peak_waiting": 16, "tokens_per_request_peak": 300},
}


def test_vllm_labels_are_read() -> None:
    facts = from_facts(VLLM)
    assert (facts.block_size, facts.num_gpu_blocks, facts.kv_cache_size_tokens) == (32, 48, 1504)
    assert (facts.utilization, facts.max_model_len) == (0.8, 1024)
    without = {k: v for k, v in VLLM["cache_config_info"].items() if k != "kv_cache_size_tokens"}  # type: ignore[attr-defined]
    assert from_facts({"cache_config_info": without}).kv_cache_size_tokens == 47 * 32  # one is the null block


def test_vllm_without_device_numbers_gets_what_can_be_computed_and_hears_what_is_missing() -> None:
    advice = recommend("eviction-storm", from_facts(VLLM))
    assert [c.flag for c in advice.changes] == ["--max-num-seqs"]
    assert advice.changes[0].to == 4  # 47 blocks; 300 tokens take 10 blocks of 32
    assert any("device memory" in text for text in advice.missing)


def test_vllm_with_device_numbers_gets_utilization_up_to_its_versions_default() -> None:
    facts = {**VLLM, "device_memory_bytes": 1 << 30, "kv_bytes_per_token": 65536}
    new = change(recommend("eviction-storm", from_facts(facts)), "--gpu-memory-utilization")
    assert new is not None
    assert new.to == 0.92
    old = change(recommend("eviction-storm", from_facts({**facts, "version": "0.19.1"})), "--gpu-memory-utilization")
    assert old is not None
    assert old.to == 0.9


def test_a_flag_that_does_not_exist_for_the_version_is_refused() -> None:
    advice = recommend("kv-saturated", from_facts({**VLLM, "version": "0.28.0"}))
    assert change(advice, "--max-num-queued-reqs") is None
    assert "exists since vllm 0.29.0" in refused(advice, "--max-num-queued-reqs")
    for flag, word in (("--swap-space", "last seen"), ("--prefix-cache-ttl", "not in the flag catalog")):
        reason = refusal_reason("eviction-storm", from_facts(VLLM), flag, 4)
        assert reason is not None
        assert word in reason


def test_no_ops_are_refused() -> None:
    facts = facts_of(["--max-num-seqs", "8"])
    assert "no change" in (refusal_reason("eviction-storm", facts, "--max-num-seqs", 8) or "")
    assert refusal_reason("eviction-storm", facts, "--max-num-seqs", 7) is None
    assert "not a flag" in (refusal_reason("oom", facts, "--tensor-parallel-size", 2) or "")


def test_vllm_oom_without_device_numbers_gives_up_what_failed() -> None:
    info = {**VLLM["cache_config_info"], "kv_cache_memory_bytes": str(10 << 30)}  # type: ignore[dict-item]
    facts = from_facts({**VLLM, "cache_config_info": info, "oom_allocation_bytes": 2 << 30})
    facts = replace(facts, kv_bytes_per_token=None)
    pool = change(recommend("oom", facts), "--kv-cache-memory-bytes")
    assert pool is not None
    assert pool.to == 8 << 30
    nothing = recommend("oom", replace(facts, oom_allocation_bytes=None))
    assert change(nothing, "--kv-cache-memory-bytes") is None
    assert any("failed allocation" in text for text in nothing.missing)


def test_every_change_carries_cost_verification_and_rollback() -> None:
    cases = [
        ("eviction-storm", facts_of(SMALL_POOL, BUSY)),
        ("oom", facts_of(HAND_SIZED, LONG, peak=60 * MIB)),
        ("kv-saturated", facts_of(SMALL_POOL, BUSY)),
    ]
    for runbook, facts in cases:
        changes = recommend(runbook, facts).changes
        assert changes
        for item in changes:
            data = item.to_dict()
            keys = {"flag", "from", "to", "why", "expected", "cost", "restart", "risk", "verify", "rollback"}
            assert set(data) == keys
            assert any(c.isdigit() for c in data["why"])
            assert data["cost"]
            assert data["verify"]
            assert item.flag in data["rollback"]


def test_traffic_without_lengths_falls_back_to_the_context_length() -> None:
    facts = replace(facts_of(SMALL_POOL), traffic=TrafficFacts(peak_running=20))
    fewer = change(recommend("eviction-storm", facts), "--max-num-seqs")
    assert fewer is not None
    assert "--max-model-len" in fewer.why
