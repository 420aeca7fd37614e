"""Triton attention of prefill chunks on the paged cache: variable lengths, causal, with a cached prefix.

Program (query block, KV head, sequence). Row r of a block is query token r // GROUP and query head r % GROUP of the KV
head, so keys and values are read once for all heads of the group. Query i of a sequence stands at position
seq_len - query_len + i; tiles past the block's last position are not visited, keys past a query's own position
are masked, and nothing past the sequence's length is loaded. The chunk's own keys come from the cache as well.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


@triton.jit  # type: ignore[untyped-decorator]
def paged_prefill_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_log2: float,
    query_token_stride: int,
    query_head_stride: int,
    block_table_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_block, kv_head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_query = query_block * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    queries = first_query + rows // GROUP
    row_ok, dim_ok = (rows < BLOCK_Q * GROUP) & (queries < query_len), dims < HEAD_DIM
    tokens, heads = (query_start + queries).to(tl.int64), kv_head * GROUP + rows % GROUP
    mask = row_ok[:, None] & dim_ok[None, :]
    q_ptrs = query_ptr + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    end = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    for start in range(0, end, TILE):
        positions = start + tl.arange(0, TILE)
        ok = positions < end
        block = tl.load(block_table_ptr + seq * block_table_stride + positions // BLOCK_SIZE, mask=ok, other=0)
        slots = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
        k_mask = dim_ok[:, None] & ok[None, :]
        k = tl.load(k_cache_ptr + slots[None, :] * HEAD_DIM + dims[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="tf32x3") * scale_log2
        visible = ok[None, :] & (positions[None, :] <= context_len + queries[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_new > float("-inf"), m_new, 0.0)  # a row may see no key yet: exp2(-inf - 0) = 0
        rescale = tl.exp2(m - shift)
        p = tl.exp2(scores - shift[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        v_mask = ok[:, None] & dim_ok[None, :]
        v = tl.load(v_cache_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=v_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        m = m_new
    result = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    out_ptrs = out_ptr + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    max_query_len: int,
    scale: float,
) -> None:
    """Causal attention of chunks of any length, into out. Queries that see no key get zero.

    query, out: [num_tokens, num_q_heads, head_dim], out contiguous; the other tensors as in AttentionMetadata,
    restricted to the chunks' sequences.
    """
    num_q_heads, head_dim = query.shape[1:]
    _, num_kv_heads, block_size, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    options = launch_options(k_cache.dtype, group)
    num_query_blocks = -(-max_query_len // (options["BLOCK_M"] // group))
    paged_prefill_kernel[(num_query_blocks, num_kv_heads, seq_lens.shape[0])](
        query,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        out,
        scale * LOG2E,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PADDED_DIM=max(triton.next_power_of_2(head_dim), 16),
        **options,
    )


def launch_options(cache_dtype: torch.dtype, group: int) -> dict[str, int]:
    """Tiles, warps and stages by element size; the ahead-of-time test compiles with the same."""
    block_m = max(triton.next_power_of_2(group), 32 if cache_dtype.itemsize >= 4 else 64)
    return {"BLOCK_M": block_m, "TILE": 32, "num_warps": 4, "num_stages": 2}
