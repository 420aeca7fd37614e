"""What engines and versions mean: pools of hybrid models, defaults, what is inside the budget, and impossible input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.memory.activation import forward_peak, sampler_peak
from engine.memory.deployment import Deployment, Gpu
from engine.memory.engines import engine_name, resolve_version, version_numbers
from engine.memory.plan import plan
from engine.memory.semantics import resolve, semantics_of
from engine.memory.shape import LayerGroup, ModelShape

GIB = 1 << 30
H100 = Gpu("H100-80GB", round(79.1 * GIB), (9, 0))
A100 = Gpu("A100-80GB", round(79.15 * GIB), (8, 0))
L4 = Gpu("L4-24GB", round(22.05 * GIB), (8, 9))
LLAMA = ModelShape(
    "Llama-3.1-8B",
    (LayerGroup(32, "full", 8, 128),),
    hidden_size=4096,
    intermediate_size=14336,
    num_q_heads=32,
    vocab_size=128256,
    max_position_embeddings=131072,
    weights_bytes=round(14.99 * GIB),
)
DELTA = LayerGroup(48, "recurrent", state_bytes=3207168)  # Qwen3.5-27B: 48 heads of 128 x 128 in float32, convolution
QWEN35 = ModelShape("Qwen3.5-27B", (DELTA, LayerGroup(16, "full", 4, 256)), max_position_embeddings=262144)
GEMMA4 = ModelShape(
    "gemma-4-31B",
    (LayerGroup(50, "sliding", 16, 256, window=1024), LayerGroup(10, "full", 4, 512)),
    max_position_embeddings=262144,
)


def test_a_hybrid_log_of_version_0_19_is_reproduced() -> None:
    """vllm#40691: blocks of 784 tokens, 290,864 tokens and 33.04 requests: the two lines count differently."""
    planned = plan(Deployment(QWEN35, version="0.19.0", num_gpu_blocks_override=1487, max_model_len=32768))
    assert planned.block_size == 784
    assert planned.kv_tokens == 290864
    assert round(planned.max_concurrency, 2) == 33.04


def test_from_0_21_on_printed_tokens_are_concurrency_times_length() -> None:
    old, new = (
        plan(Deployment(QWEN35, version=version, num_gpu_blocks_override=1487, max_model_len=32768))
        for version in ("0.20.0", "0.21.0")
    )
    assert old.max_concurrency == new.max_concurrency
    assert new.kv_tokens == int(new.max_concurrency * 32768)
    assert old.kv_tokens != new.kv_tokens
    assert any("do not divide bytes" in warning for warning in new.warnings)


def test_windows_cap_what_a_request_holds_with_the_hybrid_cache_only() -> None:
    server = Deployment(GEMMA4, version="0.20.0", kv_cache_bytes=50 * GIB, max_model_len=131072)
    hybrid, billed = plan(server), plan(replace(server, hybrid_kv_cache=False))
    assert billed.kv_bytes_per_token == 901120
    assert hybrid.kv_bytes_per_token == 81920
    assert billed.kv_fixed_bytes_per_request == 0
    assert hybrid.kv_fixed_bytes_per_request > 0
    assert hybrid.max_concurrency > 4 * billed.max_concurrency
    assert billed.verdict == "does_not_fit"
    assert hybrid.fits
    longer = plan(replace(server, max_model_len=262144))
    assert longer.kv_fixed_bytes_per_request == hybrid.kv_fixed_bytes_per_request


def test_sglang_has_a_smaller_pool_for_windows() -> None:
    """As many tokens in the windowed pool as 0.8 of the full one."""
    planned = plan(Deployment(GEMMA4, engine="sglang", kv_cache_bytes=50 * GIB, max_model_len=8192))
    assert planned.kv_bytes_per_token == 10 * 2 * 4 * 512 * 2 + 50 * 2 * 16 * 256 * 2 * 8 // 10
    whole = plan(
        Deployment(GEMMA4, engine="sglang", kv_cache_bytes=50 * GIB, max_model_len=8192, hybrid_kv_cache=False)
    )
    assert whole.kv_bytes_per_token == 901120


