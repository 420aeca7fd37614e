"""Triton kernel that writes new keys and values to their slots of the paged cache.

One program a token; a slot of -1 skips the token. The block size and strides are those of the HND layout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def reshape_and_cache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    key_token_stride: int,
    key_head_stride: int,
    value_token_stride: int,
    value_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = ((block * NUM_KV_HEADS + heads) * BLOCK_SIZE + offset) * HEAD_DIM + dims
    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    tl.store(k_cache_ptr + target, key.to(k_cache_ptr.dtype.element_ty), mask=mask)
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    tl.store(v_cache_ptr + target, value.to(v_cache_ptr.dtype.element_ty), mask=mask)


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `kernels.attention.reshape_and_cache`."""
    key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    reshape_and_cache_kernel[(slot_mapping.shape[0],)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping.contiguous(),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
