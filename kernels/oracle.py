"""The oracle: paged attention in float64, one query at a time, written to be obviously right.

Slow on purpose. It follows the definition: look up every visible key through the block table, softmax, weighted
sum of values. Other backends are tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; negative slots are skipped."""
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, :, slot % block_size] = key[token].to(k_cache.dtype)
            v_cache[slot // block_size, :, slot % block_size] = value[token].to(v_cache.dtype)


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `kernels.attention.paged_attention`; the sums are taken in float64, the result in the query's dtype."""
    return paged_attention_float64(query, k_cache, v_cache, metadata, scale).to(query.dtype)


def paged_attention_float64(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """The same, left in float64."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    starts = metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        blocks = metadata.block_table[seq].tolist()
        for i in range(query_len):
            num_visible = max(seq_len - query_len + i + 1, 0)
            token = starts[seq] + i
            for head in range(query.shape[1]):
                out[token, head] = _attend(
                    query[token, head], k_cache, v_cache, blocks, num_visible, head, query, scale
                )
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: list[int],
    num_visible: int,
    head: int,
    query: Tensor,
    scale: float,
) -> Tensor:
    """One query vector [head_dim] against the first num_visible tokens of one sequence."""
    if num_visible == 0:
        return torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    block_size = k_cache.shape[2]
    kv_head = head // (query.shape[1] // k_cache.shape[1])
    places = [(blocks[pos // block_size], pos % block_size) for pos in range(num_visible)]
    keys = torch.stack([k_cache[block, kv_head, offset].double() for block, offset in places])
    values = torch.stack([v_cache[block, kv_head, offset].double() for block, offset in places])
    weights = torch.softmax(keys @ q.double() * scale, dim=0)
    return weights @ values