def test_context_parallel_ranks_share_the_tokens() -> None:
    latent = ModelShape("DeepSeek-V3", (LayerGroup(61, "latent", latent_width=576),), max_position_embeddings=163840)
    server = Deployment(latent, tp=8, num_gpus=8, kv_cache_bytes=20 * GIB, max_model_len=65536)
    one, eight = plan(server), plan(replace(server, dcp=8))
    assert eight.kv_tokens == pytest.approx(8 * one.kv_tokens, rel=0.001)
    assert eight.max_concurrency == pytest.approx(8 * one.max_concurrency, rel=0.001)


def test_a_draft_model_takes_weights_and_a_share_of_every_block() -> None:
    draft = ModelShape("draft", (LayerGroup(2, "full", 8, 128),), weights_bytes=GIB)
    plain = Deployment(LLAMA, gpu=H100, version="0.33.0")
    alone, drafted = plan(plain), plan(replace(plain, draft=draft))
    assert drafted.kv_bytes_per_token == 34 * 4096
    assert drafted.part("draft") == GIB
    assert alone.kv_cache_bytes - drafted.kv_cache_bytes == GIB


def test_lora_buffers_are_allocated_for_all_adapters() -> None:
    sizes = [
        plan(Deployment(LLAMA, gpu=H100, max_loras=count, max_lora_rank=rank)).part("LoRA")
        for count, rank in ((0, 0), (1, 16), (4, 16), (4, 64))
    ]
    assert sizes[0] == 0
    assert sizes[2] == 4 * sizes[1]
    assert sizes[3] == 4 * sizes[2]
    # q, k, v, o, gate, up and down of 32 layers: 2.62 M values at rank 1
    assert sizes[1] == 32 * (5 * 4096 + 4096 + 14336 + 4096 + 2 * 1024 + 2 * 14336 + 2 * 4096) * 16 * 2


@pytest.mark.parametrize(
    ("version", "utilization", "graphs_inside"),
    [
        ("0.6.6", 0.9, False),
        ("0.19.1", 0.9, False),
        ("0.20.0", 0.92, False),
        ("0.21.0", 0.92, True),
        (None, 0.92, True),
    ],
)
def test_defaults_of_utilization_and_where_graphs_are(
    version: str | None, utilization: float, graphs_inside: bool
) -> None:
    planned = plan(Deployment(LLAMA, gpu=H100, version=version))
    graphs = next(part for part in planned.parts if part.name == "CUDA graphs")
    assert planned.gpu_memory_utilization == utilization
    assert graphs.inside_budget == graphs_inside
    assert graphs.bytes > 0
    eager = plan(Deployment(LLAMA, gpu=H100, version=version, enforce_eager=True))
    assert (eager.kv_cache_bytes > planned.kv_cache_bytes) == graphs_inside


@pytest.mark.parametrize(
    ("version", "gpu", "seqs", "batched"),
    [
        ("0.6.6", H100, 256, 2048),
        ("0.8.5", H100, 1024, 8192),
        ("0.8.5", A100, 256, 2048),
        ("0.27.1", Gpu("B200", 178 * GIB, (10, 0)), 1024, 8192),
        ("0.28.0", Gpu("B200", 178 * GIB, (10, 0)), 1024, 16384),
        ("0.33.0", L4, 256, 2048),
        ("0.33.0", Gpu("GB10", 120 * GIB, (12, 1), unified=True), 256, 2048),
    ],
)
def test_batch_defaults_by_version_and_gpu(version: str, gpu: Gpu, seqs: int, batched: int) -> None:
    filled = resolve(Deployment(LLAMA, gpu=gpu, version=version))
    assert (filled.max_num_seqs, filled.max_num_batched_tokens) == (seqs, batched)


