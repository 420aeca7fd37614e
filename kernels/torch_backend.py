"""The CPU backend: attention and cache writes with torch operators, on the paged pool of any format.

Decodes over floating-point caches (`kernels.torch_ragged`) and over the others (`kernels.torch_decode`), prefill chunks
(`kernels.torch_prefill`), writes (`kernels.torch_write`) and latent attention (`kernels.torch_mla`) share what
`kernels.torch_plan` derives from a step's metadata. Arithmetic is float32; decodes round weights to a 16-bit cache's
dtype. The content of slots without a token never matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.kv_cache import LayerKVCache
from kernels.quantize import rotate, unrotate
from kernels.torch_decode import decode
from kernels.torch_mla import mla_attention, write_latent
from kernels.torch_plan import PlanKey, plan_for
from kernels.torch_prefill import attend_chunk
from kernels.torch_ragged import decode_in_place, serves
from kernels.torch_write import reshape_and_cache

__all__ = ["mla_attention", "paged_attention", "reshape_and_cache", "write_latent"]

# Elements of keys or values that decodes hold at once: 4 MiB of float32, which stay in the cache.
WORKSPACE_ELEMENTS = 1 << 20


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attention_mass: Tensor | None,
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    plan = plan_for(metadata, _plan_key(cache, query.shape[0], options))
    q = query.float()
    if cache.key.fmt.rotated:
        q = rotate(q)
    out = torch.zeros(query.shape, dtype=torch.float32)
    if plan.decodes is not None:
        decoder = decode_in_place if serves(cache) else decode
        decoder(q, cache, plan.decodes, options, attention_mass, out)
    for chunk in plan.chunks:
        mass = None if attention_mass is None else attention_mass[chunk.seq]
        for start, end, piece in attend_chunk(q, cache, chunk, options, mass):
            out[start:end].view(piece.shape).copy_(piece)
    return (unrotate(out) if cache.value.fmt.rotated else out).to(query.dtype)


def _plan_key(cache: LayerKVCache, num_tokens: int, options: AttentionOptions) -> PlanKey:
    return PlanKey(
        num_blocks=cache.num_blocks,
        num_kv_heads=cache.num_kv_heads,
        block_size=cache.block_size,
        head_dim=cache.head_dim,
        num_tokens=num_tokens,
        workspace=WORKSPACE_ELEMENTS,
        sliding_window=options.sliding_window,
        sink_tokens=options.sink_tokens,
        open_rows=0 if cache.key.open_blocks is None else cache.key.open_blocks.shape[0],
    )
