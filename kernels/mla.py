"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) on the paged cache, with absorbed projections.

The cache of a layer is one floating-point tensor [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]: a token's
normalized latent c, then its RoPE key k_r, which all heads share. With W_UK folded into the query and W_UV applied
afterwards by the model, every head attends to the latent itself:
score = (q_latent . c + q_rope . k_r) * scale, output = sum of softmax weights times c.
The scale is the model's, 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim) times YaRN's factor; it does not follow from the
latent's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata, backend_for, check_metadata
from kernels.checks import expect_device, expect_float, expect_tensor


def write_latent(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latent [num_tokens, kv_lora_rank] and rotated k_rope [num_tokens, qk_rope_head_dim] to their slots.

    slot_mapping: int64 [num_tokens], distinct; -1 skips a token. Raises ValueError on bad arguments.
    """
    _check_cache(cache)
    expect_tensor("slot_mapping", slot_mapping, torch.int64, (None,))
    num_tokens = slot_mapping.shape[0]
    expect_float("latent", latent, (num_tokens, None))
    expect_float("k_rope", k_rope, (num_tokens, cache.shape[2] - latent.shape[1]))
    expect_device("latent", latent, cache.device)
    if num_tokens:
        backend_for(cache.device).write_latent(latent, k_rope, cache, slot_mapping)


def mla_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
) -> Tensor:
    """Causal attention of every query token over its sequence's latents, decodes and chunks alike.

    q_latent: [num_tokens, num_heads, kv_lora_rank], the query's content part times W_UK.
    q_rope: [num_tokens, num_heads, qk_rope_head_dim], rotated.
    Returns [num_tokens, num_heads, kv_lora_rank] in q_latent's dtype, for W_UV to expand;
    padding rows and queries that see no key are zero. Raises ValueError on bad arguments.
    """
    _check_cache(cache)
    expect_float("q_latent", q_latent, (None, None, None))
    num_tokens, num_heads, rank = q_latent.shape
    expect_float("q_rope", q_rope, (num_tokens, num_heads, cache.shape[2] - rank))
    for name, tensor in (("q_latent", q_latent), ("q_rope", q_rope)):
        expect_device(name, tensor, cache.device)
    check_metadata(metadata, cache.shape[1], cache.shape[0], num_tokens, cache.device)
    if q_latent.numel() == 0:
        return torch.empty_like(q_latent)
    return backend_for(cache.device).mla_attention(q_latent, q_rope, cache, metadata, scale)


def _check_cache(cache: Tensor) -> None:
    expect_float("The latent cache", cache, (None, None, None))
    if not cache.is_contiguous():
        raise ValueError("The latent cache must be contiguous.")