def test_without_chunked_prefill_the_batch_holds_a_whole_request() -> None:
    short = replace(LLAMA, max_position_embeddings=20000)
    assert resolve(Deployment(short, gpu=L4, version="0.4.1")).max_num_batched_tokens == 20000
    assert resolve(Deployment(LLAMA, gpu=L4, version="0.6.4")).max_num_batched_tokens == 512
    old_gpu = Gpu("V100", 16 * GIB, (7, 0))
    assert resolve(Deployment(LLAMA, gpu=old_gpu, version="0.6.4")).max_num_batched_tokens == 131072


@pytest.mark.parametrize(("tokens", "logged_gib"), [(20000, 2.07), (29000, 2.99)])
def test_activations_grow_with_the_batch_and_not_with_the_length(tokens: int, logged_gib: float) -> None:
    """vllm#10517: what the profile run of Llama-3.1-8B took."""
    server = resolve(Deployment(LLAMA, gpu=L4, version="0.6.4", max_num_batched_tokens=tokens))
    assert forward_peak(server).bytes / GIB == pytest.approx(logged_gib, rel=0.01)
    assert forward_peak(replace(server, max_model_len=4096)) == forward_peak(server)


def test_sampling_takes_the_vocabulary_for_every_request() -> None:
    """vllm#10511: 1.26 GiB for 256 requests and 128,256 tokens, on one rank as on two."""
    server = resolve(Deployment(LLAMA, gpu=H100, version="0.6.4", max_num_seqs=256))
    semantics = semantics_of("vllm", "0.6.4")
    assert sampler_peak(server, semantics).bytes / GIB == pytest.approx(1.26, rel=0.05)
    assert sampler_peak(replace(server, tp=2), semantics) == sampler_peak(server, semantics)
    assert sampler_peak(replace(server, max_num_seqs=64), semantics).bytes * 4 == sampler_peak(server, semantics).bytes


def test_the_rank_that_samples_decides_the_pool() -> None:
    """vllm#13061: the other rank had 8.69 GiB, the log's 81,536 tokens are what the sampling rank had left."""
    shape = ModelShape("R1-Distill-Qwen-14B", (LayerGroup(48, "full", 8, 128),), hidden_size=5120, vocab_size=152064)
    server = resolve(Deployment(shape, gpu=L4, version="0.7.2 V0", max_model_len=131072, tp=2, num_gpus=2))
    others = round(8.69 * GIB) + round(0.19 * GIB)
    sampling = sampler_peak(server, semantics_of("vllm", "0.7.2 V0")).bytes
    assert (others - sampling) / (48 * 4 * 128 * 4) == pytest.approx(81536, rel=0.01)


def test_a_pool_of_stages_is_the_least_and_each_has_its_layers() -> None:
    shape = ModelShape("m", (LayerGroup(27, "latent", latent_width=576),), max_position_embeddings=4096)
    server = Deployment(shape, tp=2, pp=2, num_gpus=4, stage_kv_cache_bytes=(12 * GIB, 12 * GIB), block_size=16)
    planned = plan(server)
    assert planned.deployment.stage_layers == (14, 13)
    assert planned.kv_bytes_per_token == 14 * 1152
    rich_first = plan(replace(server, stage_kv_cache_bytes=(14 * GIB, 12 * GIB)))
    assert rich_first.kv_bytes_per_token == 13 * 1152
    with pytest.raises(ConfigError, match="add up"):
        plan(replace(server, stage_layers=(14, 14)))


def test_shared_memory_counts_against_utilization_in_some_versions() -> None:
    def pool(version: str, others: int) -> int:
        return plan(
            Deployment(LLAMA, gpu=H100, version=version, gpu_memory_utilization=0.5, other_processes_bytes=others)
        ).kv_cache_bytes

    for version, charged in (
        ("0.4.0", True),
        ("0.6.3", False),
        ("0.6.4.post1", True),
        ("0.6.6", False),
        ("0.8.5", True),
    ):
        assert (pool(version, 10 * GIB) < pool(version, 0)) == charged, version
    crowded = plan(Deployment(LLAMA, gpu=H100, version="0.33.0", other_processes_bytes=10 * GIB))
    assert crowded.verdict == "does_not_fit"
    assert "other processes leave 69.10 GiB free" in crowded.reasons[0]


