"""The Triton kernels behind the interface of `kernels.attention`: decodes first, then prefill chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.cache_write import reshape_and_cache
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

__all__ = ["paged_attention", "reshape_and_cache"]


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    table, lens, n = metadata.block_table, metadata.seq_lens, metadata.num_decodes
    if n:
        paged_decode(
            query[:n], k_cache, v_cache, table[:n], lens[:n], out, max_seq_len=metadata.max_seq_len, scale=scale
        )
    if metadata.num_seqs > n:
        starts = metadata.query_start_loc[n:]
        max_query_len = metadata.max_query_len
        paged_prefill(
            query, k_cache, v_cache, table[n:], starts, lens[n:], out, max_query_len=max_query_len, scale=scale
        )
    return out
