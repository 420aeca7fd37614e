"""The oracle: paged attention in float64, one query at a time, written to be obviously right.

Slow on purpose. It follows the definition: look up every visible key through the block table, softmax, weighted
sum of values. Quantized caches are dequantized first, so what it shows is the attention of what was stored. Other
backends are tested against it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.kv_cache import LayerKVCache, PagedVectors, read_blocks
from kernels.quantize import quantize, rotate


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """Write each token's key and value to its slot; negative slots are skipped."""
    for part, new in ((cache.key, key), (cache.value, value)):
        if cache.kv_format.keeps_open_blocks:
            _write_open(part, new, cache.block_size, metadata)
            continue
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                _write_token(part, new[token], slot // cache.block_size, slot % cache.block_size)


def _write_token(part: PagedVectors, vectors: Tensor, block: int, offset: int) -> None:
    """vectors [num_kv_heads, head_dim] of one token, in a format whose parameters are per token."""
    codes, params = quantize((rotate(vectors) if part.fmt.rotated else vectors)[:, None], part.fmt, part.scale)
    part.codes[block, :, offset] = codes[:, 0]
    if params is not None and part.params is not None:
        part.params[block, :, :, offset] = params[:, :, 0]


def _write_open(part: PagedVectors, new: Tensor, block_size: int, metadata: AttentionMetadata) -> None:
    """Collect each sequence's tokens in its open block; quantize the block when its last slot is written."""
    assert part.open_blocks is not None
    assert part.params is not None
    assert metadata.open_rows is not None
    starts, rows = metadata.query_start_loc.tolist(), metadata.open_rows.tolist()
    for seq, row in enumerate(rows):
        for token in range(starts[seq], starts[seq + 1]):
            slot = int(metadata.slot_mapping[token])
            if slot < 0:
                continue
            block, offset = slot // block_size, slot % block_size
            part.open_blocks[row, :, offset] = new[token].to(part.open_blocks.dtype)
            if offset == block_size - 1:
                codes, params = quantize(part.open_blocks[row], part.fmt)
                assert params is not None
                part.codes[block], part.params[block] = codes, params


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    attention_mass: Tensor | None,
) -> Tensor:
    """See `kernels.attention.paged_attention`; the sums are taken in float64, the result in the query's dtype."""
    out, mass = paged_attention_float64(query, cache, metadata, options)
    if attention_mass is not None:
        attention_mass[:, :, : mass.shape[2]] += mass.float()
    return out.to(query.dtype)


def paged_attention_float64(
    query: Tensor, cache: LayerKVCache, metadata: AttentionMetadata, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same, left in float64, and the attention mass [num_seqs, num_kv_heads, max_seq_len] of this call."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    mass_shape = (metadata.num_seqs, cache.num_kv_heads, metadata.max_seq_len)
    mass = torch.zeros(mass_shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // cache.num_kv_heads
    starts = metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        keys, values = (_read(part, seq, seq_len, metadata) for part in (cache.key, cache.value))
        for token in range(starts[seq], starts[seq + 1]):
            position = seq_len - starts[seq + 1] + token
            visible = _visible(position, options)
            if not visible:
                continue
            for head in range(query.shape[1]):
                kv_head = head // group
                weights = _weights(query[token, head], keys[visible, kv_head], options)
                out[token, head] = weights @ values[visible, kv_head]
                mass[seq, kv_head, visible] += weights
    return out, mass


def _visible(position: int, options: AttentionOptions) -> list[int]:
    """Positions of the keys that a query at this position sees."""
    window = options.sliding_window
    return [p for p in range(position + 1) if window is None or p > position - window or p < options.sink_tokens]


def _weights(q: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    scores = keys @ q.double() * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    return torch.softmax(scores, dim=0)


def _read(part: PagedVectors, seq: int, seq_len: int, metadata: AttentionMetadata) -> Tensor:
    """A sequence's vectors [seq_len, num_kv_heads, head_dim] in float64, from the pool and its open block."""
    block_size = part.codes.shape[2]
    blocks = metadata.block_table[seq, : math.ceil(seq_len / block_size)].long()
    vectors = read_blocks(part, blocks, torch.float64)
    if part.open_blocks is not None and metadata.open_rows is not None and seq_len % block_size:
        vectors[-1] = part.open_blocks[int(metadata.open_rows[seq])].double()
    return vectors.transpose(1, 2).flatten(0, 1)[:seq_len]


def write_latent(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `kernels.mla.write_latent`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            row = torch.cat([latent[token], k_rope[token]])
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row.to(cache.dtype)


def mla_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """See `kernels.mla.mla_attention`; the sums are taken in float64, the result in q_latent's dtype."""
    return mla_attention_float64(q_latent, q_rope, cache, metadata, scale).to(q_latent.dtype)


def mla_attention_float64(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """The same, left in float64."""
    out = torch.zeros(q_latent.shape, dtype=torch.float64, device=q_latent.device)
    rank, starts = q_latent.shape[2], metadata.query_start_loc.tolist()
    for seq, seq_len in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_table[seq, : math.ceil(seq_len / cache.shape[1])].long()
        rows = cache[blocks].double().flatten(0, 1)[:seq_len]
        for token in range(starts[seq], starts[seq + 1]):
            num_visible = max(seq_len - starts[seq + 1] + token + 1, 0)
            latents, k_rope = rows[:num_visible, :rank], rows[:num_visible, rank:]
            for head in range(q_latent.shape[1] if num_visible else 0):
                scores = latents @ q_latent[token, head].double() + k_rope @ q_rope[token, head].double()
                out[token, head] = torch.softmax(scores * scale, dim=0) @ latents
    return out
