"""The arithmetic of a plan, one step a line, with the numbers filled in."""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.deployment import Deployment
from engine.memory.pages import LayerKind, Layout, heads_per_rank, page_bytes
from engine.memory.pools import Stage, rank_of
from engine.memory.semantics import Semantics
from engine.memory.units import gib


def kv_lines(deployment: Deployment, stage: Stage) -> tuple[str, ...]:
    """What a token takes in each kind of layer of the stage that decides."""
    lines = []
    if deployment.pp > 1:
        lines.append(f"stage {stage.index} of {deployment.pp} decides, with {stage.num_layers} layers")
    lines += [line for kind in stage.kinds if (line := _kind_line(kind, deployment))]
    layout = stage.layout
    if layout.num_tables > 1:
        lines.append(
            f"{layout.num_tables} block tables share one pool; a block of any of them takes "
            f"{layout.bytes_per_block:,} bytes"
        )
    elif layout.bytes_per_block:
        lines.append(f"one block of {layout.block_size} tokens takes {layout.bytes_per_block:,} bytes on each rank")
    if layout.bytes_per_token is not None:
        fixed = layout.fixed_bytes(deployment.max_model_len or 0)
        beside = f", and {fixed:,} bytes a request whatever its length" if fixed else ""
        lines.append(f"KV cache: {layout.bytes_per_token:,} bytes a token on each rank{beside}")
    return tuple(lines)


def _kind_line(kind: LayerKind, deployment: Deployment) -> str:
    group, rank = kind.group, rank_of(deployment)
    block = deployment.block_size or 1
    if group.attention == "none":
        return ""
    if group.attention == "recurrent":
        return f"{kind.count} recurrent layers: {page_bytes(kind, 1, rank):,} bytes of state a sequence and layer"
    per_token = page_bytes(kind, block, rank) / block
    kept = f", {group.window:,} tokens of each request" if group.window else ""
    if group.latent_width:
        return (
            f"{kind.count} layers x latent of {group.latent_width} in {kind.kv_format} = {kind.count * per_token:,.0f} "
            f"bytes a token{kept}: on every rank whole, for K and V and all heads"
        )
    heads = heads_per_rank(group.num_kv_heads, rank.tp)
    of = f" ({group.num_kv_heads} over {rank.tp} ranks)" if rank.tp > 1 else ""
    return (
        f"{kind.count} layers x {heads} KV heads{of} x {per_token / heads:,.2f} bytes (K and V of {group.head_dim} in "
        f"{kind.kv_format}) = {kind.count * per_token:,.0f} bytes a token{kept}"
    )


def pool_lines(
    deployment: Deployment,
    semantics: Semantics,
    pools: Sequence[tuple[Stage, int, int]],
    blocks: int,
    tokens: int,
    concurrency: float,
) -> tuple[str, ...]:
    """From the KV memory to blocks, tokens and requests."""
    lines = []
    for stage, kv_bytes, stage_blocks in pools:
        name = f"stage {stage.index}: " if len(pools) > 1 else ""
        per_block = stage.layout.bytes_per_block
        lines.append(f"{name}{gib(kv_bytes)} / {per_block:,} bytes = {stage_blocks:,} blocks")
    layout = min(pools, key=lambda pool: pool[2])[0].layout
    length = deployment.max_model_len or 0
    lines.append(_tokens_line(semantics, layout, blocks, tokens, length))
    if semantics.null_block:
        lines.append("one block is the null block, which no request gets")
    lines.append(
        f"a request of {length:,} tokens takes {layout.blocks_for(length):,} blocks: {concurrency:,.2f} of them at once"
    )
    return tuple(lines)


def _tokens_line(semantics: Semantics, layout: Layout, blocks: int, tokens: int, length: int) -> str:
    exact = layout.num_tables == 1 and tokens == blocks * layout.block_size
    if semantics.engine == "vllm" and semantics.tokens_from_concurrency and not exact:
        per_request = layout.blocks_for(length)
        return f"{blocks:,} blocks / {per_request:,} a request x {length:,} = {tokens:,} tokens, as the log says"
    if semantics.rounds_tokens_up:
        return f"{blocks:,} blocks x {layout.block_size} = {tokens:,} tokens (tokens are rounded up to whole blocks)"
    tables = f" / {layout.num_tables} tables" if layout.num_tables > 1 else ""
    return f"{blocks:,} blocks{tables} x {layout.block_size} = {tokens:,} tokens"
