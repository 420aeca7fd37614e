"""Random targets to advise: flags in force, model, GPU, pool and traffic, each known or not, from one seed."""

from __future__ import annotations

import random
from typing import Any

from engine.memory.deployment import Gpu
from engine.memory.shape import LayerGroup, ModelShape
from runbooks.facts import TargetFacts, TrafficFacts, UnreadMetric
from runbooks.isolation_facts import KINDS, IsolationFacts
from runbooks.quality_candidates import QualityCandidate

GIB = 1024**3
GPUS = [
    Gpu("V100-16GB", int(15.77 * GIB), (7, 0)), Gpu("A100-40GB", int(39.39 * GIB), (8, 0)),
    Gpu("A100-80GB", int(79.15 * GIB), (8, 0)), Gpu("RTX3090-24GB", int(23.6 * GIB), (8, 6)),
    Gpu("L4-24GB", int(22.05 * GIB), (8, 9)), Gpu("H100-80GB", int(79.1 * GIB), (9, 0)),
    Gpu("H200-141GB", int(139.8 * GIB), (9, 0)), Gpu("B200-180GB", int(178.4 * GIB), (10, 0)),
    Gpu("RTX5090-32GB", int(31.4 * GIB), (12, 0)),
]  # fmt: skip


def _dense(name: str, layers: int, kv: int, q: int, dim: int, params: float, context: int, **more: Any) -> ModelShape:
    return ModelShape(
        name, (LayerGroup(layers, "full", kv, dim),), "LlamaForCausalLM", q * dim, 4 * q * dim, q, 128_256, context,
        "bfloat16", int(params * 1e9), weights_bytes=int(params * 2e9 * (0.5 if more else 1)), **more,
    )  # fmt: skip


SHAPES = [
    _dense("8B", 32, 8, 32, 128, 8.0, 131_072),
    _dense("70B-fp8", 80, 8, 64, 128, 70.6, 131_072, quantization="fp8"),
    _dense("7B-mha", 32, 32, 32, 128, 6.7, 4096),
    _dense("0.6B", 28, 8, 16, 128, 0.6, 40_960),
    ModelShape(
        "lite-mla", (LayerGroup(27, "latent", latent_width=576),), "DeepseekV2ForCausalLM", 2048, 10_944, 16, 102_400,
        163_840, "bfloat16", 15_700_000_000, weights_bytes=31_400_000_000,
    ),
    ModelShape(
        "gemma", (LayerGroup(40, "sliding", 8, 128, window=1024), LayerGroup(8, "full", 8, 128)), "Gemma3ForCausalLM",
        3840, 15_360, 16, 262_208, 131_072, "bfloat16", 12_200_000_000, weights_bytes=24_400_000_000,
    ),
]  # fmt: skip
BACKENDS = [None, None, None, "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASHMLA"]
TIERS = ("--kv-offloading-size", "--swap-space")
NONSENSE = ["--prefix-cache-ttl", "--automatic-prefix-layout", "--kv-eviction-policy"]


