"""Divides the memory of a deployment's GPUs and says whether it fits. Pure arithmetic: nothing is measured.

Every stage is divided for itself; the one with the fewest blocks decides, as engines take the minimum over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.errors import ConfigError
from engine.memory.articles import article_estimate
from engine.memory.budget import Division, divide, known_parts
from engine.memory.capacity import ArticleEstimate, CapacityPlan, Part, Verdict
from engine.memory.deployment import Deployment
from engine.memory.explain import kv_lines, pool_lines
from engine.memory.offload import OffloadPlan, host_tier, plan_offload
from engine.memory.pages import Layout
from engine.memory.pools import Stage, open_blocks_bytes, stages_of
from engine.memory.semantics import Semantics, resolve, semantics_of
from engine.memory.verdict import Need, judge

__all__ = ["ArticleEstimate", "CapacityPlan", "Part", "Verdict", "largest_length", "plan"]


@dataclass(frozen=True)
class _Pool:
    """What one stage offers."""

    stage: Stage
    kv_bytes: int
    blocks: int
    division: Division | None  # None where the KV memory was stated


def plan(deployment: Deployment) -> CapacityPlan:
    """The plan of one server. Raises `engine.errors.ConfigError`, one sentence, on impossible input."""
    _validate(deployment)
    semantics = semantics_of(deployment.engine, deployment.version)
    filled = resolve(deployment)
    pools = [_pool(stage, filled, semantics) for stage in stages_of(filled, semantics)]
    pool = min(pools, key=lambda candidate: candidate.blocks)
    return _conclude(filled, semantics, pool, pools)


def _validate(deployment: Deployment) -> None:
    for flag, value in (
        ("--tensor-parallel-size", deployment.tp),
        ("--pipeline-parallel-size", deployment.pp),
        ("--data-parallel-size", deployment.dp),
        ("--decode-context-parallel-size", deployment.dcp),
    ):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    for flag, optional in (
        ("--max-model-len", deployment.max_model_len),
        ("--max-num-seqs", deployment.max_num_seqs),
        ("--max-num-batched-tokens", deployment.max_num_batched_tokens),
        ("--block-size", deployment.block_size),
        ("--num-gpu-blocks-override", deployment.num_gpu_blocks_override),
    ):
        if optional is not None and optional < 1:
            raise ConfigError(f"{flag} must be at least 1, got {optional}")
    fraction = deployment.gpu_memory_utilization
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, got {fraction:g}")
    if deployment.gpu is not None and deployment.gpu.memory_bytes <= 0:
        raise ConfigError("the GPU's memory must be more than zero: check --gpu-memory")
    if deployment.kv_cache_bytes is not None and deployment.kv_cache_bytes <= 0:
        raise ConfigError("the KV memory must be more than zero: check --kv-gib")
    for name, size in (("--weights-gib", deployment.weights_bytes), ("--activation-gib", deployment.activation_bytes)):
        if size is not None and size < 0:
            raise ConfigError(f"{name} must not be negative")
    heads = deployment.shape.num_q_heads
    if heads is not None and heads % deployment.tp:
        fitting = ", ".join(str(tp) for tp in range(1, heads + 1) if heads % tp == 0 and tp <= 64)
        raise ConfigError(
            f"--tensor-parallel-size {deployment.tp} does not divide {heads} attention heads: use {fitting}"
        )
    if not deployment.shape.layers or deployment.shape.num_layers < 1:
        raise ConfigError("the model has no layers: state --layers, --kv-heads and --head-dim")
    if deployment.num_gpus > 1 and deployment.num_gpus < deployment.tp * deployment.pp:
        raise ConfigError(
            f"tensor parallel {deployment.tp} x pipeline parallel {deployment.pp} needs "
            f"{deployment.tp * deployment.pp} GPUs, not {deployment.num_gpus}"
        )


def _pool(stage: Stage, deployment: Deployment, semantics: Semantics) -> _Pool:
    division = None
    layout = stage.layout
    if deployment.num_gpu_blocks_override is not None:
        kv = deployment.num_gpu_blocks_override * layout.bytes_per_block
    elif deployment.stage_kv_cache_bytes is not None:
        if len(deployment.stage_kv_cache_bytes) != deployment.pp:
            raise ConfigError("state the KV memory of every pipeline stage, or one figure for all")
        kv = deployment.stage_kv_cache_bytes[stage.index]
    elif deployment.kv_cache_bytes is not None:
        kv = deployment.kv_cache_bytes
    else:
        open_blocks = open_blocks_bytes(stage, deployment)
        division = divide(deployment, semantics, stage.index, stage.num_layers, open_blocks)
        kv = division.kv_bytes
    return _Pool(stage, kv, _blocks(kv, stage, deployment, semantics), division)


def _blocks(kv_bytes: int, stage: Stage, deployment: Deployment, semantics: Semantics) -> int:
    """Whole blocks of a pool, the null block included. TensorRT-LLM counts tokens and rounds them up to a block."""
    layout, cap = stage.layout, deployment.max_kv_tokens
    if deployment.num_gpu_blocks_override is not None:
        return deployment.num_gpu_blocks_override
    if not layout.bytes_per_block:
        return 0
    usable = max(0, int(kv_bytes * stage.pool_share))
    if stage.pool_share == 1 and layout.state_bytes:
        usable = max(0, usable - layout.state_bytes * (deployment.max_num_seqs or 1))
    if semantics.rounds_tokens_up:
        tokens = usable * layout.block_size // layout.bytes_per_block
        if cap is not None:
            tokens = min(tokens, cap)
        return -(-tokens // layout.block_size)
    blocks = usable // layout.bytes_per_block
    return blocks if cap is None else min(blocks, cap // layout.block_size)


def _pool_for_one(stage: Stage, deployment: Deployment, blocks: int) -> int:
    """KV memory with which `blocks` blocks exist beside the recurrent states, where those lie outside the pool."""
    needed = blocks * stage.layout.bytes_per_block
    if stage.pool_share < 1:
        return ceil(needed / stage.pool_share)
    return needed + stage.layout.state_bytes * (deployment.max_num_seqs or 1)


def _offload(deployment: Deployment, layout: Layout) -> OffloadPlan | None:
    tier = host_tier(deployment)
    if tier is None:
        return None
    ranks, per_token = deployment.tp * deployment.pp, layout.bytes_per_token
    return plan_offload([tier], ranks, deployment.host_memory_bytes, kv_bytes_per_token=per_token)


def largest_length(layout: Layout, usable_blocks: int, cap: int | None) -> int:
    """The longest request that fits: whole blocks, as the engine's message says; at most `cap`."""
    if usable_blocks < layout.blocks_for(1):
        return 0
    high = cap or usable_blocks * max(table.block_size for table in layout.tables)
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.blocks_for(middle) <= usable_blocks else (low, middle - 1)
    return low


