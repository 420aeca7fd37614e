"""The Triton kernels behind the interface of `kernels.attention`: decodes first, then prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cache_write, cache_write_open
from kernels import mla_attention as mla
from kernels import paged_attention as paged
from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.attention_mass import add_attention_mass
from kernels.cache_write import write_latent
from kernels.kv_cache import LayerKVCache
from kernels.quantize import rotate, unrotate

__all__ = ["mla_attention", "paged_attention", "reshape_and_cache", "write_latent"]


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """See `kernels.attention.reshape_and_cache`."""
    if cache.kv_format.keeps_open_blocks:
        cache_write_open.reshape_and_cache(key, value, cache, metadata)
        return
    key, value = (rotate(new) if part.fmt.rotated else new for part, new in ((cache.key, key), (cache.value, value)))
    cache_write.reshape_and_cache(key, value, cache, metadata.slot_mapping)


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attention_mass: Tensor | None,
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    if cache.key.fmt.rotated:
        query = rotate(query)
    elif query.stride(2) != 1:
        query = query.contiguous()
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    e4m3 = native_e4m3(query.device)
    lse = [
        paged.paged_attention(
            query[launch.rows], cache, metadata, options, out[launch.rows], native_e4m3=e4m3, **launch.arguments
        )
        for launch in _launches(metadata)  # their rows lie one after another, from row 0
    ]
    if attention_mass is not None and lse:
        add_attention_mass(query, cache, metadata, options, torch.cat(lse), attention_mass, native_e4m3=e4m3)
    return unrotate(out) if cache.value.fmt.rotated else out


def mla_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """See `kernels.mla.mla_attention`."""
    q_latent, q_rope = (q if q.stride(2) == 1 else q.contiguous() for q in (q_latent, q_rope))
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    for launch in _launches(metadata):
        rows = launch.rows
        mla.mla_attention(q_latent[rows], q_rope[rows], cache, metadata, scale, out[rows], **launch.arguments)
    return out


def native_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 itself (compute capability 8.9 and later; the interpreter does)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class _Launch:
    """rows: the tokens of the sequences of one launch, padding behind them included. arguments: of the launcher."""

    rows: slice
    arguments: dict[str, int]


def _launches(metadata: AttentionMetadata) -> list[_Launch]:
    """The decodes, then the chunks, where there are any; a decode has one token, so rows are known without a copy."""
    n, num_chunks = metadata.num_decodes, metadata.num_seqs - metadata.num_decodes
    launches = []
    if n:
        launches.append(_Launch(slice(n), {"first_seq": 0, "num_seqs": n, "max_query_len": 1}))
    if num_chunks:
        arguments = {"first_seq": n, "num_seqs": num_chunks, "max_query_len": metadata.max_query_len, "first_token": n}
        launches.append(_Launch(slice(n, None), arguments))
    return launches
