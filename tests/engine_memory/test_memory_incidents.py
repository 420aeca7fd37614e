"""Memory-plan incidents of public threads: each case's numbers and the verdict they led to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.memory.deployment import Deployment, Gpu
from engine.memory.offload import HostTier, plan_offload
from engine.memory.plan import plan
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.sharing import plan_shared
from engine.memory.two_logs import LogLine, cost_from_logs

GIB = 1 << 30
CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "incidents.json").read_text(encoding="utf-8")
)


def _uniform(layers: int, heads: int, width: int, dtype: str = "bfloat16", **more: Any) -> ModelShape:
    return ModelShape("model", (LayerGroup(layers, "full", heads, width),), dtype=dtype, **more)


def _pool(case: dict[str, Any]) -> None:
    planned = plan(
        Deployment(
            _uniform(*case["dims"], case["dtype"]),
            engine=case["engine"],
            version=case["version"],
            block_size=case["block_size"],
            kv_cache_bytes=case["kv_bytes"],
            max_model_len=5120,
            max_num_seqs=5,
        )
    )
    assert planned.verdict == case["expect"]
    assert planned.kv_tokens == case["tokens"]
    assert any("25,600 tokens can be in flight" in warning for warning in planned.warnings)


def _request(case: dict[str, Any]) -> None:
    planned = plan(
        Deployment(
            _uniform(*case["dims"], case["dtype"]),
            engine=case["engine"],
            version=case["version"],
            block_size=case["block_size"],
            kv_cache_bytes=GIB,
            max_model_len=case["request_tokens"],
        )
    )
    assert planned.needed_bytes / GIB == pytest.approx(case["gib"], rel=0.003)


def _shared(case: dict[str, Any]) -> None:
    gpu = Gpu("A100-80GB", round(case["gpu_gib"] * GIB), (8, 0))
    large = _uniform(80, 8, 128, hidden_size=8192, intermediate_size=29568, vocab_size=152064, weights_bytes=39 * GIB)
    small = _uniform(48, 8, 128, hidden_size=5120, intermediate_size=13824, vocab_size=152064, weights_bytes=9 * GIB)
    servers = [
        Deployment(
            shape,
            version=case["version"],
            gpu=gpu,
            gpu_memory_utilization=util,
            max_model_len=8192,
            kv_cache_dtype="fp8",
            max_num_seqs=64,
        )
        for shape, util in zip((large, small), case["utils"], strict=True)
    ]
    shared = plan_shared(servers, case["order"])
    assert [planned.fits for planned in shared.plans] == case["expect"]
    assert shared.fits == all(case["expect"])


def _reserve(case: dict[str, Any]) -> None:
    planned = plan(
        Deployment(
            _uniform(32, 8, 128, "float16"),
            version=case["version"],
            gpu=Gpu("V100-16GB", round(case["gpu_gib"] * GIB), (7, 0)),
            num_gpus=2,
            tp=2,
            max_model_len=40000,
            gpu_memory_utilization=case["util"],
            weights_bytes=round(7.51 * GIB),
            activation_bytes=round(2.53 * GIB),
            non_torch_bytes=round(0.39 * GIB),
        )
    )
    outside = planned.deployment.gpu.memory_bytes - (planned.budget_bytes or 0) if planned.deployment.gpu else 0
    assert planned.verdict == case["expect"]
    assert outside / GIB == pytest.approx(case["reserve_gib"], abs=0.011)
    if "blocks" in case:
        assert planned.kv_blocks == pytest.approx(case["blocks"], rel=0.003)
        assert round(planned.max_concurrency, 2) == case["concurrency"]
    else:
        assert "outside the budget" in planned.reasons[0]


def _sampler(case: dict[str, Any]) -> None:
    shape = ModelShape(
        "gpt-oss-120b",
        (LayerGroup(18, "full", 8, 64), LayerGroup(18, "sliding", 8, 64, window=128)),
        hidden_size=2880,
        intermediate_size=2880,
        num_q_heads=64,
        vocab_size=201088,
        num_experts=128,
        experts_per_token=4,
        moe_intermediate_size=2880,
        weights_bytes=round(65.97 * GIB),
    )
    server = Deployment(
        shape,
        version=case["version"],
        gpu=Gpu("H100-80GB", round(79.1 * GIB), (9, 0)),
        gpu_memory_utilization=case["util"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        max_num_seqs=case["max_num_seqs"],
        max_model_len=131072,
    )
    planned = plan(server)
    assert planned.verdict == case["expect"]
    assert planned.kv_cache_bytes / GIB == pytest.approx(case["kv_gib"], abs=0.75)  # the rest is estimated
    if planned.kv_cache_bytes < 0:
        assert "--max-num-seqs" in planned.reasons[1], "the sampler's buffers are what a flag can shrink most"
        assert "--gpu-memory-utilization" not in planned.reasons[1]
    if "needed_if_full_gib" in case:
        billed = plan(Deployment(**{**vars(server), "hybrid_kv_cache": False}))
        assert billed.needed_bytes / GIB == pytest.approx(case["needed_if_full_gib"], rel=0.003)
        assert planned.needed_bytes < billed.needed_bytes


def _host(case: dict[str, Any]) -> None:
    tier = HostTier("LMCache", case["size_gib"] * GIB, True, "LMCACHE_MAX_LOCAL_CPU_SIZE")
    offloaded = plan_offload(
        [tier],
        case["tp"],
        case["host_gib"] * GIB,
        base_bytes=case.get("base_gib", 0) * GIB,
        kv_bytes_per_token=case.get("bytes_per_token"),
    )
    assert offloaded.verdict == case["expect"]
    assert offloaded.error == (case["expect"] == "does_not_fit" or case.get("error", False))
    assert offloaded.total_bytes == case["total_gib"] * GIB
    assert offloaded.tokens == case.get("tokens", 0)


def _fraction(case: dict[str, Any]) -> None:
    shape = ModelShape(
        "GLM-5.2-FP8",
        (LayerGroup(78, "latent", latent_width=576),),
        hidden_size=6144,
        num_q_heads=64,
        vocab_size=154880,
    )
    planned = plan(
        Deployment(
            shape,
            engine="sglang",
            version=case["version"],
            gpu=Gpu("H200", round(140.4 * GIB), (9, 0)),
            num_gpus=8,
            tp=8,
            dp=8,
            enable_dp_attention=True,
            num_speculative_tokens=3,
            max_num_batched_tokens=32768,
            max_model_len=131072,
            weights_bytes=90 * GIB,
        )
    )
    assert planned.gpu_memory_utilization == pytest.approx(case["fraction"], abs=0.01)
    assert planned.verdict == case["expect"]


def _length(case: dict[str, Any]) -> None:
    planned = plan(
        Deployment(
            _uniform(*case["dims"]),
            version=case["version"],
            tp=case["tp"],
            kv_cache_bytes=round(case["kv_gib"] * GIB),
            max_model_len=case["max_model_len"],
        )
    )
    assert planned.verdict == case["expect"]
    if planned.fits:
        assert planned.kv_tokens == pytest.approx(case["tokens"], rel=case["tokens_pct"] / 100)
    else:
        assert planned.needed_bytes / GIB == case["needed_gib"]
        assert planned.largest_model_len == pytest.approx(case["largest"], rel=0.0003)
        assert "0.75 GiB" in planned.reasons[0]
        assert str(planned.largest_model_len) in planned.reasons[1]


def _two_logs(case: dict[str, Any]) -> None:
    first, second = (LogLine(*line) for line in case["lines"])
    cost = cost_from_logs(first, second)
    assert case["per_token"][0] <= cost.bytes_per_token <= case["per_token"][1]
    assert cost.fixed_bytes / GIB == pytest.approx(case["fixed_gib"], abs=0.1)


KINDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "pool": _pool,
    "request": _request,
    "shared": _shared,
    "reserve": _reserve,
    "sampler": _sampler,
    "host": _host,
    "fraction": _fraction,
    "length": _length,
    "two_logs": _two_logs,
}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{index}" for index, case in enumerate(CASES)])
def test_an_incident_gets_its_verdict(case: dict[str, Any]) -> None:
    KINDS[case["what"]](case)


def test_hidden_size_is_not_kv_heads_and_bits_are_not_bytes() -> None:
    """vllm#22291: 2 x layers x hidden x 8 gives 4.59 GiB for 3,072 tokens, 28 times what they take."""
    wrong = 2 * 28 * 3584 * 8 * 3072
    planned = plan(Deployment(_uniform(28, 4, 128), version="0.9.2", kv_cache_bytes=GIB, max_model_len=3072))
    assert wrong / GIB == pytest.approx(4.59, abs=0.01)
    assert planned.kv_bytes_per_token == 57344
    assert wrong / planned.needed_bytes == 28