def _printed_tokens(blocks: int, layout: Layout, length: int, semantics: Semantics) -> int:
    if semantics.engine == "kvoncall":
        return max(0, blocks - 1) * layout.block_size
    if semantics.engine == "vllm" and semantics.tokens_from_concurrency and layout.blocks_for(length):
        return int(blocks / layout.blocks_for(length) * length)  # in floating point, as the engine does
    return blocks // max(1, layout.num_tables) * layout.block_size


def _concurrency(blocks: int, tokens: int, layout: Layout, length: int, semantics: Semantics) -> float:
    """Requests of full length at once, as the engine's log counts them."""
    per_request = layout.blocks_for(length)
    if semantics.engine == "kvoncall":
        return max(0, blocks - 1) / per_request if per_request else 0.0
    if semantics.engine == "vllm" and semantics.version >= (0, 9):
        return blocks / per_request if per_request else 0.0
    return tokens / length


def _need(deployment: Deployment, semantics: Semantics, pool: _Pool) -> Need:
    """One request of full length against the blocks that requests can get."""
    layout, length = pool.stage.layout, deployment.max_model_len or 0
    per_request, null = layout.blocks_for(length), 1 if semantics.null_block else 0
    usable = max(0, pool.blocks - null)
    stated = deployment.shape.max_position_embeddings
    cap = max(stated or 0, length) if stated or layout.bytes_per_token is None else None
    return Need(
        needed_bytes=per_request * layout.bytes_per_block + layout.state_bytes,
        pool_bytes=_pool_for_one(pool.stage, deployment, per_request + null),
        fits=pool.kv_bytes > 0 and usable >= per_request,
        largest=largest_length(layout, usable, cap),
    )


def _conclude(deployment: Deployment, semantics: Semantics, pool: _Pool, pools: list[_Pool]) -> CapacityPlan:
    layout, length = pool.stage.layout, deployment.max_model_len or 0
    tokens = _printed_tokens(pool.blocks, layout, length, semantics)
    concurrency = _concurrency(pool.blocks, tokens, layout, length, semantics)
    need = _need(deployment, semantics, pool)
    parts = (
        pool.division.parts
        if pool.division
        else known_parts(deployment, semantics, pool.stage.index, pool.stage.num_layers, pool.kv_bytes)
    )
    offload = _offload(deployment, layout)
    outcome = judge(deployment, semantics, pool.kv_bytes, parts, need, tokens, concurrency, offload)
    lines = (
        *kv_lines(deployment, pool.stage),
        *(pool.division.lines if pool.division else (f"KV cache: {pool.kv_bytes / (1 << 30):.2f} GiB, stated",)),
        *pool_lines(
            deployment, semantics, [(p.stage, p.kv_bytes, p.blocks) for p in pools], pool.blocks, tokens, concurrency
        ),
    )
    return CapacityPlan(
        deployment=deployment,
        parts=parts,
        gpu_memory_utilization=deployment.gpu_memory_utilization,
        budget_bytes=pool.division.budget_bytes if pool.division else None,
        kv_cache_bytes=pool.kv_bytes,
        kv_bytes_per_token=layout.bytes_per_token,
        kv_fixed_bytes_per_request=layout.fixed_bytes(length),
        kv_bytes_per_block=layout.bytes_per_block,
        block_size=layout.block_size,
        kv_blocks=pool.blocks,
        kv_tokens=tokens,
        max_model_len=length,
        max_num_seqs=deployment.max_num_seqs or 0,
        max_num_batched_tokens=deployment.max_num_batched_tokens or 0,
        max_concurrency=concurrency,
        largest_model_len=need.largest,
        needed_bytes=need.needed_bytes,
        needed_utilization=outcome.needed_utilization,
        verdict=outcome.verdict,
        fits=outcome.verdict != "does_not_fit",
        margin_bytes=pool.kv_bytes - need.pool_bytes,
        reasons=outcome.reasons,
        warnings=(*semantics.notes, *deployment.shape.assumptions, *pool.stage.notes, *outcome.warnings),
        lines=lines,
        articles=article_estimate(deployment, layout, pool.kv_bytes, parts, tokens, concurrency),
        offload=offload,
    )
