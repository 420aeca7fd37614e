"""Triton kernel that writes formats with open blocks (int4_kivi): quantize the blocks that fill up, keep the last open.

Program (sequence, touched block, KV head). The tokens of a block come from this step's keys and values and, below the
context length, from the sequence's open row. Only the first touched block can have such tokens, and only the last can
stay open; program 0 sees to both, so that it has read the open row before it overwrites it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.cache_write import MIN_SCALE, quantize_tokens, rounded, store_codes
from kernels.kv_cache import LayerKVCache
from kernels.tiles import half_of


@triton.jit  # type: ignore[untyped-decorator]
def quantize_channels(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Codes [tokens, channels], float32, and each channel's scale and minimum; every token must be real."""
    poison = tl.sum(x * 0.0, 0)
    smallest = tl.min(x, 0).to(tl.float16).to(tl.float32)
    step = tl.maximum(tl.div_rn(tl.max(x, 0) - smallest, 15.0), MIN_SCALE).to(tl.float16).to(tl.float32) + poison
    codes = tl.clamp(rounded(tl.div_rn(x - smallest[None, :], step[None, :])), 0.0, 15.0)
    return codes, step, smallest + poison


@triton.jit  # type: ignore[untyped-decorator]
def load_block(
    new_ptr: tl.tensor, open_ptr: tl.tensor, tokens: tl.tensor, is_new: tl.tensor, places: tl.tensor, dims: tl.tensor,
    token_stride: int, head_stride: int, kv_head: tl.tensor, HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Both halves [tokens, padded half] of one block and head, from the new tokens and the open row, float32.

    Padding channels repeat the last one; values are rounded to the open row's dtype, as if they had waited there.
    """
    dtype: tl.constexpr = open_ptr.dtype.element_ty
    channel = tl.minimum(dims, HALF - 1)[None, :]
    fresh, kept = is_new[:, None], ~is_new[:, None]
    new = new_ptr + tokens[:, None] * token_stride + kv_head * head_stride + channel
    old = open_ptr + places[:, None] * (2 * HALF) + channel
    low = tl.where(fresh, tl.load(new, mask=fresh, other=0.0).to(dtype), tl.load(old, mask=kept, other=0.0))
    high = tl.where(
        fresh, tl.load(new + HALF, mask=fresh, other=0.0).to(dtype), tl.load(old + HALF, mask=kept, other=0.0)
    )
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def keep_open(
    new_ptr: tl.tensor, open_ptr: tl.tensor, tokens: tl.tensor, ok: tl.tensor, places: tl.tensor, dims: tl.tensor,
    token_stride: int, head_stride: int, kv_head: tl.tensor, HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Copy new tokens of one head to their places in the open row."""
    mask = ok[:, None] & (dims < HALF)[None, :]
    source = new_ptr + tokens[:, None] * token_stride + kv_head * head_stride + dims[None, :]
    target = open_ptr + places[:, None] * (2 * HALF) + dims[None, :]
    tl.store(target, tl.load(source, mask=mask, other=0.0).to(open_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, tl.load(source + HALF, mask=mask, other=0.0).to(open_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def write_open_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_params_ptr: tl.tensor,
    k_open_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_params_ptr: tl.tensor,
    v_open_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    open_rows_ptr: tl.tensor,
    key_token_stride: int,
    key_head_stride: int,
    value_token_stride: int,
    value_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HALF: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    seq, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)
    first_written = tl.maximum(seq_len - query_len, 0)  # position; queries before position 0 have no slot
    first_token = query_start + query_len - (seq_len - first_written)
    first = (first_written // BLOCK_SIZE + tl.program_id(1)) * BLOCK_SIZE
    if first >= seq_len or query_len == 0:
        return
    lanes, dims = tl.arange(0, BLOCK_SIZE), tl.arange(0, PADDED_HALF)
    row = (tl.load(open_rows_ptr + seq).to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
    if first + BLOCK_SIZE <= seq_len:
        positions = first + lanes
        tokens = (first_token + positions - first_written).to(tl.int64)
        slot = tl.load(slot_mapping_ptr + first_token + tl.maximum(first, first_written) - first_written)
        if slot >= 0:
            page = slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head
            rows, is_new = page * BLOCK_SIZE + lanes, positions >= first_written
            mask = (lanes >= 0)[:, None] & (dims < HALF)[None, :]
            low, high = load_block(
                key_ptr, k_open_ptr, tokens, is_new, row + lanes, dims, key_token_stride, key_head_stride, kv_head, HALF
            )
            low, step_low, min_low = quantize_channels(low)
            high, step_high, min_high = quantize_channels(high)
            store_codes(k_ptr, rows, dims, low, high, mask, HALF, "int4_channel")
            params = k_params_ptr + page * (4 * HALF) + dims
            tl.store(params, step_low.to(tl.float16), mask=dims < HALF)
            tl.store(params + HALF, step_high.to(tl.float16), mask=dims < HALF)
            tl.store(params + 2 * HALF, min_low.to(tl.float16), mask=dims < HALF)
            tl.store(params + 3 * HALF, min_high.to(tl.float16), mask=dims < HALF)
            low, high = load_block(
                value_ptr, v_open_ptr, tokens, is_new, row + lanes, dims, value_token_stride, value_head_stride,
                kv_head, HALF,
            )  # fmt: skip
            low, high, step, minimum = quantize_tokens(low, high, "int4")
            store_codes(v_ptr, rows, dims, low, high, mask, HALF, "int4")
            tl.store(v_params_ptr + page * (2 * BLOCK_SIZE) + lanes, step.to(tl.float16))
            tl.store(v_params_ptr + page * (2 * BLOCK_SIZE) + BLOCK_SIZE + lanes, minimum.to(tl.float16))
    if tl.program_id(1) == 0:
        tl.debug_barrier()  # every thread has read the open row
        positions = seq_len // BLOCK_SIZE * BLOCK_SIZE + lanes
        tokens = (first_token + positions - first_written).to(tl.int64)
        ok = (positions >= first_written) & (positions < seq_len)
        ok = ok & (tl.load(slot_mapping_ptr + tokens, mask=ok, other=-1) >= 0)
        keep_open(key_ptr, k_open_ptr, tokens, ok, row + lanes, dims, key_token_stride, key_head_stride, kv_head, HALF)
        keep_open(
            value_ptr, v_open_ptr, tokens, ok, row + lanes, dims, value_token_stride, value_head_stride, kv_head, HALF
        )


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """See `kernels.attention.reshape_and_cache`, for formats that keep open blocks. block_size: a power of two."""
    if cache.block_size & (cache.block_size - 1):
        raise ValueError(f"{cache.kv_format.name} needs a block_size that is a power of two, got {cache.block_size}.")
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    touched = 1 + -(-metadata.max_query_len // cache.block_size)
    write_open_kernel[(metadata.num_seqs, touched, cache.num_kv_heads)](
        key,
        value,
        cache.key.codes,
        cache.key.params,
        cache.key.open_blocks,
        cache.value.codes,
        cache.value.params,
        cache.value.open_blocks,
        metadata.slot_mapping,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.open_rows,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=cache.num_kv_heads,
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        PADDED_HALF=triton.next_power_of_2(half_of(cache.head_dim)),
        num_warps=4,
    )
