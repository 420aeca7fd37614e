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
    positions = _positions(chunk)
    keys, values = (
        gather_vectors(part, chunk.block_rows.flatten(), chunk.open_blocks).view(num_kv_heads, 1, -1, head_dim)[
            :, :, : positions.shape[0]
        ]
        for part in (cache.key, cache.value)
    )
    weights_needed = attention_mass is not None or options.soft_cap is not None
    for start, end in _pieces(chunk, query.shape[1] if weights_needed else 1, options):
        first = chunk.seq_len - chunk.end + start  # the first query's position
        last = first + end - start
        seen = _seen(chunk, options, first, last)
        k, v, at = (_columns(t, dim, seen) for t, dim in ((keys, 2), (values, 2), (positions, 0)))
        q = query[start:end].reshape(end - start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        mask = None
        if weights_needed or at.shape[0] != end - start or options.sliding_window is not None:
            mask = _mask(torch.arange(first, last), at, options)
        if not weights_needed:
            k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=options.scale
            )
        else:
            assert mask is not None
            weights = _weights(q, k, mask, options)
            if attention_mass is not None:
                attention_mass.index_add_(1, at, weights.sum((1, 2)))
            attended = weights @ v
        yield start, end, attended.permute(2, 0, 1, 3)


def _positions(chunk: Chunk) -> Tensor:
    """int64, of the gathered keys that are tokens, rising."""
    return torch.cat([torch.arange(chunk.num_sinks), torch.arange(chunk.window_start, chunk.seq_len)])


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


def _columns(tensor: Tensor, dim: int, slices: list[slice]) -> Tensor:
    parts = [tensor.narrow(dim, s.start, s.stop - s.start) for s in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _mask(queries: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Additive float32 mask [len(queries), len(keys)] of positions."""
    age = queries[:, None] - keys
    hidden = age < 0
    if options.sliding_window is not None:
        hidden |= (age >= options.sliding_window) & (keys >= options.sink_tokens)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _weights(q: Tensor, keys: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Softmax weights [num_kv_heads, group, queries, keys]."""
    scores = (q * options.scale) @ keys.transpose(2, 3)
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    return torch.softmax(scores.add_(mask), -1)
