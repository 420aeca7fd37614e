"""Prefill chunks with torch operators: one sequence's visible blocks are gathered, then attended to in full precision.

Masks and scores are bounded by working on so many queries at a time; with a sliding window each such piece takes only
the keys its queries see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionOptions
from kernels.kv_cache import LayerKVCache
from kernels.torch_gather import gather_vectors
from kernels.torch_plan import Chunk

# Bound on the elements of a mask, and of scores where they are written out.
SCORE_ELEMENTS = 1 << 20


def attend_chunk(
    query: Tensor, cache: LayerKVCache, chunk: Chunk, options: AttentionOptions, attention_mass: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Attention of one chunk, in pieces (start, end, float32 [end - start, num_kv_heads, group, head_dim]).

    query: float32, all of the batch, rotated where keys are stored rotated; results likewise for values.
    attention_mass: float32 [num_kv_heads, at least seq_len], the sequence's, or None.
    """
    num_kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
    keys, values = (
        gather_vectors(part, chunk.block_rows.flatten(), chunk.open_blocks).view(num_kv_heads, 1, -1, head_dim)
        for part in (cache.key, cache.value)
    )
    weights_needed = attention_mass is not None or options.soft_cap is not None
    for start, end in _pieces(chunk, query.shape[1] if weights_needed else 1, options):
        first = chunk.seq_len - chunk.end + start  # the first query's position
        last = first + end - start
        seen = _seen(chunk, options, first, last)
        k, v = _columns(keys, seen), _columns(values, seen)
        q = query[start:end].reshape(end - start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        if weights_needed:
            weights = _weights(q, k, _mask(first, last, chunk, seen, options), options)
            if attention_mass is not None:
                attention_mass.index_add_(1, _positions(chunk, seen), weights.sum((1, 2)))
            attended = weights @ v
        else:
            causal = k.shape[2] == end - start and options.sliding_window is None
            attended = functional.scaled_dot_product_attention(
                q,
                k.expand(-1, q.shape[1], -1, -1),
                v.expand(-1, q.shape[1], -1, -1),
                attn_mask=None if causal else _mask(first, last, chunk, seen, options),
                is_causal=causal,
                scale=options.scale,
            )
        yield start, end, attended.permute(2, 0, 1, 3)


def _positions(chunk: Chunk, seen: list[slice]) -> Tensor:
    """int64, of these gathered keys; the first may be sinks."""
    shift = chunk.window_start - chunk.num_sinks
    shifts = [0 if s.stop <= chunk.num_sinks else shift for s in seen]
    return torch.cat([torch.arange(s.start + by, s.stop + by) for s, by in zip(seen, shifts, strict=True)])


def _pieces(chunk: Chunk, num_heads: int, options: AttentionOptions) -> Iterator[tuple[int, int]]:
    """Rows of the batch to attend with at once. A mask counts once, scores once a head.

    A chunk without context, window or need of weights leaves the mask to the operator and is taken whole.
    """
    num_keys = chunk.num_sinks + chunk.seq_len - chunk.window_start
    step = chunk.end - chunk.start
    if num_heads > 1 or num_keys != step or options.sliding_window is not None:
        step = max(SCORE_ELEMENTS // (num_keys * num_heads), 1)
    if options.sliding_window is not None:
        step = min(step, max(options.sliding_window, 64))  # so that a piece sees few keys beside its windows
    for start in range(chunk.start, chunk.end, step):
        yield start, min(start + step, chunk.end)


def _seen(chunk: Chunk, options: AttentionOptions, first: int, last: int) -> list[slice]:
    """Which of the gathered keys queries at positions [first, last) may see."""
    end = chunk.num_sinks + last - chunk.window_start
    if options.sliding_window is None:
        return [slice(0, end)]
    begin = max(first - options.sliding_window + 1 - chunk.window_start, 0) + chunk.num_sinks
    num_sinks = min(options.sink_tokens, begin)
    return [slice(0, num_sinks), slice(begin, end)] if num_sinks else [slice(begin, end)]


def _columns(gathered: Tensor, seen: list[slice]) -> Tensor:
    parts = [gathered[:, :, keys] for keys in seen]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _mask(first: int, last: int, chunk: Chunk, seen: list[slice], options: AttentionOptions) -> Tensor:
    """Additive float32 mask [last - first, keys seen] of queries at positions [first, last)."""
    if options.sliding_window is None:
        return torch.full((last - first, last), float("-inf")).triu_(first + 1)
    keys = _positions(chunk, seen)
    age = torch.arange(first, last)[:, None] - keys
    hidden = (age < 0) | ((age >= options.sliding_window) & (keys >= options.sink_tokens))
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _weights(q: Tensor, keys: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Softmax weights [num_kv_heads, group, queries, keys]."""
    scores = (q * options.scale) @ keys.transpose(2, 3)
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    return torch.softmax(scores.add_(mask), -1)
