"""What is advised in kinds of incidents that have no alert, with the numbers of public reports of them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.memory.deployment import Gpu
from engine.memory.shape import LayerGroup, ModelShape
from runbooks.changes import FlagChange, Recommendation
from runbooks.facts import TargetFacts, TrafficFacts
from runbooks.recommend import from_facts, recommend

GIB = 1024**3
H100 = Gpu("H100-80GB", int(79.1 * GIB), (9, 0))
A100 = Gpu("A100-80GB", int(79.15 * GIB), (8, 0))
GB10 = Gpu("GB10", int(119.7 * GIB), (12, 1), unified=True)
OSS_120B = ModelShape(
    "gpt-oss-120b", (LayerGroup(18, "full", 8, 64), LayerGroup(18, "sliding", 8, 64, window=128)), "GptOssForCausalLM",
    2880, 2880, 64, 201_088, 131_072, "bfloat16", 116_800_000_000, quantization="mxfp4",
)  # fmt: skip
MINIMAX = ModelShape(
    "MiniMax-M2.7", (LayerGroup(62, "full", 8, 128),), "MiniMaxM2ForCausalLM", 3072, 1536, 48, 200_064, 204_800,
    "bfloat16", 230_000_000_000, weights_bytes=132 * GIB, quantization="awq",
)  # fmt: skip
QWEN_7B = ModelShape(
    "Qwen2.5-7B", (LayerGroup(28, "full", 4, 128),), "Qwen2ForCausalLM", 3584, 18_944, 28, 152_064, 32_768, "bfloat16",
    7_600_000_000, weights_bytes=8 * GIB,
)  # fmt: skip


def advise(runbook: str, **facts: Any) -> tuple[TargetFacts, Recommendation]:
    read = from_facts({"engine": "vllm", "version": "0.33.0", **facts})
    return read, recommend(runbook, read)


def flags(advice: Recommendation) -> dict[str, Any]:
    return {change.flag: change.to for change in advice.changes}


def alternative(advice: Recommendation, flag: str) -> FlagChange:
    (found,) = [c for c in advice.alternatives if c.flag == flag]
    return found


def refused(advice: Recommendation, flag: str) -> str:
    return " | ".join(r.reason for r in advice.refused if r.flag == flag)


# The pool does not hold one request (A06, A09, A10).


def test_a_pool_short_of_one_request_gets_the_utilization_it_needs_and_the_longest_context_that_fits() -> None:
    _, advice = advise(
        "kv-does-not-fit", version="0.29.0", gpu=GB10, tp=2, num_gpus=2, shape=MINIMAX,
        kv_available_bytes=int(22.5 * GIB), flags={"--gpu-memory-utilization": 0.8, "--max-model-len": 196_608},
    )  # fmt: skip
    # 196,608 x 126,976 B = 23.25 GiB, 0.75 GiB more than there is: 0.0063 of 119.7 GiB
    assert flags(advice) == {"--gpu-memory-utilization": 0.81}
    assert "23.25 GiB" in advice.changes[0].why
    shorter = alternative(advice, "--max-model-len")
    assert abs(shorter.to - 190_272) <= 32  # what the engine's own log estimates; a null block apart
    assert alternative(advice, "--kv-cache-dtype").to == "fp8"
    assert "needs 4 GPUs, and 2 are known" in refused(advice, "--tensor-parallel-size")


def test_a_negative_pool_is_answered_by_the_step_and_the_batch_not_by_utilization_alone() -> None:
    known = {"gpu": H100, "tp": 1, "num_gpus": 1, "shape": OSS_120B, "weights_bytes": int(65.97 * GIB)}
    given = {"--gpu-memory-utilization": 0.9, "--max-num-batched-tokens": 8192, "--max-num-seqs": 1024,
             "--max-model-len": 131_072}  # fmt: skip
    _, advice = advise("kv-does-not-fit", version="0.10.2", flags=given, **known)
    assert "missing before the first block" in advice.summary
    assert flags(advice) == {"--max-num-seqs": 64, "--max-num-batched-tokens": 2048}
    assert "not enough alone" in refused(advice, "--gpu-memory-utilization")


def test_what_fits_is_left_alone_and_what_is_unknown_is_asked_for() -> None:
    _, advice = advise("kv-does-not-fit", gpu=H100, shape=QWEN_7B, flags={"--max-model-len": 8192})
    assert advice.changes == ()
    assert "it fits" in advice.summary
    _, nothing = advise("kv-does-not-fit")
    assert nothing.changes == ()
    assert any("config.json" in text for text in nothing.missing)
    _, by_log = advise("kv-does-not-fit", kv_available_bytes=GIB, kv_bytes_per_token=65_536, max_model_len=40_000,
                       block_size=16)  # fmt: skip
    assert flags(by_log) == {"--max-model-len": 16_384}


def test_what_others_hold_is_no_matter_of_this_page() -> None:
    _, advice = advise("kv-does-not-fit", gpu=H100, shape=QWEN_7B, other_processes_bytes=40 * GIB,
                       flags={"--max-model-len": 8192, "--gpu-memory-utilization": 0.9})  # fmt: skip
    assert advice.changes == ()
    assert "ther processes leave" in advice.summary
    assert any("shared-gpu-memory" in step for step in advice.steps)


def test_without_lengths_the_context_alone_does_not_cut_the_batch() -> None:
    known = {"kv_cache_size_tokens": 300_000, "max_model_len": 131_072, "max_num_seqs": 256}
    _, advice = advise("capacity-misjudged", traffic={"peak_running": 40}, **known)
    assert advice.changes == ()
    assert "requests are shorter" in refused(advice, "--max-num-seqs")
    _, measured = advise(
        "capacity-misjudged", traffic={"prompt_tokens_mean": 3000.0, "output_tokens_mean": 1000.0}, **known
    )
    assert flags(measured) == {"--max-num-seqs": 50}  # 1.5 x 4,000 tokens each


def test_sglang_gets_its_static_fraction() -> None:
    gpu = Gpu("L4-24GB", int(22.05 * GIB), (8, 9))
    _, advice = advise(
        "kv-does-not-fit", engine="sglang", version="0.5.23", gpu=gpu, shape=QWEN_7B, weights_bytes=15 * GIB,
        flags={"--mem-fraction-static": 0.69, "--context-length": 32_768},
    )  # fmt: skip
    assert set(flags(advice)) == {"--mem-fraction-static"}
    assert 0.69 < flags(advice)["--mem-fraction-static"] <= 0.95


# One card for several (A02, A03).


def test_the_pool_is_cut_to_what_requests_need() -> None:
    traffic = {"peak_running": 5, "peak_waiting": 0, "tokens_per_request_peak": 5120}
    sized = {"device_memory_bytes": A100.memory_bytes, "kv_bytes_per_token": 524_288, "block_size": 16,
             "num_gpu_blocks": 8288, "kv_cache_size_tokens": 132_592, "max_num_seqs": 256}  # fmt: skip
    _, advice = advise("shared-gpu-memory", traffic=traffic, **sized)
    pool = flags(advice)["--kv-cache-memory-bytes"]
    assert pool == (25_600 + 16) * 524_288  # 5 x 5,120 tokens, and the null block: 12.5 GiB in place of 64.75
    assert "sum of both" not in " ".join(advice.steps)
    # before 0.10.2 there is no such flag: a share that pays for weights, activations and that pool
    by_share = {**sized, "weights_bytes": 7 * GIB, "activation_peak_bytes": GIB, "traffic": traffic}
    _, older = advise("shared-gpu-memory", version="0.8.5", **by_share)
    assert flags(older) == {"--gpu-memory-utilization": 0.26}  # (7 + 1 + 12.51) / 79.15
    assert any("counts what others hold" in step for step in older.steps)
    _, trt = advise("shared-gpu-memory", engine="tensorrt-llm", version="1.0.0", traffic=traffic, **sized)
    assert flags(trt) == {"kv_cache_config.max_tokens": 25_616}


def test_a_neighbour_that_leaves_too_little_is_said() -> None:
    _, advice = advise(
        "shared-gpu-memory", traffic={"peak_running": 5, "tokens_per_request_peak": 5120}, max_num_seqs=256,
        device_memory_bytes=A100.memory_bytes, kv_bytes_per_token=524_288, weights_bytes=20 * GIB,
        activation_peak_bytes=GIB, other_processes_bytes=int(68.01 * GIB),
    )  # fmt: skip
    assert advice.changes == ()
    assert "others leave" in refused(advice, "--kv-cache-memory-bytes")


# After an upgrade (A05, A10).


def test_the_pool_of_before_the_upgrade_is_bought_back_exactly() -> None:
    measured = {"previous_version": "0.20.2", "previous_kv_tokens": 200_000, "kv_cache_size_tokens": 160_000,
                "kv_bytes_per_token": 131_072, "device_memory_bytes": H100.memory_bytes}  # fmt: skip
    _, advice = advise("upgrade-less-kv", version="0.21.0", flags={"--gpu-memory-utilization": 0.85}, **measured)
    to = flags(advice)["--gpu-memory-utilization"]
    assert to == 0.912  # 40,000 x 128 KiB = 4.88 GiB of 79.1
    assert (to - 0.85) * H100.memory_bytes >= 40_000 * 131_072
    assert any("graphs are paid" in step for step in advice.steps)


def test_memory_that_runs_out_after_an_upgrade_gets_less_utilization() -> None:
    v100 = int(15.77 * GIB)
    _, advice = advise("upgrade-less-kv", version="0.7.3", flags={"--gpu-memory-utilization": 0.95},
                       device_memory_bytes=v100, oom_allocation_bytes=GIB // 2)  # fmt: skip
    assert flags(advice) == {"--gpu-memory-utilization": 0.9}  # 0.95 - 0.5 / 15.77 = 0.918: the default is below it
    _, by_hand = advise("upgrade-less-kv", flags={"--kv-cache-memory-bytes": GIB}, previous_kv_tokens=10)
    assert by_hand.changes == ()


# Host memory (A07).


@pytest.mark.parametrize(
    ("engine", "version", "tp", "host", "given", "expected"),
    [
        ("vllm", "0.33.0", 2, 96, {"--kv-offloading-size": 100}, {"--kv-offloading-size": 86}),  # a sum over ranks
        ("vllm", "0.33.0", 2, 128, {"--kv-offloading-size": 100}, {}),
        ("vllm", "0.6.6", 4, 715, {"--swap-space": 200}, {"--swap-space": 160}),  # per GPU
        (
            "sglang", "0.5.23", 4, 715, {"--enable-hierarchical-cache": True, "--hicache-size": 200},
            {"--hicache-size": 172},  # 0.9 x 715 GiB in GB, over 4 ranks
        ),
    ],
)  # fmt: skip
def test_a_host_tier_is_sized_by_what_it_is_counted_in(
    engine: str, version: str, tp: int, host: int, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    _, advice = advise(
        "offload-host-memory", engine=engine, version=version, tp=tp, host_memory_bytes=host * GIB, flags=given
    )
    assert flags(advice) == expected


def test_lmcache_is_told_its_share_a_rank() -> None:
    _, advice = advise("offload-host-memory", tp=2, host_memory_bytes=96 * GIB, flags={"--kv-transfer-config": "{}"})
    assert advice.changes == ()
    assert any("LMCACHE_MAX_LOCAL_CPU_SIZE=43" in step for step in advice.steps)  # 0.9 x 96 / 2


# Formats (F03).


@pytest.mark.parametrize(
    ("sm", "version", "given", "more", "to"),
    [
        ("8.6", "0.11.0", "fp8_e4m3", {"attention_backend": "TRITON_ATTN"}, "fp8_e5m2"),
        ("8.6", "0.11.0", "fp8", {"checkpoint_quantization": "fp8"}, "auto"),
        ("8.6", "0.33.0", "fp8", {"checkpoint_quantization": "fp8"}, "int8_per_token_head"),
        ("8.9", "0.33.0", "fp8_e5m2", {"checkpoint_quantization": "fp8"}, "fp8_e4m3"),
        ("8.0", "0.10.2", "fp8", {"attention_backend": "FLASHINFER"}, None),
        ("7.0", "0.33.0", "fp8_e4m3", {}, "auto"),
        ("9.0", "0.33.0", "nvfp4", {}, "int4_per_token_head"),
        ("10.0", "0.33.0", "nvfp4", {}, None),
        (None, "0.6.6", "nvfp4", {}, "fp8_e4m3"),  # not in that version
    ],
)
def test_the_nearest_format_that_works(
    sm: str | None, version: str, given: str, more: dict[str, Any], to: str | None
) -> None:
    _, advice = advise(
        "kv-dtype-unsupported", version=version, compute_capability=sm, flags={"--kv-cache-dtype": given}, **more
    )
    assert flags(advice) == ({} if to is None else {"--kv-cache-dtype": to})


# Prefix cache (F05).


def test_blocks_longer_than_prompts_can_be_made_small_only_where_they_are_not_padded() -> None:
    traffic = {"prompt_tokens_mean": 3800.0}
    hybrid = ModelShape("h", (LayerGroup(48, "recurrent", state_bytes=1), LayerGroup(8, "full", 2, 128)),
                        max_position_embeddings=262_144)  # fmt: skip
    _, padded = advise("prefix-cache-inert", version="0.25.0", block_size=8320, max_model_len=4096, shape=hybrid,
                       kv_cache_size_tokens=1_000_000, traffic=traffic)  # fmt: skip
    assert flags(padded) == {"--max-model-len": 4 * 8320}
    assert "padded to its recurrent state" in refused(padded, "--block-size")
    assert "exists since vllm 0.26.0" in refused(padded, "--prefix-match-unit")
    assert any("= 0 tokens" in step for step in padded.steps)
    _, plain = advise("prefix-cache-inert", block_size=128, traffic={"prompt_tokens_mean": 100.0})
    assert flags(plain) == {"--block-size": 16}
    assert "96 tokens" in plain.changes[0].expected
    _, off = advise("prefix-cache-inert", flags={"--enable-prefix-caching": False}, block_size=16)
    assert flags(off) == {"--enable-prefix-caching": True}


# Flags of another version (F06).


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("0.17.1", {"--swap-space": 6}, {}),
        ("0.18.0", {"--swap-space": 6}, {"--swap-space": None}),
        ("0.33.0", {"--preemption-mode": "swap", "--prefix-cache-ttl": 60},
         {"--preemption-mode": None, "--prefix-cache-ttl": None}),
        ("0.20.0", {"--disable-log-requests": True}, {"--disable-log-requests": None}),  # off is the default there
        ("0.33.0", {"--max-num-seqs": 8, "--kv-cache-dtype": "fp8"}, {}),
        ("0.10.2", {"--prefix-caching-hash-algo": "builtin"}, {"--prefix-caching-hash-algo": None}),
    ],
)  # fmt: skip
def test_what_the_version_does_not_have_is_taken_out(
    version: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    _, advice = advise("flag-not-in-version", version=version, flags=given)
    assert flags(advice) == expected


def test_a_renamed_flag_keeps_its_value() -> None:
    _, advice = advise("flag-not-in-version", engine="sglang", version="0.5.23", flags={"--cuda-graph-max-bs": 64})
    assert flags(advice) == {"--cuda-graph-max-bs": None, "--cuda-graph-max-bs-decode": 64}


# Capacity (F01, E07).


def test_capacity_is_computed_from_kv_heads_and_cache_bytes() -> None:
    _, advice = advise("capacity-misjudged", version="0.9.2", gpu=H100, shape=QWEN_7B, max_model_len=3072,
                       flags={"--max-model-len": 3072})  # fmt: skip
    said = " ".join(advice.steps)
    assert "57344 bytes a token" in said
    assert "168.0 MiB" in said  # 3,072 x 57,344 B = 0.164 GiB
    assert "7 times larger" in said  # 28 query heads, 4 of keys and values
    assert advice.changes == ()


def test_tokens_of_a_hybrid_model_are_no_capacity() -> None:
    _, advice = advise("capacity-misjudged", shape=OSS_120B, kv_cache_size_tokens=398_000, max_model_len=50_000,
                       flags={"--max-num-seqs": 512})  # fmt: skip
    assert advice.changes == ()
    assert any("no capacity" in step for step in advice.steps)


# Metrics (E02, E03, E06).


def test_metrics_are_read_by_their_name_in_the_version() -> None:
    _, old = advise("metrics-misread", version="0.9.0")
    assert any("vllm:gpu_cache_usage_perc" in step for step in old.steps)
    _, new = advise("metrics-misread", version="0.33.0")
    assert any("vllm:kv_cache_usage_perc" in step for step in new.steps)
    assert any("finds its own blocks" in step for step in old.steps)
    assert not any("finds its own blocks" in step for step in new.steps)
    _, off = advise("metrics-misread", flags={"--disable-log-stats": True})
    assert flags(off) == {"--disable-log-stats": None}
    _, trt = advise("metrics-misread", engine="tensorrt-llm", version="1.0.0")
    assert any("host's pool" in step for step in trt.steps)


# Retraction (B04) and resume (B06).


def test_sglang_runs_no_more_giants_than_the_pool_holds() -> None:
    _, advice = advise(
        "slow-after-retraction", engine="sglang", version="0.5.23", kv_cache_size_tokens=2_642_688, block_size=64,
        traffic={"peak_running": 7, "tokens_per_request_peak": 680_000}, flags={"--schedule-conservativeness": 1.0},
    )  # fmt: skip
    assert flags(advice) == {"--max-running-requests": 3, "--schedule-conservativeness": 1.43}
    assert "sglang:num_retracted_requests_total" in advice.changes[0].verify


def test_resumed_requests_are_held_whole_or_not_resumed() -> None:
    known = {"kv_cache_size_tokens": 2047 * 16, "num_gpu_blocks": 2048, "block_size": 16,
             "flags": {"--kv-offloading-size": 8}}  # fmt: skip
    _, advice = advise(
        "offload-resume-deadlock", traffic={"peak_running": 4, "tokens_per_request_peak": 25_596}, **known
    )
    assert flags(advice) == {"--max-num-seqs": 1}  # 1,600 blocks of 2,047 each
    assert alternative(advice, "--kv-offloading-size").to is None
    _, unknown = advise("offload-resume-deadlock", **known)
    assert flags(unknown) == {"--kv-offloading-size": None}


# Levers that will not help.


def test_a_queue_that_waits_for_computing_gets_neither_pool_nor_fewer_bits() -> None:
    traffic = {"peak_running": 64, "peak_waiting": 40, "tokens_per_request_peak": 2000, "kv_usage_peak": 0.4,
               "queue_s_mean": 3.0, "prefill_s_mean": 0.5}  # fmt: skip
    for runbook in ("kv-saturated", "ttft-slo-burn"):
        _, advice = advise(
            runbook, traffic=traffic, kv_cache_size_tokens=400_000, block_size=16, max_num_seqs=64,
            device_memory_bytes=H100.memory_bytes, kv_bytes_per_token=131_072,
            flags={"--gpu-memory-utilization": 0.5, "--max-num-seqs": 256, "--kv-cache-dtype": "auto"},
        )  # fmt: skip
        assert "--gpu-memory-utilization" not in flags(advice)
        assert "40% full" in refused(advice, "--gpu-memory-utilization")
        assert "wait for computing" in refused(advice, "--kv-cache-dtype")


def test_eight_bits_are_advised_only_where_their_quality_was_measured_and_the_gpu_has_them() -> None:
    full = {"name": "auto", "flags": {"--kv-cache-dtype": "auto"}, "kv_bytes_per_token": 2, "items": 200,
            "accuracy": 0.9, "full_precision": True}  # fmt: skip
    held = {"name": "fp8", "flags": {"--kv-cache-dtype": "fp8"}, "kv_bytes_per_token": 1, "items": 200,
            "accuracy": 0.9, "drop": 0.0, "low": -0.01, "high": 0.01}  # fmt: skip
    known = {"kv_cache_size_tokens": 40_000, "compute_capability": "9.0", "flags": {"--kv-cache-dtype": "auto"}}
    _, unmeasured = advise("kv-saturated", **known)
    assert "not before quality is measured" in refused(unmeasured, "--kv-cache-dtype")
    _, measured = advise("kv-saturated", **known, quality_candidates=[full, held])
    assert flags(measured)["--kv-cache-dtype"] == "fp8"
    assert "80000" in measured.changes[-1].expected
    _, old_gpu = advise("kv-saturated", **{**known, "compute_capability": "7.0"}, checkpoint_quantization="fp8",
                        version="0.11.0")  # fmt: skip
    assert "8.9 (Ada)" in refused(old_gpu, "--kv-cache-dtype")


def test_traffic_tells_whether_a_queue_waits_for_memory() -> None:
    assert TrafficFacts(peak_waiting=3, kv_usage_peak=0.4).compute_bound
    assert not TrafficFacts(peak_waiting=3, kv_usage_peak=0.4, preemptions=2).compute_bound
    assert not TrafficFacts(peak_waiting=3, kv_usage_peak=0.9).compute_bound
    assert not TrafficFacts(peak_waiting=0, kv_usage_peak=0.4).compute_bound
    assert not TrafficFacts(peak_waiting=3).compute_bound


def test_what_else_would_do_is_named_beside_the_changes() -> None:
    known = {"kv_cache_size_tokens": 76_640, "num_gpu_blocks": 4_791, "block_size": 16, "max_model_len": 262_144}
    _, blocked = advise("head-of-line-block", version="0.19.1", traffic={"peak_running": 0}, **known)
    assert flags(blocked)["--max-model-len"] == 76_640
    assert alternative(blocked, "--scheduler-reserve-full-isl").to is False
    _, older = advise("head-of-line-block", version="0.18.0", **known)
    assert older.alternatives == ()
    _, storm = advise("eviction-storm", traffic={"peak_running": 128, "tokens_per_request_peak": 6000}, **known)
    assert flags(storm) == {"--max-num-seqs": 12}
    assert alternative(storm, "--watermark").to == 0.05
