"""Triton attention on the paged cache: decodes, chunks after a cached prefix and whole prompts, in any KV format.

Program (sequence and split, KV head, query block). Row r of a query block is token r // GROUP and query head r %
GROUP of the KV head, so keys and values are read once for all heads of the group. The tiles that any row sees are
divided between NUM_SPLITS programs (flash decoding), each of which runs an online softmax; tiles outside the causal
triangle or between sinks and window are not visited, and nothing past the sequence's length is loaded. A chunk reads
its own keys from the cache as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.kv_cache import LayerKVCache
from kernels.merge_splits import Partials, choose_num_splits, num_processors
from kernels.tiles import add_values, cap_and_mask, code_tensor, half_of, kind_of, tile_scores

NO_WINDOW = 1 << 30  # more than any position


@triton.jit  # type: ignore[untyped-decorator]
def attend_tile(
    q_low: tl.tensor,
    q_high: tl.tensor,
    m: tl.tensor,
    denominator: tl.tensor,
    acc_low: tl.tensor,
    acc_high: tl.tensor,
    k_ptr: tl.tensor,
    k_params_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_params_ptr: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    positions: tl.tensor,
    query_positions: tl.tensor,
    ok: tl.tensor,
    dims: tl.tensor,
    scale: float,
    soft_cap: float,
    window: int,
    sink_tokens: int,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax over one tile of keys and values."""
    scores = tile_scores(q_low, q_high, k_ptr, k_params_ptr, pages, offsets, ok, dims, HALF, BLOCK_SIZE, K_KIND)
    scores = cap_and_mask(scores, positions, query_positions, ok, scale, soft_cap, window, sink_tokens, SOFT_CAP)
    m_new = tl.maximum(m, tl.max(scores, 1))
    shift = tl.where(m_new > float("-inf"), m_new, 0.0)  # a row may see no key yet: exp2(-inf - 0) = 0
    rescale = tl.exp2(m - shift)
    p = tl.exp2(scores - shift[:, None])
    denominator = denominator * rescale + tl.sum(p, 1)
    acc_low, acc_high = acc_low * rescale[:, None], acc_high * rescale[:, None]
    acc_low, acc_high = add_values(
        acc_low, acc_high, p, v_ptr, v_params_ptr, pages, offsets, ok, dims, HALF, BLOCK_SIZE, V_KIND, q_low.dtype
    )
    return m_new, denominator, acc_low, acc_high


