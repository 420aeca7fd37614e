"""Triton flash decoding on the paged cache: one query token a sequence, the context split between programs.

Stage 1, program (sequence, KV head, split): the query heads of one KV head (padded to 16 rows for the tensor
cores) attend to the split's tokens with an online softmax and leave a normalized partial output and its base-2
log-sum-exp. Stage 2, program (sequence, query head): merge the splits by weight. An empty split leaves lse = -inf and
its output is never read. Keys and values past the sequence's length are never loaded.

The number of splits follows the batch and the longest sequence, so results are not bitwise batch-invariant.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)
MIN_TOKENS_PER_SPLIT = 256
MAX_SPLITS = 32


@triton.jit  # type: ignore[untyped-decorator]
def paged_decode_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    scale_log2: float,
    query_token_stride: int,
    query_head_stride: int,
    block_table_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    split_len = tl.cdiv(tl.cdiv(seq_len, TILE), NUM_SPLITS) * TILE
    first = split * split_len
    last = tl.minimum(first + split_len, seq_len)

    rows = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    row_ok, dim_ok = rows < GROUP, dims < HEAD_DIM
    heads = kv_head * GROUP + rows
    partial = (seq * NUM_KV_HEADS * GROUP + heads) * NUM_SPLITS + split
    if first >= last:
        tl.store(partial_lse_ptr + partial, tl.full([PADDED_GROUP], float("-inf"), tl.float32), mask=row_ok)
        return

    q_ptrs = query_ptr + seq * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    m = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    denominator = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(first, last, TILE):
        positions = start + tl.arange(0, TILE)
        ok = positions < last
        block = tl.load(block_table_ptr + seq * block_table_stride + positions // BLOCK_SIZE, mask=ok, other=0)
        slots = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
        k_mask = dim_ok[:, None] & ok[None, :]
        k = tl.load(k_cache_ptr + slots[None, :] * HEAD_DIM + dims[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="tf32x3") * scale_log2
        scores = tl.where(ok[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        rescale = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        v_mask = ok[:, None] & dim_ok[None, :]
        v = tl.load(v_cache_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=v_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        m = m_new
    out_mask = row_ok[:, None] & dim_ok[None, :]
    tl.store(partial_out_ptr + partial[:, None] * HEAD_DIM + dims[None, :], acc / denominator[:, None], mask=out_mask)
    tl.store(partial_lse_ptr + partial, m + tl.log2(denominator), mask=row_ok)


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits_kernel(
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * NUM_Q_HEADS + tl.program_id(1)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    lse = tl.load(partial_lse_ptr + splits)
    highest = tl.max(lse, 0)
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(highest > float("-inf"), highest, 0.0)), 0.0)
    mask = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_out_ptr + splits[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    max_seq_len: int,
    scale: float,
    num_splits: int | None = None,
) -> None:
    """Attention of one token a sequence, into out. Zero where seq_len is 0.

    query, out: [num_seqs, num_q_heads, head_dim], out contiguous; block_table int32 [num_seqs, max_blocks]; seq_lens
    int32 [num_seqs], at most max_seq_len. num_splits: a power of two; chosen from the sizes when None.
    """
    num_seqs, num_q_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs * num_kv_heads, max_seq_len, _num_processors(query.device))
    partial_out = query.new_empty((num_seqs, num_q_heads, num_splits, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty((num_seqs, num_q_heads, num_splits), dtype=torch.float32)
    group, padded_dim = num_q_heads // num_kv_heads, max(triton.next_power_of_2(head_dim), 16)
    paged_decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        partial_out,
        partial_lse,
        scale * LOG2E,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        PADDED_GROUP=max(triton.next_power_of_2(group), 16),
        PADDED_DIM=padded_dim,
        **launch_options(k_cache.dtype),
    )
    merge_splits_kernel[(num_seqs, num_q_heads)](
        partial_out,
        partial_lse,
        out,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        NUM_SPLITS=num_splits,
        PADDED_DIM=padded_dim,
        num_warps=4,
    )


def launch_options(cache_dtype: torch.dtype) -> dict[str, int]:
    """Tile, warps and stages by element size; the ahead-of-time test compiles with the same."""
    wide = cache_dtype.itemsize >= 4
    return {"TILE": 32 if wide else 64, "num_warps": 4, "num_stages": 2}


def choose_num_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Smallest power of two that gives every processor two programs, without splits under MIN_TOKENS_PER_SPLIT."""
    wanted = -(-2 * num_processors // max(num_programs, 1))
    most = min(max(max_seq_len // MIN_TOKENS_PER_SPLIT, 1), MAX_SPLITS)
    splits = 1
    while splits < wanted and splits * 2 <= most:
        splits *= 2
    return splits


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
