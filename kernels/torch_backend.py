"""Paged attention with torch operators: the CPU twin of the Triton kernels.

Decodes work on the paged pool in place: `torch.sparse.sampled_addmm` takes the dot products of each query with
exactly the cache rows its sequence owns, and `embedding_bag` sums the value rows by weight; no copy of the context,
no dense batch (for 16-bit caches, and where torch was built without MKL, the keys pass through a bounded workspace,
as torch has no such product there). Prefill chunks gather one sequence's blocks and use scaled_dot_product_attention.
Only rows that hold a token of the sequence are read, so the content of unwritten slots never matters.
Arithmetic is float32 (float64 for a float64 cache); weights of 16-bit caches are rounded to the cache's dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionMetadata
from kernels.torch_plan import CacheShape, Chunk, DecodePlan, Plan, build_plan

# Bound on a chunk's causal mask and on the keys gathered at once for 16-bit caches, in elements.
WORKSPACE_ELEMENTS = 1 << 20

with warnings.catch_warnings():  # torch announces once per process that its CSR support is in beta
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=False)


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot; negative slots are skipped. ValueError past the pool's end."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    rows, kept = _cache_rows(slot_mapping.numpy().tobytes(), num_blocks, num_kv_heads, block_size)
    if kept is not None:
        key, value = key.index_select(0, kept), value.index_select(0, kept)
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache.view(-1, head_dim).index_copy_(0, rows, new.reshape(-1, head_dim).to(cache.dtype))


@lru_cache(maxsize=2)
def _cache_rows(
    slot_mapping: bytes, num_blocks: int, num_kv_heads: int, block_size: int
) -> tuple[Tensor, Tensor | None]:
    """The rows of a cache viewed as [-1, head_dim] that the tokens' heads go to, and which tokens to keep if not all.

    Every layer of a step asks for the same slots: the cache (by content) saves the arithmetic.
    """
    slots, kept = np.frombuffer(slot_mapping, dtype=np.int64), None
    if slots.min() < 0:
        kept = np.flatnonzero(slots >= 0)
        slots = slots[kept]
    if slots.size and slots.max() >= num_blocks * block_size:
        raise ValueError(f"slot_mapping names a slot outside the pool of {num_blocks * block_size} slots.")
    first_rows = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    rows = (first_rows[:, None] + np.arange(num_kv_heads) * block_size).ravel()
    return torch.from_numpy(rows), None if kept is None else torch.from_numpy(kept)


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `kernels.attention.paged_attention`."""
    plan = _plan(query, k_cache, metadata)
    out = torch.zeros(query.shape, dtype=query.dtype)
    if plan.decode is not None:
        out.index_copy_(0, plan.decode.tokens, _decode(query, k_cache, v_cache, plan.decode, scale))
    for chunk in plan.chunks:
        for start, end, attended in _attend_chunk(query, k_cache, v_cache, chunk, scale):
            out[start:end].view(end - start, k_cache.shape[1], -1, k_cache.shape[3]).copy_(attended)
    return out


def _plan(query: Tensor, k_cache: Tensor, metadata: AttentionMetadata) -> Plan:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    shape = CacheShape(num_blocks, num_kv_heads, block_size, head_dim, query.shape[1] // num_kv_heads)
    key = ("torch", shape, query.shape[0], k_cache.dtype)
    plan = metadata.plans.get(key)
    if not isinstance(plan, Plan):
        plan = build_plan(metadata, shape, query.shape[0], _compute_dtype(k_cache))
        metadata.plans[key] = plan
    return plan


def _compute_dtype(cache: Tensor) -> torch.dtype:
    return torch.float64 if cache.dtype == torch.float64 else torch.float32


def _decode(query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """Attention of all decodes: [len(plan.tokens), num_q_heads, head_dim] in the query's dtype."""
    head_dim = k_cache.shape[3]
    q = query.index_select(0, plan.tokens).to(_compute_dtype(k_cache))
    if k_cache.dtype == q.dtype and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        keys = k_cache.view(-1, head_dim).t()
        torch.sparse.sampled_addmm(plan.scores, q.view(-1, head_dim), keys, beta=0.0, alpha=scale, out=plan.scores)
    else:
        _score_gathered(q * scale, k_cache, plan)
    weights = plan.scores.values()
    weights.index_fill_(0, plan.padding, float("-inf"))
    for bucket in plan.buckets:
        torch.softmax(bucket, dim=-1, out=bucket)
    attended = functional.embedding_bag(
        plan.cols,
        v_cache.view(-1, head_dim),
        plan.crow,
        mode="sum",
        per_sample_weights=weights.to(v_cache.dtype),
        include_last_offset=True,
    )
    return attended.view(q.shape).to(query.dtype)


def _score_gathered(q: Tensor, k_cache: Tensor, plan: DecodePlan) -> None:
    """Fill plan.scores where no sampled product exists: keys of a few sequences at a time, in the query's dtype.

    The workspace holds WORKSPACE_ELEMENTS elements, or one sequence's keys when those are more.
    """
    num_q_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[1], k_cache.shape[3]
    group = num_q_heads // num_kv_heads
    rows = k_cache.view(-1, head_dim)
    first_seq, first_col = 0, 0
    for bucket in plan.buckets:
        length = bucket.shape[1]
        step = max(WORKSPACE_ELEMENTS // (length * num_kv_heads * head_dim), 1) * num_q_heads
        for scores in torch.split(bucket, step):
            n = scores.shape[0] // num_q_heads
            cols = plan.cols[first_col : first_col + scores.numel()].view(-1, group, length)[:, 0]
            keys = rows.index_select(0, cols.reshape(-1)).to(q.dtype).view(-1, length, head_dim)
            queries = q[first_seq : first_seq + n].view(-1, group, head_dim)
            torch.bmm(queries, keys.transpose(1, 2), out=scores.view(-1, group, length))
            first_seq, first_col = first_seq + n, first_col + scores.numel()


def _attend_chunk(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: Chunk, scale: float
) -> Iterator[tuple[int, int, Tensor]]:
    """Attention of one prefill chunk, in pieces (start, end, [end - start, num_kv_heads, group, head_dim])."""
    num_blocks, num_kv_heads, _, head_dim = k_cache.shape
    group, seq_len, dtype = query.shape[1] // num_kv_heads, chunk.seq_len, _compute_dtype(k_cache)
    keys, values = (
        cache.view(num_blocks * num_kv_heads, -1)
        .index_select(0, chunk.rows)
        .view(num_kv_heads, 1, -1, head_dim)
        .to(dtype)
        .expand(-1, group, -1, -1)
        for cache in (k_cache, v_cache)
    )
    context_len = seq_len - (chunk.end - chunk.start)
    # A chunk without context needs no mask of its own; otherwise block over queries so that the mask stays bounded.
    step = max(WORKSPACE_ELEMENTS // seq_len, 1) if context_len else chunk.end - chunk.start
    for start in range(chunk.start, chunk.end, step):
        end = min(start + step, chunk.end)
        visible = context_len + end - chunk.start
        q = query[start:end].reshape(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
        mask = _causal_mask(end - start, visible, dtype) if context_len else None
        attended = functional.scaled_dot_product_attention(
            q,
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        yield start, end, attended.permute(2, 0, 1, 3)


def _causal_mask(query_len: int, visible: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [query_len, visible] of queries that stand at the last query_len of the visible positions."""
    return torch.full((query_len, visible), float("-inf"), dtype=dtype).triu_(visible - query_len + 1)
