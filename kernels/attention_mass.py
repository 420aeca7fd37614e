"""Triton kernel for H2O's statistics: how much attention each key got, exactly, without atomics.

The main pass leaves every row's log-sum-exp, from which a second pass over the keys recovers the softmax weights.
Program (tile of keys, KV head, sequence) owns its keys' entries and walks the sequence's queries, so the sums come out
the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.kv_cache import LayerKVCache
from kernels.paged_attention import NO_WINDOW, launch_options
from kernels.tiles import cap_and_mask, code_tensor, half_of, kind_of, tile_scores


@triton.jit  # type: ignore[untyped-decorator]
def attention_mass_kernel(
    query_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_params_ptr: tl.tensor,
    k_open_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    open_rows_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    scale: float,
    soft_cap: float,
    window: int,
    sink_tokens: int,
    query_token_stride: int,
    query_head_stride: int,
    block_table_stride: int,
    mass_seq_stride: int,
    mass_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    STEP: tl.constexpr = BLOCK_SIZE if K_KIND == "int4_channel" else TILE
    start, kv_head, seq = tl.program_id(0) * STEP, tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    if start >= seq_len:
        return
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start

    rows, dims, lanes = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_HALF), tl.arange(0, TILE)
    positions = start + lanes
    ok = (positions < seq_len) & (lanes < STEP)
    blocks = tl.load(block_table_ptr + seq * block_table_stride + positions // BLOCK_SIZE, mask=ok, other=0)
    pages, offsets = blocks.to(tl.int64) * NUM_KV_HEADS + kv_head, positions % BLOCK_SIZE
    if K_KIND == "int4_channel":
        is_open = start >= seq_len // BLOCK_SIZE * BLOCK_SIZE
        open_pages = tl.zeros_like(pages) + tl.load(open_rows_ptr + seq).to(tl.int64) * NUM_KV_HEADS + kv_head

    mass = tl.zeros([TILE], tl.float32)
    for first_query in range(0, query_len, BLOCK_Q):
        queries = first_query + rows // GROUP
        row_ok = (rows < BLOCK_Q * GROUP) & (queries < query_len)
        tokens, heads = (query_start + queries).to(tl.int64), kv_head * GROUP + rows % GROUP
        mask = row_ok[:, None] & (dims < HALF)[None, :]
        q_ptrs = query_ptr + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
        q_low, q_high = tl.load(q_ptrs, mask=mask, other=0.0), tl.load(q_ptrs + HALF, mask=mask, other=0.0)
        if K_KIND != "int4_channel":
            scores = tile_scores(q_low, q_high, k_ptr, k_params_ptr, pages, offsets, ok, dims, HALF, BLOCK_SIZE, K_KIND)
        elif is_open:
            scores = tile_scores(
                q_low, q_high, k_open_ptr, k_open_ptr, open_pages, offsets, ok, dims, HALF, BLOCK_SIZE, "raw"
            )
        else:
            scores = tile_scores(q_low, q_high, k_ptr, k_params_ptr, pages, offsets, ok, dims, HALF, BLOCK_SIZE, K_KIND)
        query_positions = seq_len - query_len + queries
        scores = cap_and_mask(scores, positions, query_positions, ok, scale, soft_cap, window, sink_tokens, SOFT_CAP)
        lse = tl.load(lse_ptr + tokens * (NUM_KV_HEADS * GROUP) + heads, mask=row_ok, other=float("-inf"))
        weights = tl.where((lse > float("-inf"))[:, None], tl.exp2(scores - lse[:, None]), 0.0)
        mass += tl.sum(weights, 0)
    mass_ptrs = mass_ptr + seq * mass_seq_stride + kv_head * mass_head_stride + positions
    tl.store(mass_ptrs, tl.load(mass_ptrs, mask=ok, other=0.0) + mass, mask=ok)


def add_attention_mass(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    lse: Tensor,
    mass: Tensor,
    *,
    native_e4m3: bool,
) -> None:
    """Add the softmax weights of all queries to mass float32 [num_seqs, num_kv_heads, >= max_seq_len].

    query as for `kernels.paged_attention.paged_attention`; lse: what it returned, for all rows.
    """
    k_kind, group = kind_of(cache.key, native_e4m3), query.shape[1] // cache.num_kv_heads
    launch = launch_options(query.dtype, cache, group, metadata.max_query_len)
    step = cache.block_size if k_kind == "int4_channel" else launch["TILE"]
    attention_mass_kernel[(-(-metadata.max_seq_len // step), cache.num_kv_heads, metadata.num_seqs)](
        query,
        code_tensor(cache.key, k_kind),
        cache.key.params,
        cache.key.open_blocks,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.open_rows,
        lse,
        mass,
        options.scale * cache.key.scale,
        options.soft_cap or 0.0,
        options.sliding_window or NO_WINDOW,
        options.sink_tokens,
        query.stride(0),
        query.stride(1),
        metadata.block_table.stride(0),
        mass.stride(0),
        mass.stride(1),
        NUM_KV_HEADS=cache.num_kv_heads,
        GROUP=group,
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        K_KIND=k_kind,
        SOFT_CAP=options.soft_cap is not None,
        PADDED_HALF=max(triton.next_power_of_2(half_of(cache.head_dim)), 16),
        **launch,
    )
