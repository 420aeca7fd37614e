"""Triton building blocks: one tile of keys becomes scores, one tile of values is summed by weight, in any KV format.

A vector is handled as two halves, channels [0, head_dim / 2) and the rest: a byte of a 4-bit format holds one channel
of each, so unpacking needs no shuffle, and the other formats lose nothing by it. Scales never touch the tiles: a
key's scale multiplies its column of scores, a value's its weight, a channel's the query, so that dequantization costs
a few instructions a column.

kind of a part (constexpr), by VectorFormat: "raw" (floating point, and e4m3 that the target converts itself), "e4m3"
and "e5m2" (bytes decoded by hand: not every target, or every Triton, converts them), "int8", "int4_symmetric", "int4"
(scale and minimum per token), "int4_channel" (scale and minimum per channel; a tile then lies in one block).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_cache import PagedVectors

LOG2E = tl.constexpr(1.4426950408889634)
INTEGER_KINDS = ("int8", "int4_symmetric", "int4", "int4_channel")


def kind_of(part: PagedVectors, native_e4m3: bool) -> str:
    """The kind of a part; native_e4m3: whether the target converts e4m3 in hardware (sm_89 and later)."""
    name = part.fmt.name
    if name == "int4_rotated":
        return "int4"
    if name == "fp8_e5m2":
        return "e5m2"
    if name == "fp8_e4m3" and not native_e4m3:
        return "e4m3"
    return name if name in INTEGER_KINDS else "raw"


@triton.jit  # type: ignore[untyped-decorator]
def nibble_to_float(nibble: tl.tensor, zero: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """nibble - zero in dtype, for integers 0..15.

    Put into the low mantissa bits of 1024 (fp16) or 128 (bf16), where one unit is the last place: cheaper than an
    integer conversion, and exact.
    """
    if dtype == tl.float16:
        return (nibble.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)
    if dtype == tl.bfloat16:
        return (nibble.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + zero)
    return nibble.to(dtype) - zero


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_to_float16(code: tl.tensor) -> tl.tensor:
    """fp16 of e4m3 bytes: shift the exponent field into place and make up for the smaller bias (15 - 7).

    Subnormals come out right as well. NaN, all ones, carries into fp16's top exponent bit and stays NaN.
    """
    wide = code.to(tl.int16)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 8) | ((magnitude | ((magnitude + 1) & 0x80)) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(
    codes_ptr: tl.tensor,
    rows: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of the vectors at these rows of the cache, unscaled, in dtype; 0 where masked."""
    if KIND == "int4" or KIND == "int4_channel" or KIND == "int4_symmetric":
        ZERO: tl.constexpr = 8.0 if KIND == "int4_symmetric" else 0.0
        packed = tl.load(codes_ptr + rows * HALF + dims, mask=mask, other=0)
        low = nibble_to_float(packed & 15, ZERO, dtype)
        high = nibble_to_float(packed >> 4, ZERO, dtype)
    else:
        NOTHING: tl.constexpr = 0.0 if KIND == "raw" else 0
        low = tl.load(codes_ptr + rows * (2 * HALF) + dims, mask=mask, other=NOTHING)
        high = tl.load(codes_ptr + rows * (2 * HALF) + HALF + dims, mask=mask, other=NOTHING)
        if KIND == "e4m3":
            low, high = e4m3_to_float16(low), e4m3_to_float16(high)
        elif KIND == "e5m2":  # the upper half of fp16
            low = (low.to(tl.int16) << 8).to(tl.float16, bitcast=True)
            high = (high.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        low, high = low.to(dtype), high.to(dtype)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def load_token_params(
    params_ptr: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    ok: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Scale and minimum (0 for symmetric kinds) of each token of the tile, float32."""
    if KIND == "int4":
        step = tl.load(params_ptr + pages * (2 * BLOCK_SIZE) + offsets, mask=ok, other=0.0).to(tl.float32)
        low = tl.load(params_ptr + pages * (2 * BLOCK_SIZE) + BLOCK_SIZE + offsets, mask=ok, other=0.0).to(tl.float32)
    else:
        step = tl.load(params_ptr + pages * BLOCK_SIZE + offsets, mask=ok, other=0.0)
        low = tl.zeros_like(step)
    return step, low


@triton.jit  # type: ignore[untyped-decorator]
def tile_scores(
    q_low: tl.tensor,
    q_high: tl.tensor,
    codes_ptr: tl.tensor,
    params_ptr: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    ok: tl.tensor,
    dims: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Dot products [rows, tokens], float32, of the query halves [rows, padded half] with one tile of keys.

    pages: block id times num_kv_heads plus KV head, int64, of each token; offsets: its place in the block.
    """
    dim_ok = dims < HALF
    rows = pages * BLOCK_SIZE + offsets
    mask = dim_ok[:, None] & ok[None, :]
    low, high = load_halves(codes_ptr, rows[None, :], dims[:, None], mask, HALF, KIND, q_low.dtype)
    if KIND == "int4_channel":
        base = params_ptr + tl.max(pages, 0) * (4 * HALF) + dims
        step_low = tl.load(base, mask=dim_ok, other=0.0).to(tl.float32)
        step_high = tl.load(base + HALF, mask=dim_ok, other=0.0).to(tl.float32)
        min_low = tl.load(base + 2 * HALF, mask=dim_ok, other=0.0).to(tl.float32)
        min_high = tl.load(base + 3 * HALF, mask=dim_ok, other=0.0).to(tl.float32)
        shift = tl.sum(q_low * min_low[None, :], 1) + tl.sum(q_high * min_high[None, :], 1)
        scaled_low = (q_low * step_low[None, :]).to(q_low.dtype)
        scaled_high = (q_high * step_high[None, :]).to(q_low.dtype)
        scores = tl.dot(scaled_low, low, input_precision="tf32x3")
        scores = tl.dot(scaled_high, high, scores, input_precision="tf32x3") + shift[:, None]
    else:
        scores = tl.dot(q_low, low, input_precision="tf32x3")
        scores = tl.dot(q_high, high, scores, input_precision="tf32x3")
        if KIND == "int8" or KIND == "int4_symmetric":
            step, _ = load_token_params(params_ptr, pages, offsets, ok, BLOCK_SIZE, KIND)
            scores = scores * step[None, :]
        elif KIND == "int4":
            step, minimum = load_token_params(params_ptr, pages, offsets, ok, BLOCK_SIZE, KIND)
            q_sum = tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
            scores = scores * step[None, :] + minimum[None, :] * q_sum[:, None]
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def add_values(
    acc_low: tl.tensor,
    acc_high: tl.tensor,
    weights: tl.tensor,
    codes_ptr: tl.tensor,
    params_ptr: tl.tensor,
    pages: tl.tensor,
    offsets: tl.tensor,
    ok: tl.tensor,
    dims: tl.tensor,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The accumulators [rows, padded half] plus weights [rows, tokens] times one tile of values."""
    rows = pages * BLOCK_SIZE + offsets
    mask = ok[:, None] & (dims < HALF)[None, :]
    low, high = load_halves(codes_ptr, rows[:, None], dims[None, :], mask, HALF, KIND, dtype)
    if KIND == "raw" or KIND == "e4m3" or KIND == "e5m2":
        p = weights.to(dtype)
        acc_low = tl.dot(p, low, acc_low, input_precision="tf32x3")
        acc_high = tl.dot(p, high, acc_high, input_precision="tf32x3")
    else:
        step, minimum = load_token_params(params_ptr, pages, offsets, ok, BLOCK_SIZE, KIND)
        # Relative to the tile's largest scale, since a weight times a small scale would not fit into fp16.
        largest = tl.max(step, 0)
        p = (weights * (step / tl.maximum(largest, 1e-30))[None, :]).to(dtype)
        acc_low += tl.dot(p, low, input_precision="tf32x3") * largest
        acc_high += tl.dot(p, high, input_precision="tf32x3") * largest
        if KIND == "int4":
            shift = tl.sum(weights * minimum[None, :], 1)[:, None]
            acc_low += shift
            acc_high += shift
    return acc_low, acc_high


@triton.jit  # type: ignore[untyped-decorator]
def cap_and_mask(
    scores: tl.tensor,
    positions: tl.tensor,
    query_positions: tl.tensor,
    ok: tl.tensor,
    scale: float,
    soft_cap: float,
    window: int,
    sink_tokens: int,
    SOFT_CAP: tl.constexpr,
) -> tl.tensor:
    """Scores times scale, capped, in units of log 2, -inf where the query does not see the key."""
    scores = scores * scale
    if SOFT_CAP:
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # tanh
    distance = query_positions[:, None] - positions[None, :]
    visible = ok[None, :] & (distance >= 0) & ((distance < window) | (positions < sink_tokens)[None, :])
    return tl.where(visible, scores * LOG2E, float("-inf"))


def half_of(head_dim: int) -> int:
    """head_dim / 2; ValueError when it is odd."""
    if head_dim % 2:
        raise ValueError(f"The triton kernels need an even head_dim, got {head_dim}.")
    return head_dim // 2


def code_tensor(part: PagedVectors, kind: str) -> Tensor:
    """The codes as the kernels of this kind read them."""
    return part.codes.view(torch.uint8) if kind in ("e4m3", "e5m2") else part.codes
