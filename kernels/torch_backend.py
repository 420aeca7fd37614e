"""Paged attention with torch operators: the CPU twin of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionMetadata


def reshape_and_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot; negative slots are skipped."""
    block_size = k_cache.shape[2]
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = key[keep].to(k_cache.dtype)
    v_cache[block, :, offset] = value[keep].to(v_cache.dtype)


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    out = torch.zeros_like(query)
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    group = query.shape[1] // num_kv_heads
    starts = metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        lo, hi = starts[seq], starts[seq + 1]
        if seq_len == 0 or hi == lo:
            continue
        blocks = metadata.block_table[seq, : -(-seq_len // block_size)]
        keys, values = (
            cache.index_select(0, blocks).transpose(0, 1).reshape(num_kv_heads, 1, -1, head_dim)[:, :, :seq_len].float()
            for cache in (k_cache, v_cache)
        )
        positions = torch.arange(seq_len - (hi - lo), seq_len)
        mask = torch.arange(seq_len) <= positions[:, None]
        q = query[lo:hi].view(hi - lo, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).float()
        attended = functional.scaled_dot_product_attention(
            q, keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1), attn_mask=mask, scale=scale
        )
        out[lo:hi] = attended.permute(2, 0, 1, 3).reshape(hi - lo, -1, head_dim).to(query.dtype)
    return out
