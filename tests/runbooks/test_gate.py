"""What the gate refuses, and with which reason; what hardware can do; what is read of a target."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.memory.deployment import Gpu
from engine.memory.shape import LayerGroup, ModelShape
from runbooks.changes import Draft, refusal_reason
from runbooks.engine_names import flag_for, metric_for, no_preemptions_query, query_for, vllm_flag
from runbooks.facts import TargetFacts, from_facts
from runbooks.facts_deployment import completed, deployment_of, plan_of
from runbooks.hardware import capability_of, nearest_working, storage_only, why_not_block_size, why_not_on
from runbooks.in_force import value_in_force

GIB = 1024**3
H100 = Gpu("H100-80GB", int(79.1 * GIB), (9, 0))
A100 = Gpu("A100-80GB", int(79.15 * GIB), (8, 0))
L4 = Gpu("L4-24GB", int(22.05 * GIB), (8, 9))
LLAMA_8B = ModelShape(
    "8B", (LayerGroup(32, "full", 8, 128),), "LlamaForCausalLM", 4096, 14_336, 32, 128_256, 131_072, "bfloat16",
    8_030_000_000, weights_bytes=int(14.96 * GIB),
)  # fmt: skip


def why(flag: str, to: Any, runbook: str = "engine-stall", version: str | None = "0.33.0", **facts: Any) -> str:
    return refusal_reason(runbook, TargetFacts("vllm", version, **facts), flag, to) or ""


# One reason each.


@pytest.mark.parametrize(
    ("flag", "to", "facts", "reason"),
    [
        ("--prefix-cache-ttl", 60, {}, "not in the flag catalog"),
        ("--swap-space", 8, {}, "was last seen in vllm 0.17.1"),
        ("--max-num-active-seqs", 8, {"version": "0.30.0"}, "exists since vllm 0.31.0"),
        ("--kv-cache-dtype", "fp8_e6m1", {}, "is in no release"),
        ("--kv-cache-dtype", "nvfp4", {"version": "0.11.0"}, "exists since vllm 0.20.0"),
        ("--enable-prefix-caching", "false", {}, "--x or --no-x"),
        ("--disable-log-stats", False, {}, "no negative form"),
        ("--max-num-seqs", True, {}, "takes a number"),
        ("--max-num-seqs", 12.5, {}, "whole numbers"),
        ("--max-num-seqs", "64", {}, "takes a number"),
        ("--gpu-memory-utilization", 92, {}, "at most 1, a share of the GPU's memory, not 92"),
        ("--gpu-memory-utilization", 0, {}, "must be above 0"),
        ("--watermark", 1.0, {}, "must be below 1"),
        ("--block-size", 0, {}, "at least 1"),
        ("--max-num-seqs", 64, {"flags": {"--max-num-seqs": 64}}, "no change: --max-num-seqs is 64 already"),
        ("--max-num-seqs", 64, {"max_num_seqs": 64}, "is 64 already"),
        ("--gpu-memory-utilization", 0.92, {}, "0.92 is the default of vllm 0.33.0"),
        ("--gpu-memory-utilization", 0.9, {"version": "0.19.1"}, "0.9 is the default of vllm 0.19.1"),
        ("--gpu-memory-utilization", None, {"flags": {"--gpu-memory-utilization": 0.92}}, "set or not"),
        ("--max-num-seqs", 1024, {"gpu": H100, "device_memory_bytes": H100.memory_bytes}, "the default"),
        ("--max-num-seqs", 256, {"gpu": A100, "device_memory_bytes": A100.memory_bytes}, "the default"),
        ("--max-num-batched-tokens", 2048, {"gpu": L4, "device_memory_bytes": L4.memory_bytes}, "the default"),
        ("--num-gpu-blocks-override", None, {}, "is unset already"),
        ("--kv-cache-memory-bytes", "4GiB", {"flags": {"--kv-cache-memory-bytes": 4 * GIB}}, "already"),
        ("--kv-cache-dtype", "fp8", {"compute_capability": (8, 0)}, "8.9 (Ada)"),
        ("--kv-cache-dtype", "fp8_e5m2", {"checkpoint_quantization": "fp8"}, "refused with an fp8 checkpoint"),
        ("--kv-cache-dtype", "nvfp4", {"compute_capability": (9, 0)}, "Blackwell"),
        ("--kv-cache-dtype", "fp8_ds_mla", {"shape": LLAMA_8B}, "multi-head latent attention only"),
        ("--block-size", 24, {"attention_backend": "TRITON_ATTN"}, "multiples of 16"),
        ("--block-size", 64, {"version": "0.7.3", "compute_capability": (8, 0)}, "at most 32"),
        ("--block-size", 48, {"version": "0.10.2"}, "no release"),
        ("--gpu-memory-utilization", 0.8, {"flags": {"--kv-cache-memory-bytes": GIB}}, "replaces the sizing"),
        ("--gpu-memory-utilization", 0.8, {"flags": {"--num-gpu-blocks-override": 9}}, "replaces the sizing"),
        ("--max-num-batched-tokens", 32, {"max_num_seqs": 64}, "could not all decode in one step"),
        ("--max-num-seqs", 4096, {"max_num_batched_tokens": 2048}, "could not all decode in one step"),
        (
            "--max-num-batched-tokens", 2048,
            {"max_model_len": 8192, "flags": {"--enable-chunked-prefill": False}}, "must then fit a step",
        ),
        ("--long-prefill-token-threshold", 64, {"flags": {"--enable-chunked-prefill": False}}, "is off"),
        ("--kv-offloading-size", 8, {"flags": {"--kv-transfer-config": "{}"}}, "names a KV connector already"),
        ("--calculate-kv-scales", True, {"version": "0.20.0", "flags": {"--kv-cache-dtype": "auto"}}, "fp8 cache"),
        ("--tensor-parallel-size", 3, {"shape": LLAMA_8B}, "does not divide the model's 32 attention heads"),
        ("--tensor-parallel-size", 4, {"num_gpus": 2}, "need 4 GPUs, and there are 2"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(flag: str, to: Any, facts: dict[str, Any], reason: str) -> None:
    assert reason in why(flag, to, **facts)


@pytest.mark.parametrize(
    ("flag", "to", "facts"),
    [
        ("--max-num-seqs", 64, {}),
        ("--gpu-memory-utilization", 0.8, {}),
        ("--gpu-memory-utilization", 0.92, {"version": None}),  # nobody knows what its default is
        ("--kv-cache-dtype", "fp8", {"compute_capability": (8, 9)}),
        ("--kv-cache-dtype", "fp8", {"compute_capability": (8, 0), "attention_backend": "FLASHINFER"}),
        ("--kv-cache-dtype", "fp8", {}),  # the GPU is not known
        ("--kv-cache-dtype", "fp8_ds_mla", {"compute_capability": (9, 0)}),
        ("--max-num-seqs", 512, {"gpu": A100, "device_memory_bytes": A100.memory_bytes}),
        ("--kv-cache-memory-bytes", 8 * GIB, {"flags": {"--kv-cache-memory-bytes": 4 * GIB}}),
        ("--num-gpu-blocks-override", None, {"flags": {"--num-gpu-blocks-override": 9}}),
        ("--block-size", 32, {"attention_backend": "FLASH_ATTN"}),
        ("--enable-prefix-caching", False, {}),
        ("--disable-log-stats", None, {"flags": {"--disable-log-stats": True}}),
    ],
)
def test_what_passes(flag: str, to: Any, facts: dict[str, Any]) -> None:
    assert why(flag, to, **facts) == ""


@pytest.mark.parametrize(
    ("runbook", "flag", "to", "given"),
    [
        ("eviction-storm", "--gpu-memory-utilization", 0.8, None),  # below the default, which is in force
        ("eviction-storm", "--kv-cache-dtype", "auto", "fp8"),
        ("cache-thrash", "--enable-prefix-caching", False, True),
        ("itl-slo-burn", "--enforce-eager", True, False),
        ("kv-does-not-fit", "--max-model-len", 9000, 8000),
        ("offload-host-memory", "--kv-offloading-size", 200, 100),
        ("prefix-cache-inert", "--block-size", 64, 32),
        ("oom", "--gpu-memory-utilization", None, 0.8),  # taken out, the default is more
        ("oom", "--kv-cache-memory-bytes", "8GiB", "4GiB"),
    ],
)
def test_the_wrong_way_is_refused_from_defaults_and_to_defaults_too(
    runbook: str, flag: str, to: Any, given: Any
) -> None:
    reason = why(flag, to, runbook, flags={} if given is None else {flag: given})
    assert "wrong direction" in reason or "is too small" in reason


def test_flags_of_other_engines_are_gated_by_what_they_mean() -> None:
    sglang = TargetFacts("sglang", "0.5.23", flags={"--max-running-requests": 16, "--disable-radix-cache": True})
    assert "compete for the same blocks" in (
        refusal_reason("eviction-storm", sglang, "--max-running-requests", 32) or ""
    )
    assert "extends the radix cache" in (
        refusal_reason("cache-thrash", sglang, "--enable-hierarchical-cache", True) or ""
    )
    assert "at most 1" in (refusal_reason("kv-saturated", sglang, "--mem-fraction-static", 88) or "")


def test_later_changes_are_judged_with_the_earlier_ones_made() -> None:
    draft = Draft("eviction-storm", TargetFacts("vllm", "0.33.0", flags={"--num-gpu-blocks-override": 8}))
    text = {"why": "w", "expected": "e", "cost": "c", "verify": "up == 1"}
    assert not draft.propose("--kv-cache-memory-bytes", GIB, **text)
    assert draft.propose("--num-gpu-blocks-override", None, **text)
    assert draft.propose("--kv-cache-memory-bytes", GIB, **text)
    assert [c.flag for c in draft.changes] == ["--num-gpu-blocks-override", "--kv-cache-memory-bytes"]
    assert "a large" in draft.changes[1].risk or "too large" in draft.changes[1].risk
    old = Draft("itl-slo-burn", TargetFacts("vllm", "0.8.5", flags={"--enforce-eager": True}))
    assert old.propose("--enforce-eager", False, **text)
    assert old.changes[0].to is None  # a switch there: it has no negative form


# Hardware.


@pytest.mark.parametrize(
    ("sm", "value", "more", "works"),
    [
        ("8.6", "fp8_e4m3", {"attention_backend": "triton"}, False),
        ("8.6", "fp8_e5m2", {"checkpoint_quantization": None}, True),
        ("8.9", "fp8_e5m2", {"checkpoint_quantization": "fp8"}, False),
        ("8.0", "fp8", {"attention_backend": "flashinfer", "version": "0.10.2"}, True),
        ("8.0", "fp8", {"attention_backend": "flashinfer", "version": "0.10.1"}, False),
        ("7.0", "fp8_e4m3", {}, False),
        ("7.0", "fp8", {"attention_backend": "flashinfer"}, False),
        ("7.0", "fp8_e5m2", {}, False),
        ("9.0", "fp8_e5m2", {"attention_backend": "FLASH_ATTN"}, False),
        ("8.0", "turboquant_4bit_nc", {}, True),
        ("8.0", "turboquant_k8v4", {}, False),
        ("10.0", "nvfp4", {}, True),
        ("12.0", "nvfp4", {}, False),  # vLLM's kernels are for 10.x
        ("12.0", "nvfp4", {"engine": "sglang"}, True),
        ("9.0", "int8_per_token_head", {"attention_backend": "FLASH_ATTN"}, False),
        ("9.0", "int8_per_token_head", {"attention_backend": "TRITON_ATTN"}, True),
        ("9.0", "int8_per_token_head", {"mla": True}, False),
        ("9.0", "fp8_inc", {}, False),
        (None, "fp8", {}, True),
        ("8.0", "auto", {}, True),
    ],
)
def test_formats_by_gpu(sm: str | None, value: str, more: dict[str, Any], works: bool) -> None:
    assert (why_not_on(sm, value, **more) is None) == works


def test_reading_of_compute_capabilities_and_the_nearest_format() -> None:
    assert [capability_of(v) for v in ("8.6", "sm_90", "sm100a", 89, [8, 0], "x", None)] == [
        (8, 6), (9, 0), (10, 0), (8, 9), (8, 0), None, None,
    ]  # fmt: skip
    assert nearest_working("8.0", ["nvfp4", "fp8", "int8_per_token_head"]) == "int8_per_token_head"
    assert nearest_working("7.0", ["nvfp4", "fp8"]) is None
    assert storage_only("8.0", "fp8")
    assert not storage_only("9.0", "fp8")
    assert "128" in (why_not_block_size(64, attention_backend="CUTLASS_MLA") or "")
    assert why_not_block_size(64, attention_backend="FLASHMLA") is None


# Facts.

LABELS = {  # as vLLM 0.32.0 writes them
    "block_size": "32", "cache_dtype": "auto", "enable_prefix_caching": "True", "gpu_memory_utilization": "0.92",
    "kv_cache_dtype_skip_layers": "[]", "kv_cache_memory_bytes": "1073741824", "kv_cache_size_tokens": "1536",
    "kv_offloading_size": "None", "num_gpu_blocks": "48", "num_gpu_blocks_override": "48",
    "prefix_cache_retention_interval": "0", "prefix_caching_hash_algo": "sha256", "prefix_match_unit": "None",
    "user_specified_block_size": "True", "sliding_window": "None",
}  # fmt: skip


def test_labels_of_a_real_server_are_read_in_full() -> None:
    facts = from_facts({"engine": "vllm", "version": "0.32.0", "cache_config_info": LABELS})
    assert (facts.block_size, facts.num_gpu_blocks) == (32, 48)
    assert facts.kv_cache_size_tokens == 47 * 32  # what is stated counts the null block
    assert facts.flags["--num-gpu-blocks-override"] == 48
    assert "--kv-cache-memory-bytes" not in facts.flags  # a default of its own under an override
    assert facts.flags["--kv-offloading-size"] is None
    assert facts.flags["--block-size"] == 32
    assert facts.flags["--prefix-cache-retention-interval"] == 0
    outlived = {**LABELS, "calculate_kv_scales": "False"}  # a field still, and no flag since 0.28.0
    assert "--calculate-kv-scales" not in from_facts({"version": "0.32.0", "cache_config_info": outlived}).flags
    sized = {**LABELS, "num_gpu_blocks_override": "None", "user_specified_block_size": "False",
             "kv_cache_size_tokens": "1504"}  # fmt: skip
    other = from_facts({"cache_config_info": sized})
    assert (other.flags["--kv-cache-memory-bytes"], other.flags["--block-size"]) == (GIB, None)
    assert other.kv_cache_size_tokens == 1504


def test_hardware_and_model_are_read_from_names_fields_and_flags() -> None:
    facts = from_facts({
        "engine": "vllm", "version": "0.33.0", "gpu": "H100-80GB", "model": "meta-llama/Llama-3.1-8B-Instruct",
        "flags": {"--tensor-parallel-size": 2, "--attention-backend": "FLASHINFER"},
    })  # fmt: skip
    assert facts.gpu is not None
    assert facts.compute_capability == (9, 0)
    assert facts.device_memory_bytes == facts.gpu.memory_bytes
    assert (facts.tp, facts.num_gpus, facts.attention_backend) == (2, 2, "FLASHINFER")
    assert facts.shape is not None
    assert facts.shape.num_layers == 32
    assert completed(facts).kv_bytes_per_token == 65_536  # 2 x 32 layers x 8/2 heads x 128 x 2 B
    named = from_facts({"gpu": {"name": "X", "memory_bytes": 7, "compute_capability": "8.6"}, "model": "testbed"})
    assert (named.compute_capability, named.device_memory_bytes, named.shape) == ((8, 6), 7, None)
    with pytest.raises(ConfigError):
        from_facts({"gpu": "H9000"})


def test_flags_are_read_from_commands_and_nested_yaml() -> None:
    line = (
        "vllm serve M -tp 2 --max_num_seqs=8 --gpu-memory-utilization 0.8 --no-enable-prefix-caching --quantization fp8"
    )
    for told in (line, line.split()):
        facts = from_facts({"engine": "vllm", "version": "0.33.0", "flags": told})
        assert (facts.tp, facts.max_num_seqs, facts.utilization) == (2, 8, 0.8)
        assert facts.flags["--enable-prefix-caching"] is False
        assert facts.checkpoint_quantization == "fp8"
    yaml = {"kv_cache_config": {"free_gpu_memory_fraction": 0.5}, "--max_batch_size": 16, "--tp_size": 2}
    trt = from_facts({"engine": "tensorrt-llm", "version": "1.0.0", "flags": yaml})
    assert trt.utilization == 0.5
    assert (trt.tp, trt.max_num_seqs) == (2, 16)
    assert from_facts({"engine": "vllm", "flags": "vllm serve 'M"}).flags == {}
    sglang = from_facts({"engine": "sglang", "version": "0.5.23", "flags": {"mem_fraction_static": 0.8}})
    assert sglang.utilization == 0.8


def test_a_target_is_planned_with_its_own_flags() -> None:
    known = {"engine": "vllm", "version": "0.33.0", "gpu": H100, "shape": LLAMA_8B}
    facts = from_facts({**known, "flags": {"--gpu-memory-utilization": 0.5, "--max-model-len": 8192}})
    deployment = deployment_of(facts)
    assert deployment is not None
    assert (deployment.gpu_memory_utilization, deployment.max_model_len, deployment.tp) == (0.5, 8192, 1)
    plan = plan_of(facts)
    assert plan is not None
    assert not isinstance(plan, str)
    assert plan.kv_bytes_per_token == 131_072
    assert deployment_of(from_facts({"engine": "vllm"})) is None
    broken = plan_of(from_facts({**known, "flags": {"--tensor-parallel-size": 3}}))
    assert isinstance(broken, str)


def test_values_in_force() -> None:
    facts = TargetFacts("vllm", "0.33.0", flags={"--max-num-seqs": 8}, max_num_batched_tokens=512)
    assert value_in_force(facts, "--max-num-seqs").how == "set"
    assert (value_in_force(facts, "--max-num-batched-tokens").value, facts.mla) == (512, None)
    assert value_in_force(facts, "--gpu-memory-utilization").value == 0.92
    assert value_in_force(facts, "--max-num-queued-reqs").how == "unknown"
    unsure = TargetFacts("vllm", "0.33.0", device_memory_bytes=80 * GIB)  # an H100 or an A100
    assert value_in_force(unsure, "--max-num-seqs").value is None
    b200 = TargetFacts("vllm", "0.28.0", device_memory_bytes=178 * GIB)
    assert value_in_force(b200, "--max-num-batched-tokens").value == 16_384
    assert (
        value_in_force(TargetFacts("vllm", "0.27.1", device_memory_bytes=178 * GIB), "--max-num-batched-tokens").value
        == 8192
    )


def test_names_of_flags_and_metrics_by_engine_and_version() -> None:
    assert flag_for("sglang", "--max-model-len") == "--context-length"
    assert vllm_flag("sglang", "--page-size") == "--block-size"
    usage = "max(vllm:kv_cache_usage_perc) < 0.95"
    assert query_for("vllm", "0.9.1", usage) == "max(vllm:gpu_cache_usage_perc) < 0.95"
    assert query_for("vllm", "0.33.0", usage) == usage
    assert query_for("sglang", "0.5.23", usage) == "max(sglang:token_usage) < 0.95"
    itl = "rate(vllm:inter_token_latency_seconds_bucket[5m])"
    assert query_for("vllm", "0.8.5", itl) == "rate(vllm:time_per_output_token_seconds_bucket[5m])"
    assert metric_for("sglang", "vllm:num_requests_running", "0.5.2") == "sglang:num_running_reqs"
    retracted = {v: no_preemptions_query("sglang", v) for v in (None, "0.5.23", "0.5.5.post3", "0.4.6.post5")}
    assert retracted[None] == retracted["0.5.23"] == "increase(sglang:num_retracted_requests_total[5m]) == 0"
    assert "num_retracted_reqs" in retracted["0.5.5.post3"]
    assert "token_usage" in retracted["0.4.6.post5"]
