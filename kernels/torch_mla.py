"""Multi-head latent attention with torch operators: every head multiplies the gathered latents themselves.

Keys and values are never expanded: a latent serves as the key and, without its RoPE part, as the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.torch_decode import share_softmax, softmax_of_tiles
from kernels.torch_plan import Chunk, PlanKey, plan_for
from kernels.torch_tiles import TilePlan, tile_plan

# Elements of latents gathered at once, or one sequence's when those are more; and of scores, or one query's.
WORKSPACE_ELEMENTS = 1 << 19
SCORE_ELEMENTS = 1 << 20


def write_latent(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `kernels.mla.write_latent`."""
    num_slots = cache.shape[0] * cache.shape[1]
    if int(slot_mapping.max()) >= num_slots:
        raise ValueError(f"slot_mapping names a slot outside the pool of {num_slots} slots.")
    rows = torch.cat([latent, k_rope], -1).to(cache.dtype)
    if int(slot_mapping.min()) < 0:
        tokens = (slot_mapping >= 0).nonzero().view(-1)
        slot_mapping, rows = slot_mapping.index_select(0, tokens), rows.index_select(0, tokens)
    cache.view(num_slots, -1).index_copy_(0, slot_mapping, rows)


def mla_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """See `kernels.mla.mla_attention`. Arithmetic is float32, float64 for a float64 cache."""
    num_blocks, block_size, width = cache.shape
    num_tokens, _, rank = q_latent.shape
    key = PlanKey(num_blocks, 1, block_size, width, num_tokens, WORKSPACE_ELEMENTS)
    plan = plan_for(metadata, key)
    q = torch.cat([q_latent, q_rope], -1).to(torch.promote_types(cache.dtype, torch.float32)).mul_(scale)
    out = torch.zeros(q_latent.shape, dtype=q.dtype)
    if plan.decodes is not None:
        tiles = tile_plan(plan.decodes)
        out.index_add_(0, tiles.tile_queries, _decode(q, cache, tiles, rank))
    for chunk in plan.chunks:
        _attend_chunk(q, cache, chunk, out)
    return out.to(q_latent.dtype)


def _decode(q: Tensor, cache: Tensor, plan: TilePlan, rank: int) -> Tensor:
    """q: [num_tokens, num_heads, width], scaled. Returns [tiles, num_heads, rank], to be added up by sequence."""
    queries = q.index_select(0, plan.tile_queries)
    attended = q.new_empty((*queries.shape[:2], rank))
    log_sums = q.new_empty(queries.shape[:2])
    for piece in plan.pieces:
        tiles = slice(piece.first, piece.last)
        latents = _gather(cache, plan.block_rows[tiles].flatten(), q.dtype)
        if piece.hidden is not None:
            latents.index_fill_(0, piece.hidden, 0.0)  # NaN would survive a weight of zero
        latents = latents.view(piece.last - piece.first, -1, q.shape[2])
        scores = torch.bmm(queries[tiles], latents.transpose(1, 2))
        if plan.hidden is not None:
            scores.masked_fill_(plan.hidden[tiles, None], float("-inf"))
        log_sums[tiles] = softmax_of_tiles(scores)
        torch.bmm(scores, latents[:, :, :rank], out=attended[tiles])
    share_softmax(attended, log_sums, plan)
    return attended


def _attend_chunk(q: Tensor, cache: Tensor, chunk: Chunk, out: Tensor) -> None:
    """Fill the chunk's rows of out; scores are bounded by working on so many queries at a time."""
    num_heads, width = q.shape[1:]
    latents = _gather(cache, chunk.block_rows.flatten(), q.dtype)[: chunk.seq_len]
    step = max(SCORE_ELEMENTS // (num_heads * chunk.seq_len), 1)
    for start in range(chunk.start, chunk.end, step):
        end = min(start + step, chunk.end)
        visible = chunk.seq_len - chunk.end + end
        scores = (q[start:end].reshape(-1, width) @ latents[:visible].t()).view(end - start, num_heads, visible)
        hidden = torch.ones((end - start, visible), dtype=torch.bool).triu_(visible - (end - start) + 1)
        weights = torch.softmax(scores.masked_fill_(hidden[:, None], float("-inf")), -1)
        attended = weights.view(-1, visible) @ latents[:visible, : out.shape[2]]
        out[start:end] = attended.view(end - start, num_heads, -1)


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(blocks) * block_size, width]."""
    rows = cache.view(cache.shape[0], -1).index_select(0, blocks)
    return rows.to(dtype).view(-1, cache.shape[2])
