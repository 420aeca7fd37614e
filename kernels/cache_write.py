"""Triton kernels that write new keys, values and latents to their slots of the paged cache, quantizing on the fly.

One program a token; a slot of -1 skips the token. A token's scale and minimum go beside its block, where nothing
written later touches them. The arithmetic is that of `kernels.quantize`, rounding to nearest even and fp8 encoding
included, since conversions to fp8 differ between targets. Formats with open blocks are written by
`kernels.cache_write_open`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_cache import LayerKVCache, PagedVectors
from kernels.tiles import half_of, kind_of

MIN_SCALE = tl.constexpr(2.0**-24)
ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no fraction bits, rounding to nearest even


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x: tl.tensor) -> tl.tensor:
    """x, float32 of magnitude below 2**22, rounded to the nearest integer, ties to even."""
    return (x + ROUND_TO_INTEGER) - ROUND_TO_INTEGER


@triton.jit  # type: ignore[untyped-decorator]
def encode_fp8(x: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """The uint8 code of float32 x in a format with this many mantissa bits, nearest even, saturating at LIMIT."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LIMIT)
    m = magnitude.to(tl.int32, bitcast=True)
    DROP: tl.constexpr = 23 - MANTISSA
    normal = ((m + ((1 << (DROP - 1)) - 1) + ((m >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA)
    subnormal = rounded(magnitude * (2.0 ** (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tokens(
    low: tl.tensor, high: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Codes of both halves [vectors, padded half], float32, and each vector's scale and minimum.

    Lanes past the half must hold 0 for symmetric kinds and a copy of a real channel for "int4".
    """
    poison = tl.sum(low * 0.0, 1) + tl.sum(high * 0.0, 1)  # NaN when anything is not finite, else 0
    if KIND == "int4":
        minimum = tl.minimum(tl.min(low, 1), tl.min(high, 1)).to(tl.float16).to(tl.float32) + poison
        largest = tl.maximum(tl.max(low, 1), tl.max(high, 1))
        smallest = tl.minimum(tl.min(low, 1), tl.min(high, 1)).to(tl.float16).to(tl.float32)
        step = tl.maximum(tl.div_rn(largest - smallest, 15.0), MIN_SCALE).to(tl.float16).to(tl.float32) + poison
        low = tl.clamp(rounded(tl.div_rn(low - minimum[:, None], step[:, None])), 0.0, 15.0)
        high = tl.clamp(rounded(tl.div_rn(high - minimum[:, None], step[:, None])), 0.0, 15.0)
    else:
        LEVELS: tl.constexpr = 127.0 if KIND == "int8" else 7.0
        OFFSET: tl.constexpr = 0.0 if KIND == "int8" else 8.0
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        step = tl.maximum(tl.div_rn(largest, LEVELS), MIN_SCALE) + poison
        minimum = tl.zeros_like(step)
        low = tl.clamp(rounded(tl.div_rn(low, step[:, None])), -LEVELS, LEVELS) + OFFSET
        high = tl.clamp(rounded(tl.div_rn(high, step[:, None])), -LEVELS, LEVELS) + OFFSET
    return low, high, step, minimum


@triton.jit  # type: ignore[untyped-decorator]
def store_codes(
    codes_ptr: tl.tensor, rows: tl.tensor, dims: tl.tensor, low: tl.tensor, high: tl.tensor, mask: tl.tensor,
    HALF: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Store codes [vectors, padded half] at these rows of the cache."""
    if KIND == "int8":
        tl.store(codes_ptr + rows[:, None] * (2 * HALF) + dims[None, :], low.to(tl.int8), mask=mask)
        tl.store(codes_ptr + rows[:, None] * (2 * HALF) + HALF + dims[None, :], high.to(tl.int8), mask=mask)
    else:
        packed = low.to(tl.uint8) | (high.to(tl.uint8) << 4)
        tl.store(codes_ptr + rows[:, None] * HALF + dims[None, :], packed, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def write_part(
    new_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    params_ptr: tl.tensor,
    pages: tl.tensor,
    offset: tl.tensor,
    head_stride: int,
    scale: float,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
) -> None:
    """Write all heads of one token's keys, or values, to slot `offset` of its block. pages: [heads], int64."""
    HALF: tl.constexpr = HEAD_DIM // 2
    heads, dims = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HALF)[None, :]
    source = new_ptr + heads[:, None] * head_stride + tl.minimum(dims, HALF - 1)[None, :]
    low = tl.load(source, mask=(heads < NUM_KV_HEADS)[:, None], other=0.0)
    high = tl.load(source + HALF, mask=(heads < NUM_KV_HEADS)[:, None], other=0.0)
    rows = pages * BLOCK_SIZE + offset
    if KIND == "int8" or KIND == "int4_symmetric" or KIND == "int4":
        low, high, step, minimum = quantize_tokens(low.to(tl.float32), high.to(tl.float32), KIND)
        store_codes(codes_ptr, rows, dims, low, high, mask, HALF, KIND)
        head_ok = heads < NUM_KV_HEADS
        if KIND == "int4":
            places = params_ptr + pages * (2 * BLOCK_SIZE) + offset
            tl.store(places, step.to(tl.float16), mask=head_ok)
            tl.store(places + BLOCK_SIZE, minimum.to(tl.float16), mask=head_ok)
        else:
            tl.store(params_ptr + rows, step, mask=head_ok)
    else:
        if KIND == "fp8_e4m3":
            low = encode_fp8(tl.div_rn(low.to(tl.float32), scale), 3, 7, 448.0)
            high = encode_fp8(tl.div_rn(high.to(tl.float32), scale), 3, 7, 448.0)
        elif KIND == "fp8_e5m2":
            low = encode_fp8(tl.div_rn(low.to(tl.float32), scale), 2, 15, 57344.0)
            high = encode_fp8(tl.div_rn(high.to(tl.float32), scale), 2, 15, 57344.0)
        target = codes_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, low.to(codes_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, high.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def reshape_and_cache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_ptr: tl.tensor,
    k_params_ptr: tl.tensor,
    v_ptr: tl.tensor,
    v_params_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    k_scale: float,
    v_scale: float,
    key_token_stride: int,
    key_head_stride: int,
    value_token_stride: int,
    value_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    pages, offset = slot // BLOCK_SIZE * NUM_KV_HEADS + tl.arange(0, PADDED_HEADS), slot % BLOCK_SIZE
    write_part(
        key_ptr + token * key_token_stride, k_ptr, k_params_ptr, pages, offset, key_head_stride, k_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, K_KIND, PADDED_HEADS, PADDED_HALF,
    )  # fmt: skip
    write_part(
        value_ptr + token * value_token_stride, v_ptr, v_params_ptr, pages, offset, value_head_stride, v_scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, V_KIND, PADDED_HEADS, PADDED_HALF,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def write_latent_kernel(
    latent_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    latent_stride: int,
    rope_stride: int,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    target = cache_ptr + slot * (RANK + ROPE_DIM)
    ranks, ropes = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    latent = tl.load(latent_ptr + token * latent_stride + ranks, mask=ranks < RANK)
    tl.store(target + ranks, latent.to(cache_ptr.dtype.element_ty), mask=ranks < RANK)
    rope = tl.load(rope_ptr + token * rope_stride + ropes, mask=ropes < ROPE_DIM)
    tl.store(target + RANK + ropes, rope.to(cache_ptr.dtype.element_ty), mask=ropes < ROPE_DIM)


def write_kind(part: PagedVectors) -> str:
    """How a part is written: fp8 always by hand, everything else as it is read."""
    return part.fmt.name if part.fmt.name.startswith("fp8") else kind_of(part, native_e4m3=True)


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, slot_mapping: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots; rotated formats want them rotated."""
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    k_kind, v_kind = write_kind(cache.key), write_kind(cache.value)
    reshape_and_cache_kernel[(slot_mapping.shape[0],)](
        key,
        value,
        cache.key.codes.view(torch.uint8) if k_kind.startswith("fp8") else cache.key.codes,
        cache.key.params,
        cache.value.codes.view(torch.uint8) if v_kind.startswith("fp8") else cache.value.codes,
        cache.value.params,
        slot_mapping.contiguous(),
        cache.key.scale,
        cache.value.scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=cache.num_kv_heads,
        HEAD_DIM=cache.head_dim,
        BLOCK_SIZE=cache.block_size,
        K_KIND=k_kind,
        V_KIND=v_kind,
        PADDED_HEADS=triton.next_power_of_2(cache.num_kv_heads),
        PADDED_HALF=triton.next_power_of_2(half_of(cache.head_dim)),
        num_warps=4,
    )


def write_latent(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `kernels.mla.write_latent`."""
    latent, k_rope = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (latent, k_rope))
    rank, rope_dim = latent.shape[1], k_rope.shape[1]
    write_latent_kernel[(slot_mapping.shape[0],)](
        latent,
        k_rope,
        cache,
        slot_mapping.contiguous(),
        latent.stride(0),
        k_rope.stride(0),
        RANK=rank,
        ROPE_DIM=rope_dim,
        PADDED_RANK=triton.next_power_of_2(rank),
        PADDED_ROPE=triton.next_power_of_2(rope_dim),
        num_warps=4,
    )