def random_facts(rng: random.Random, version: str, dtypes: list[str], blocks: list[int]) -> TargetFacts:
    """One target on that version. dtypes, blocks: what its --kv-cache-dtype and --block-size may be."""
    gpu, shape = rng.choice(GPUS), rng.choice(SHAPES)
    tp = rng.choice([1, 1, 2, 4])
    block = rng.choice(blocks)
    per_token = _bytes_per_token(shape, tp)
    device = gpu.memory_bytes
    pool = max(2, int(device * rng.uniform(0.02, 0.6) / (per_token * block)))
    step = rng.choice([512, 1024, 2048, 4096, 8192, 16_384])
    seqs = min(step, rng.choice([8, 32, 64, 128, 256, 512, 1024]))
    length = rng.choice([2048, 8192, 32_768, 131_072])
    flags = _flags(rng, version, dtypes, block, step, seqs, length)

    def known(value: Any, chance: float = 0.8) -> Any:
        return value if rng.random() < chance else None

    return TargetFacts(
        engine="vllm",
        version=version,
        flags=flags,
        device_memory_bytes=known(device),
        weights_bytes=known((shape.weights_bytes or 0) // tp),
        activation_peak_bytes=known(int(rng.uniform(0.2, 6) * GIB)),
        kv_bytes_per_block=known(per_token * block),
        kv_bytes_per_token=known(per_token),
        block_size=known(block),
        num_gpu_blocks=known(pool),
        kv_cache_size_tokens=known((pool - 1) * block),
        max_model_len=flags.get("--max-model-len") or known(length),
        max_num_seqs=flags.get("--max-num-seqs") or known(seqs, 0.5),
        max_num_batched_tokens=flags.get("--max-num-batched-tokens") or known(step, 0.5),
        oom_allocation_bytes=known(int(rng.uniform(0.1, 4) * GIB), 0.4),
        traffic=_traffic(rng, length),
        quality_candidates=_candidates(rng, dtypes, per_token) if rng.random() < 0.3 else (),
        isolation=known(IsolationFacts(rng.choice([None, *KINDS]), rng.randint(0, 9), 100), 0.6),
        other_processes_bytes=known(int(device * rng.uniform(0, 0.7)), 0.5),
        unread=known(_unread(rng), 0.5),
        gpu=known(gpu),
        num_gpus=known(rng.choice([tp, 2 * tp]), 0.7),
        tp=tp,
        shape=known(shape, 0.7),
        checkpoint_quantization=rng.choice([None, None, "fp8", "awq"]),
        attention_backend=rng.choice(BACKENDS),
        compute_capability=known(gpu.compute_capability),
        kv_available_bytes=known(int(rng.uniform(-2, 8) * GIB), 0.4),
        previous_version=known(rng.choice(["0.6.6", "0.10.2", "0.19.1", "0.20.0"]), 0.6),
        previous_kv_tokens=known(int((pool - 1) * block * rng.uniform(0.9, 1.4)), 0.6),
        host_memory_bytes=known(rng.choice([64, 256, 1024]) * GIB, 0.7),
        host_other_bytes=known(rng.choice([8, 32, 80]) * GIB, 0.5),
    )


def _bytes_per_token(shape: ModelShape, tp: int) -> int:
    return sum(
        g.count * (g.latent_width * 2 if g.attention == "latent" else 4 * max(1, g.num_kv_heads // tp) * g.head_dim)
        for g in shape.layers
    )


def _flags(
    rng: random.Random, version: str, dtypes: list[str], block: int, step: int, seqs: int, length: int
) -> dict[str, Any]:
    """Some flags set, some known to be unset, others unknown; now and then one that the version does not have."""
    maybe: dict[str, Any] = {
        "--gpu-memory-utilization": round(rng.uniform(0.3, 0.97), 2),
        "--kv-cache-dtype": rng.choice(dtypes),
        "--block-size": block,
        "--enable-prefix-caching": rng.random() < 0.5,
        "--prefix-caching-hash-algo": rng.choice(["builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash"]),
        "--max-num-seqs": seqs,
        "--max-num-batched-tokens": step,
        "--max-model-len": length,
        "--enable-chunked-prefill": rng.random() < 0.7,
        "--enforce-eager": rng.random() < 0.5,
        "--watermark": rng.choice([0.0, 0.01, 0.05, 0.2]),
        "--long-prefill-token-threshold": rng.choice([0, 256, 2048]),
        "--disable-log-stats": rng.random() < 0.5,
        "--calculate-kv-scales": rng.random() < 0.5,
        "--max-num-queued-reqs": rng.choice([16, 512]),
    }
    rare: dict[str, Any] = {
        "--kv-cache-memory-bytes": int(rng.uniform(0.5, 40) * GIB),
        "--num-gpu-blocks-override": rng.randint(8, 20_000),
        "--kv-offloading-size": rng.choice([4, 64, 500]),
        "--kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1"}',
        "--swap-space": rng.choice([4, 16]),
        "--preemption-mode": "swap",
        "--use-v2-block-manager": True,
        "--disable-log-requests": True,
        "--kv-cache-dtype-skip-layers": "0 1",
        rng.choice(NONSENSE): 60,
    }
    flags: dict[str, Any] = {}
    for name, value in maybe.items():
        drawn = rng.random()
        if drawn < 0.45:
            flags[name] = value
        elif drawn < 0.65:
            flags[name] = None
    flags.update({name: value for name, value in rare.items() if rng.random() < (0.3 if name in TIERS else 0.12)})
    return flags


def _traffic(rng: random.Random, length: int) -> TrafficFacts:
    if rng.random() < 0.15:
        return TrafficFacts()
    tokens = rng.randint(64, length)
    running = rng.choice([0, 1, 8, 40, 256])
    return TrafficFacts(
        peak_running=running,
        peak_waiting=rng.choice([None, 0, 3, 200]),
        prompt_tokens_mean=rng.choice([None, tokens * 0.7]),
        output_tokens_mean=tokens * 0.3,
        tokens_per_request_peak=rng.choice([None, tokens]),
        queue_s_mean=rng.choice([None, 0.01, 4.0]),
        prefill_s_mean=rng.choice([None, 0.3, 9.0]),
        itl_s_p99=rng.choice([None, 0.05, 0.8]),
        itl_bound_s=rng.choice([None, 0.1]),
        prompt_tokens_per_s=rng.choice([None, 900.0, 30_000.0]),
        kv_usage_peak=rng.choice([None, 0.2, 0.99]),
        preemptions=rng.choice([None, 0, 50]),
    )


def _candidates(rng: random.Random, dtypes: list[str], per_token: int) -> tuple[QualityCandidate, ...]:
    full = QualityCandidate("auto", {"--kv-cache-dtype": "auto"}, per_token, 200, 0.9, 0, 0, 0, full_precision=True)
    chosen = rng.sample(dtypes, min(3, len(dtypes)))
    return (full, *(
        QualityCandidate(d, {"--kv-cache-dtype": d}, per_token // 2, 200, 0.88, rng.choice([0.0, 0.2]), -0.02, 0.3)
        for d in chosen if d != "auto"
    ))  # fmt: skip


def _unread(rng: random.Random) -> tuple[UnreadMetric, ...]:
    hidden = UnreadMetric("kv_usage_ratio", "hidden", "needs --show-hidden-metrics-for-version", required=True)
    missing = UnreadMetric("queue_seconds", "missing", "", required=rng.random() < 0.5)
    return rng.choice([(), (hidden,), (missing,), (hidden, missing)])