@triton.jit  # type: ignore[untyped-decorator]
def paged_attention_kernel(
    query_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_params_ptr: tl.tensor,
    k_open_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_params_ptr: tl.tensor,
    v_open_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    open_rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale: float,
    soft_cap: float,
    v_scale: float,
    window: int,
    sink_tokens: int,
    first_token: int,
    query_token_stride: int,
    query_head_stride: int,
    block_table_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    HAS_OPEN: tl.constexpr = K_KIND == "int4_channel"
    STEP: tl.constexpr = BLOCK_SIZE if HAS_OPEN else TILE  # tokens a tile advances; its other lanes are masked
    seq, split = (tl.program_id(0) // NUM_SPLITS).to(tl.int64), tl.program_id(0) % NUM_SPLITS
    kv_head, first_query = tl.program_id(1), tl.program_id(2) * BLOCK_Q
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    query_start -= first_token
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    rows, dims, lanes = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_HALF), tl.arange(0, TILE)
    queries = first_query + rows // GROUP
    row_ok, dim_ok = (rows < BLOCK_Q * GROUP) & (queries < query_len), dims < HALF
    query_positions = seq_len - query_len + queries
    tokens, heads = (query_start + queries).to(tl.int64), kv_head * GROUP + rows % GROUP
    mask = row_ok[:, None] & dim_ok[None, :]
    q_ptrs = query_ptr + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    q_low, q_high = tl.load(q_ptrs, mask=mask, other=0.0), tl.load(q_ptrs + HALF, mask=mask, other=0.0)

    # Tiles to visit: those of the sinks, then from the first key in any row's window to the last row's own key.
    first_position = seq_len - query_len + first_query
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    begin = tl.maximum(first_position - window + 1, 0) // STEP * STEP
    sink_tiles = tl.cdiv(tl.minimum(sink_tokens, begin), STEP)
    num_tiles = sink_tiles + tl.maximum(tl.cdiv(end - begin, STEP), 0)
    per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    first_tile = split * per_split
    last_tile = tl.minimum(first_tile + per_split, num_tiles)
    last_closed = last_tile
    if HAS_OPEN:  # the block that the sequence's last tokens do not fill is the last tile
        open_visited = (end > seq_len // BLOCK_SIZE * BLOCK_SIZE) & (last_tile == num_tiles) & (first_tile < last_tile)
        last_closed = last_tile - open_visited.to(tl.int32)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc_low = tl.zeros([BLOCK_M, PADDED_HALF], tl.float32)
    acc_high = tl.zeros([BLOCK_M, PADDED_HALF], tl.float32)
    for tile in range(first_tile, last_closed):
        start = tl.where(tile < sink_tiles, tile * STEP, begin + (tile - sink_tiles) * STEP)
        positions = start + lanes
        ok = (positions < end) & (lanes < STEP)
        blocks = tl.load(block_table_ptr + seq * block_table_stride + positions // BLOCK_SIZE, mask=ok, other=0)
        pages = blocks.to(tl.int64) * NUM_KV_HEADS + kv_head
        m, denominator, acc_low, acc_high = attend_tile(
            q_low, q_high, m, denominator, acc_low, acc_high, k_ptr, k_params_ptr, v_ptr, v_params_ptr,
            pages, positions % BLOCK_SIZE, positions, query_positions, ok, dims, scale, soft_cap, window, sink_tokens,
            HALF, BLOCK_SIZE, K_KIND, V_KIND, SOFT_CAP,
        )  # fmt: skip
    if HAS_OPEN:  # noqa: SIM102  (the first is decided at compile time, where the second does not exist)
        if open_visited:
            positions = seq_len // BLOCK_SIZE * BLOCK_SIZE + lanes
            ok = (positions < end) & (lanes < STEP)
            row = tl.load(open_rows_ptr + seq).to(tl.int64) * NUM_KV_HEADS + kv_head
            pages = tl.zeros([TILE], tl.int64) + row
            m, denominator, acc_low, acc_high = attend_tile(
                q_low, q_high, m, denominator, acc_low, acc_high, k_open_ptr, k_open_ptr, v_open_ptr, v_open_ptr,
                pages, positions % BLOCK_SIZE, positions, query_positions, ok, dims, scale, soft_cap, window,
                sink_tokens, HALF, BLOCK_SIZE, "raw", "raw", SOFT_CAP,
            )  # fmt: skip

    total = tl.where(denominator > 0.0, denominator, 1.0)
    factor = (v_scale / total)[:, None]
    places = (tokens * (NUM_KV_HEADS * GROUP) + heads) * NUM_SPLITS + split
    out_ptrs = out_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, (acc_low * factor).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, (acc_high * factor).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + places, m + tl.log2(total), mask=row_ok)


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    out: Tensor,
    *,
    first_seq: int,
    num_seqs: int,
    max_query_len: int,
    native_e4m3: bool,
    first_token: int = 0,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of the queries of sequences [first_seq, first_seq + num_seqs), into out; returns their lse.

    query, out: rows [num_tokens, num_q_heads, head_dim] of the batch from first_token on, with these sequences' tokens;
    the last dimension and all of out contiguous. A rotated format's query comes rotated, and its output leaves so.
    num_splits: a power of two; chosen from the sizes when None.
    Returns the base-2 log-sum-exp of the scores [num_tokens, num_q_heads], -inf for rows that see no key.
    """
    num_q_heads, head_dim, half = query.shape[1], cache.head_dim, half_of(cache.head_dim)
    group = num_q_heads // cache.num_kv_heads
    k_kind, v_kind = kind_of(cache.key, native_e4m3), kind_of(cache.value, native_e4m3)
    launch = launch_options(query.dtype, cache, group, max_query_len)
    num_query_blocks = -(-max_query_len // (launch["BLOCK_M"] // group))
    if num_splits is None:
        num_programs = num_seqs * cache.num_kv_heads * num_query_blocks
        visible = min(metadata.max_seq_len, (options.sliding_window or NO_WINDOW) + options.sink_tokens)
        num_splits = choose_num_splits(num_programs, visible, num_processors(query.device))
    partials = Partials(out, num_splits)
    table = metadata.block_table[first_seq:]
    paged_attention_kernel[(num_seqs * num_splits, cache.num_kv_heads, num_query_blocks)](
        query,
        code_tensor(cache.key, k_kind),
        cache.key.params,
        cache.key.open_blocks,
        code_tensor(cache.value, v_kind),
        cache.value.params,
        cache.value.open_blocks,
        table,
        metadata.query_start_loc[first_seq:],
        metadata.seq_lens[first_seq:],
        None if metadata.open_rows is None else metadata.open_rows[first_seq:],
        partials.out,
        partials.lse,
        options.scale * cache.key.scale,
        options.soft_cap or 0.0,
        cache.value.scale,
        options.sliding_window or NO_WINDOW,
        options.sink_tokens,
        first_token,
        query.stride(0),
        query.stride(1),
        table.stride(0),
        NUM_KV_HEADS=cache.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        NUM_SPLITS=num_splits,
        K_KIND=k_kind,
        V_KIND=v_kind,
        SOFT_CAP=options.soft_cap is not None,
        PADDED_HALF=max(triton.next_power_of_2(half), 16),
        **launch,
    )
    return partials.merge()


def launch_options(dtype: torch.dtype, cache: LayerKVCache, group: int, max_query_len: int) -> dict[str, int]:
    """Rows, tile, warps and stages for queries of a dtype; no variant of the ahead-of-time report spills with them."""
    head_dim, wide = cache.head_dim, dtype.itemsize >= 4
    large, quantized, per_channel = head_dim > 128, cache.kv_format.quantized, cache.kv_format.keeps_open_blocks
    if max_query_len == 1:
        rows, tile, num_warps = 16, 64, 8 if per_channel and large else 4
        if wide or large:
            tile = 16 if quantized and large else 32
    elif wide:
        rows, tile, num_warps = 16 if large else 32, 32, 8
    elif quantized:
        is_fp8 = cache.kv_format.name.startswith("fp8")
        rows, tile, num_warps = 32 if large else 64, 32, 4 if is_fp8 and not large else 8
    elif large:
        rows, tile, num_warps = 64, 32, 8
    else:
        rows, tile, num_warps = 128 if head_dim == 128 else 64, 64, 8 if head_dim > 64 else 4
    num_stages = 3 if max_query_len == 1 and not wide and not (per_channel and large) else 2
    if per_channel:
        tile = max(triton.next_power_of_2(cache.block_size), 16)
    rows = max(triton.next_power_of_2(group), rows)
    return {"BLOCK_M": rows, "TILE": tile, "num_warps": num_warps, "num_stages": num_stages}