def test_a_thin_margin_is_a_risk() -> None:
    server = Deployment(LLAMA, version="0.33.0", kv_cache_bytes=131072 * 131072 + (3 << 21), max_model_len=131072)
    assert plan(server).verdict == "at_risk"
    assert plan(replace(server, kv_cache_bytes=131072 * 131072)).verdict == "does_not_fit"  # the null block is missing
    assert plan(replace(server, version="0.6.6", kv_cache_bytes=131072 * 131072)).fits
    assert plan(replace(server, kv_cache_bytes=int(131072 * 131072 * 1.05))).verdict == "fits"


def test_tensorrt_llm_takes_a_share_of_what_is_left_and_rounds_up() -> None:
    server = Deployment(LLAMA, engine="tensorrt-llm", version="1.0.0", gpu=H100, gpu_memory_utilization=0.5)
    planned = plan(server)
    free = planned.kv_cache_bytes * 2
    held = sum(p.bytes for p in planned.parts if p.name not in ("KV cache", "reserve", "CUDA graphs"))
    assert free == pytest.approx(H100.memory_bytes - held, abs=2)
    capped = plan(replace(server, max_kv_tokens=860308))
    assert capped.kv_tokens == min(planned.kv_tokens, 860320)
    assert plan(replace(server, max_kv_tokens=1000)).kv_tokens == 1024


def test_sglang_static_memory_is_weights_and_pool() -> None:
    server = Deployment(LLAMA, engine="sglang", gpu=H100, gpu_memory_utilization=0.8)
    planned = plan(server)
    assert planned.kv_cache_bytes == int(H100.memory_bytes * 0.8) - planned.part("weights")
    high = plan(replace(server, gpu_memory_utilization=0.99))
    assert high.verdict == "at_risk"
    assert "lower it" in high.reasons[0]


def test_versions_are_read_as_people_write_them() -> None:
    assert version_numbers("0.6.4.post1 V0") == (0, 6, 4, 1)
    assert version_numbers("v0.9.x V1") == (0, 9)
    assert version_numbers("0.2x V1") == (0, 20)
    assert version_numbers("0.29.1-rc1 V1") == (0, 29, 1)
    assert version_numbers("mid-2026 V1") is None
    assert resolve_version("vllm", None)[1].startswith("no version")
    assert "newer than what is known" in resolve_version("vllm", "0.99.0")[1]
    assert "older than what is known" in resolve_version("vllm", "0.1.4")[1]
    assert "cannot be read" in resolve_version("sglang", "nightly")[1]
    assert engine_name("Aphrodite (vLLM family)") == "vllm"
    assert engine_name("TRT-LLM") == "tensorrt-llm"
    with pytest.raises(ConfigError, match="use vllm, sglang"):
        engine_name("vllmish")
    assert any("0.99.0" in note for note in plan(Deployment(LLAMA, gpu=H100, version="0.99.0")).warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "--tensor-parallel-size must be at least 1"),
        ({"tp": 3}, "does not divide 32 attention heads"),
        ({"pp": 40}, "at most one a layer"),
        ({"num_gpus": 2, "tp": 4}, "needs 4 GPUs, not 2"),
        ({"gpu_memory_utilization": 0.0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": 90.0}, "above 0 and at most 1"),
        ({"gpu": Gpu("none", 0)}, "more than zero"),
        ({"gpu": None}, "add --gpu or --gpu-memory, or state the KV memory"),
        ({"kv_cache_bytes": -1}, "check --kv-gib"),
        ({"max_model_len": 0}, None),
        ({"weights_bytes": -5}, "must not be negative"),
        ({"engine": "ollama"}, "use vllm, sglang"),
        ({"kv_cache_dtype": "int3"}, "not known"),
        ({"shape": replace(LLAMA, layers=())}, "no layers"),
        ({"shape": replace(LLAMA, weights_bytes=None)}, "--weights-gib"),
        ({"shape": replace(LLAMA, hidden_size=None)}, "--activation-gib"),
        ({"shape": replace(LLAMA, max_position_embeddings=None)}, "add --max-model-len"),
        ({"shape": replace(LLAMA, layers=(LayerGroup(2, "full", 0, 64),)), "kv_cache_bytes": GIB}, "--kv-heads"),
    ],
)
def test_impossible_input_is_one_sentence(changes: dict[str, Any], message: str | None) -> None:
    server = Deployment(LLAMA, gpu=H100, version="0.33.0")
    if message is None:
        with pytest.raises(ConfigError, match="at least 1"):
            plan(replace(server, **changes))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        plan(replace(server, **changes))
    assert "\n" not in str(caught.value)


