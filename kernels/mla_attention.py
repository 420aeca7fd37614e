"""Triton attention over MLA's latent cache, with absorbed projections: decodes, chunks and whole prompts.

All heads share one "KV head" whose key is the latent and the RoPE key and whose value is the latent again, so a tile
of latents is loaded once and used for both products. Program (sequence and split, row block): row r of a sequence is
query token r // NUM_HEADS and head r % NUM_HEADS. float32 products are IEEE's: the tensor cores' three passes of TF32
would not fit the registers at a width of 512.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.merge_splits import Partials, choose_num_splits, num_processors

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def mla_attention_kernel(
    q_latent_ptr: tl.tensor,
    q_rope_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_log2: float,
    first_token: int,
    latent_token_stride: int,
    latent_head_stride: int,
    rope_token_stride: int,
    rope_head_stride: int,
    block_table_stride: int,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    seq, split = (tl.program_id(0) // NUM_SPLITS).to(tl.int64), tl.program_id(0) % NUM_SPLITS
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    query_start -= first_token
    first_row = tl.program_id(1) * BLOCK_M
    if first_row >= query_len * NUM_HEADS:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    rows = first_row + tl.arange(0, BLOCK_M)
    ranks, ropes = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    row_ok, rank_ok, rope_ok = rows < query_len * NUM_HEADS, ranks < RANK, ropes < ROPE_DIM
    tokens, heads = (query_start + rows // NUM_HEADS).to(tl.int64), rows % NUM_HEADS
    mask = row_ok[:, None] & rank_ok[None, :]
    latent_rows = tokens * latent_token_stride + heads * latent_head_stride
    q_latent = tl.load(q_latent_ptr + latent_rows[:, None] + ranks[None, :], mask=mask, other=0.0)
    rope_rows = tokens * rope_token_stride + heads * rope_head_stride
    rope_mask = row_ok[:, None] & rope_ok[None, :]
    q_rope = tl.load(q_rope_ptr + rope_rows[:, None] + ropes[None, :], mask=rope_mask, other=0.0)

    query_positions = seq_len - query_len + rows // NUM_HEADS
    end = tl.minimum(seq_len - query_len + (first_row + BLOCK_M - 1) // NUM_HEADS + 1, seq_len)
    per_split = tl.cdiv(tl.cdiv(end, TILE), NUM_SPLITS) * TILE
    first = split * per_split
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    for start in range(first, tl.minimum(first + per_split, end), TILE):
        positions = start + tl.arange(0, TILE)
        ok = positions < end
        blocks = tl.load(block_table_ptr + seq * block_table_stride + positions // BLOCK_SIZE, mask=ok, other=0)
        slots = (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (RANK + ROPE_DIM)
        latent_mask = ok[:, None] & rank_ok[None, :]
        latent = tl.load(cache_ptr + slots[:, None] + ranks[None, :], mask=latent_mask, other=0.0).to(q_latent.dtype)
        k_mask = rope_ok[:, None] & ok[None, :]
        k_rope = tl.load(cache_ptr + slots[None, :] + RANK + ropes[:, None], mask=k_mask, other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_rope, k_rope, input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee") * scale_log2
        visible = ok[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)
        rescale = tl.exp2(m - shift)
        p = tl.exp2(scores - shift[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
        m = m_new
    total = tl.where(denominator > 0.0, denominator, 1.0)
    places = (tokens * NUM_HEADS + heads) * NUM_SPLITS + split
    out_ptrs = out_ptr + places[:, None] * RANK + ranks[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + places, m + tl.log2(total), mask=row_ok)


def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: Tensor,
    *,
    first_seq: int,
    num_seqs: int,
    max_query_len: int,
    first_token: int = 0,
    num_splits: int | None = None,
) -> None:
    """Attention of the queries of sequences [first_seq, first_seq + num_seqs), into out.

    q_latent, out: [num_tokens, num_heads, rank]; q_rope: [num_tokens, num_heads, rope_dim]; rows of the batch from
    first_token on, with these sequences' tokens; last dimensions and all of out contiguous.
    num_splits: a power of two; chosen from the sizes when None.
    """
    num_heads, rank = q_latent.shape[1:]
    rope_dim, block_size = cache.shape[2] - rank, cache.shape[1]
    launch = launch_options(q_latent.dtype, num_heads * max_query_len)
    num_row_blocks = -(-num_heads * max_query_len // launch["BLOCK_M"])
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs * num_row_blocks, metadata.max_seq_len, num_processors(q_latent.device))
    partials = Partials(out, num_splits)
    table = metadata.block_table[first_seq:]
    mla_attention_kernel[(num_seqs * num_splits, num_row_blocks)](
        q_latent,
        q_rope,
        cache,
        table,
        metadata.query_start_loc[first_seq:],
        metadata.seq_lens[first_seq:],
        partials.out,
        partials.lse,
        scale * LOG2E.value,
        first_token,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        table.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE_DIM=rope_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        PADDED_RANK=max(triton.next_power_of_2(rank), 16),
        PADDED_ROPE=max(triton.next_power_of_2(rope_dim), 16),
        **launch,
    )
    partials.merge()


def launch_options(dtype: torch.dtype, num_rows: int) -> dict[str, int]:
    """Rows, tile, warps and stages; what the ahead-of-time report compiles with, so that none of them spills."""
    wide = dtype.itemsize >= 4
    return {
        "BLOCK_M": 16 if wide or num_rows <= 16 else 32,
        "TILE": 16 if wide else 32,
        "num_warps": 8,
        "num_stages": 1 if wide else 2,
    }