def test_plain_dims_with_a_stated_pool_need_nothing_else() -> None:
    shape = ModelShape("", (LayerGroup(80, "full", 8, 128),))
    planned = plan(Deployment(shape, kv_cache_bytes=round(36.07 * GIB), tp=4, block_size=16, max_model_len=8192))
    data = planned.to_dict()
    assert data["kv_bytes_per_token"] == 81920
    assert data["kv_blocks"] == 29548
    assert data["kv_tokens"] == 29548 * 16
    assert data["fits"] is True
    assert data["max_concurrency"] == pytest.approx(29548 / 512)
    assert planned.parts == ()


def test_the_lines_name_every_step_with_its_numbers() -> None:
    lines = "\n".join(plan(Deployment(LLAMA, gpu=H100, version="0.33.0")).lines)
    for step in (
        "32 layers x 8 KV heads x 512.00 bytes",
        "79.10 GiB x 0.92 = 72.77 GiB",
        "- weights 14.99 GiB",
        "131,072 tokens",
    ):
        assert step in lines


def test_the_rule_of_thumb_stands_beside_the_exact_figure() -> None:
    planned = plan(Deployment(LLAMA, gpu=H100, version="0.33.0", tokens_per_request=8192))
    rule = planned.articles
    assert rule.kv_bytes_per_request == 8192 * 131072
    assert rule.concurrent_safety_1_3 == int((H100.memory_bytes - planned.part("weights")) / (GIB * 1.3))
    assert rule.concurrent_safety_1_5 < rule.concurrent_safety_1_3 < rule.exact_concurrency
    assert rule.exact_concurrency == pytest.approx(planned.max_concurrency * 16)
    assert rule.kv_tokens_at_80_percent == int(planned.kv_tokens * 0.8)


def test_data_parallel_attention_divides_heads_by_fewer_ranks() -> None:
    server = Deployment(LLAMA, engine="sglang", tp=8, num_gpus=8, dp=4, kv_cache_bytes=10 * GIB, max_model_len=8192)
    apart, shared = plan(server), plan(replace(server, enable_dp_attention=True))
    assert apart.kv_bytes_per_token == 32 * 512
    assert shared.kv_bytes_per_token == 32 * 4 * 512, "two ranks share the eight heads of a request"
    assert any("data-parallel ranks" in warning for warning in shared.warnings)
    with pytest.raises(ConfigError, match="data-parallel attention over 3 ranks"):
        plan(replace(server, dp=3, enable_dp_attention=True))


def test_a_host_that_is_too_small_for_its_tier_does_not_fit() -> None:
    server = Deployment(LLAMA, gpu=H100, version="0.33.0", kv_offloading_bytes=100 * GIB)
    assert plan(server).offload is not None
    assert plan(server).fits
    roomy, tight, over = (plan(replace(server, host_memory_bytes=size * GIB)) for size in (256, 120, 105))
    assert (roomy.verdict, tight.verdict, over.verdict) == ("fits", "at_risk", "does_not_fit")
    assert "90% of the host" in over.reasons[0]
