"""Decodes over floating-point caches, in place: a ragged score matrix in CSR form says which cache rows a query reads.

Row (sequence, query head) has one entry a visible token, its column being the token's row in the cache viewed as
[num_blocks * num_kv_heads * block_size, head_dim]. `torch.sparse.sampled_addmm` takes exactly those dot products and
`embedding_bag` sums those rows by weight: no copy of the context, no dense batch. For 16-bit caches, and where torch
was built without MKL, the keys pass through a bounded workspace, as torch has no such product there.

Rows of similar length form buckets padded to one length, so that one softmax call serves a bucket. A padding entry
points at its sequence's last token, and its score is set to -inf. Memory: 8 bytes (index and score) per query head and
visible token, 12 when the cache has 2**31 rows or more.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.attention import AttentionOptions
from kernels.kv_cache import LayerKVCache, PagedVectors
from kernels.torch_plan import Decodes, Ints, PlanKey, Visible

# A bucket may waste this many score entries on padding: about what one more softmax call costs on a CPU.
BUCKET_WASTE = 512

with warnings.catch_warnings():  # torch announces once per process that its CSR support is in beta
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=False)


@dataclass(frozen=True)
class _Listing:
    """The visible blocks of all sequences in the matrix's order, one after another, padded within buckets.

    counts: [n], blocks of each sequence. ids, block_starts, last_positions: [sum of counts], block, position of its
    first slot, and of its sequence's last token. last: [n], the place of the last token among its sequence's slots.
    padding_seq, padding_at: of each slot no query sees, its sequence in this order and its place among its slots.
    """

    block_size: int
    counts: Ints
    ids: Ints
    block_starts: Ints
    last_positions: Ints
    last: Ints
    padding_seq: Ints
    padding_at: Ints


@dataclass
class RaggedPlan:
    """seqs: int64 [n], sequences (and query rows) in the matrix's order.

    crow [n * num_q_heads + 1], cols [entries]: the CSR indices. scores: the matrix, float32; its values are scratch
    that every layer overwrites. buckets: views of those values, [sequences * num_q_heads, bucket length]. padding:
    int64, indices of the values. listing: the blocks of each sequence.
    """

    seqs: Tensor
    crow: Tensor
    cols: Tensor
    scores: Tensor
    buckets: list[Tensor]
    padding: Tensor
    listing: _Listing

    @cached_property
    def positions(self) -> Tensor:
        """int64, of each sequence's entries (the same for all heads), one after another; any one for padding."""
        listing = self.listing
        positions = listing.block_starts[:, None] + np.arange(listing.block_size)
        return torch.from_numpy(np.minimum(positions, listing.last_positions[:, None]).ravel())


def serves(cache: LayerKVCache) -> bool:
    """Whether this cache holds numbers that torch can multiply as they are."""
    return not cache.kv_format.quantized


def decode_in_place(
    q: Tensor,
    cache: LayerKVCache,
    decodes: Decodes,
    options: AttentionOptions,
    attention_mass: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of the decodes: q float32 [num_tokens, num_q_heads, head_dim], result in out, alike."""
    num_q_heads, head_dim = q.shape[1:]
    plan = _plan(decodes, num_q_heads)
    q = q.index_select(0, plan.seqs)
    weights = plan.scores.values()
    if cache.key.codes.dtype == torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        rows = cache.key.codes.view(-1, head_dim).t()
        flat = q.view(-1, head_dim)
        torch.sparse.sampled_addmm(plan.scores, flat, rows, beta=0.0, alpha=options.scale, out=plan.scores)
    else:
        _score_gathered(q * options.scale, cache.key, plan, decodes.key.workspace)
    if options.soft_cap is not None:
        weights.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    weights.index_fill_(0, plan.padding, float("-inf"))
    for bucket in plan.buckets:
        torch.softmax(bucket, dim=-1, out=bucket)
    if attention_mass is not None:
        _add_mass(attention_mass, plan, num_q_heads, cache.num_kv_heads)
    attended = functional.embedding_bag(
        plan.cols,
        cache.value.codes.view(-1, head_dim),
        plan.crow,
        mode="sum",
        per_sample_weights=weights.to(cache.value.codes.dtype),
        include_last_offset=True,
    )
    out.index_copy_(0, plan.seqs, attended.view(q.shape).to(out.dtype))


def _score_gathered(q: Tensor, part: PagedVectors, plan: RaggedPlan, workspace: int) -> None:
    """Fill plan.scores where no sampled product exists: keys of a few sequences at a time, in float32.

    They are at most so many elements as the workspace has, or one sequence's keys when those are more.
    """
    num_q_heads, num_kv_heads, head_dim = q.shape[1], part.codes.shape[1], part.codes.shape[3]
    group = num_q_heads // num_kv_heads
    rows = part.codes.view(-1, head_dim)
    first_seq, first_col = 0, 0
    for bucket in plan.buckets:
        length = bucket.shape[1]
        step = max(workspace // (length * num_kv_heads * head_dim), 1) * num_q_heads
        for scores in torch.split(bucket, step):
            n = scores.shape[0] // num_q_heads
            cols = plan.cols[first_col : first_col + scores.numel()].view(-1, group, length)[:, 0]
            keys = rows.index_select(0, cols.reshape(-1)).float().view(-1, length, head_dim)
            queries = q[first_seq : first_seq + n].view(-1, group, head_dim)
            torch.bmm(queries, keys.transpose(1, 2), out=scores.view(-1, group, length))
            first_seq, first_col = first_seq + n, first_col + scores.numel()


def _add_mass(attention_mass: Tensor, plan: RaggedPlan, num_q_heads: int, num_kv_heads: int) -> None:
    """Sum the weights over each group; those of padding are zero."""
    heads = torch.arange(num_kv_heads)[:, None]
    first_seq, first = 0, 0
    for bucket in plan.buckets:
        n, length = bucket.shape[0] // num_q_heads, bucket.shape[1]
        mass = bucket.view(n, num_kv_heads, -1, length).sum(2)
        where = plan.positions[first : first + n * length].view(n, 1, length)
        seqs = plan.seqs[first_seq : first_seq + n, None, None]
        attention_mass.index_put_((seqs, heads, where), mass, accumulate=True)
        first_seq, first = first_seq + n, first + n * length


def _plan(decodes: Decodes, num_q_heads: int) -> RaggedPlan:
    plan = decodes.derived.get(num_q_heads)
    if not isinstance(plan, RaggedPlan):
        plan = decodes.derived[num_q_heads] = _build(decodes, num_q_heads)
    return plan


def _build(decodes: Decodes, num_q_heads: int) -> RaggedPlan:
    key, counts = decodes.key, decodes.visible.counts
    buckets = _buckets((counts * key.block_size).tolist(), num_q_heads)
    order = np.array([seq for bucket in buckets for seq in bucket])
    listing = _list_blocks(decodes, order, np.array([counts[bucket[0]] for bucket in buckets for _ in bucket]))
    crow, cols = _csr_indices(listing, num_q_heads, key)
    padding = _pad(cols, crow, listing, num_q_heads)
    scores = torch.zeros(cols.numel())
    crow_tensor = torch.from_numpy(crow).to(cols.dtype)
    size = (crow.size - 1, key.num_blocks * key.num_kv_heads * key.block_size)
    bucket_rows = [len(bucket) * num_q_heads for bucket in buckets]
    bucket_ends = crow[np.array(bucket_rows).cumsum()].tolist()
    parts = torch.tensor_split(scores, bucket_ends[:-1])
    return RaggedPlan(
        seqs=torch.from_numpy(decodes.seqs[order]),
        crow=crow_tensor,
        cols=cols,
        scores=torch.sparse_csr_tensor(crow_tensor, cols, scores, size, check_invariants=False),
        buckets=[part.view(rows, -1) for part, rows in zip(parts, bucket_rows, strict=True)],
        padding=torch.from_numpy(padding),
        listing=listing,
    )


def _buckets(lens: list[int], num_q_heads: int) -> list[list[int]]:
    """Group the sequences into buckets of similar length, each longest first.

    torch splits rows evenly between threads, so the sequences are first dealt out to one hand per thread: each
    thread's share of the rows then holds about the same number of tokens.
    """
    order = sorted(range(len(lens)), key=lambda seq: -lens[seq])
    num_threads = torch.get_num_threads()
    buckets: list[list[int]] = []
    for hand in (order[thread::num_threads] for thread in range(num_threads)):
        longest = waste = 0
        for seq in hand:
            waste += (longest - lens[seq]) * num_q_heads
            if not longest or waste > BUCKET_WASTE:
                longest, waste = lens[seq], 0
                buckets.append([])
            buckets[-1].append(seq)
    return buckets


def _list_blocks(decodes: Decodes, order: Ints, counts: Ints) -> _Listing:
    visible, block_size = decodes.visible, decodes.key.block_size
    of_block = np.arange(order.size).repeat(counts)
    seqs = order[of_block]
    places = np.arange(of_block.size) - (counts.cumsum() - counts)[of_block]
    blocks = visible.blocks(seqs, places)  # a bucket's padding: past the end
    ids = decodes.table[decodes.seqs[seqs], np.minimum(blocks, visible.ends[seqs] - 1)]
    last_position = visible.lens[order] - 1
    last = (visible.counts[order] - 1) * block_size + last_position % block_size
    padding_seq, padding_at = _padding(visible, order, last + 1, counts * block_size, block_size)
    return _Listing(
        block_size=block_size,
        counts=counts,
        ids=ids.astype(np.int64),
        block_starts=blocks * block_size,
        last_positions=last_position[of_block],
        last=last,
        padding_seq=padding_seq,
        padding_at=padding_at,
    )


def _padding(visible: Visible, order: Ints, begin: Ints, end: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Sequence (in this order) and place of each slot in [begin, end), outside the window, or after the last sink."""
    seqs, ranges = np.arange(order.size), [(begin, end)]
    if visible.start.any():
        sink_end, first = visible.sink_end[order], visible.first[order] * block_size
        sinks = visible.sink_blocks[order] * block_size
        ranges.append((np.minimum(sink_end, sinks), sinks))
        ranges.append((sinks + np.maximum(sink_end - first, 0), sinks + visible.start[order] - first))
        begin, end = (np.concatenate(bounds) for bounds in zip(*ranges, strict=True))
        seqs = np.tile(seqs, len(ranges))
    lengths = end - begin
    places = np.arange(int(lengths.sum())) + (begin - (lengths.cumsum() - lengths)).repeat(lengths)
    return seqs.repeat(lengths), places


def _csr_indices(listing: _Listing, num_q_heads: int, key: PlanKey) -> tuple[Ints, Tensor]:
    """Row starts and columns when every (sequence, head) row takes all blocks that are listed for the sequence."""
    row_blocks = listing.counts.repeat(num_q_heads)
    first_block = np.concatenate([[0], row_blocks.cumsum()])
    num_blocks = int(first_block[-1])
    listed_at = (listing.counts.cumsum() - listing.counts).repeat(num_q_heads) - first_block[:-1]
    blocks = listing.ids[listed_at.repeat(row_blocks) + np.arange(num_blocks)]
    kv_head = np.arange(row_blocks.size) % num_q_heads // (num_q_heads // key.num_kv_heads)
    starts = (blocks * key.num_kv_heads + kv_head.repeat(row_blocks)) * key.block_size
    num_rows = key.num_blocks * key.num_kv_heads * key.block_size
    dtype = torch.int32 if max(num_rows, num_blocks * key.block_size) < 2**31 else torch.int64
    offsets = torch.arange(key.block_size, dtype=dtype)
    cols = torch.from_numpy(starts).to(dtype)[:, None] + offsets  # torch: numpy broadcasts this slowly
    return first_block * key.block_size, cols.view(-1)


def _pad(cols: Tensor, crow: Ints, listing: _Listing, num_q_heads: int) -> Ints:
    """Point padding entries at the sequence's last token, so that NaN is not read; returns where they are."""
    rows = (listing.padding_seq[:, None] * num_q_heads + np.arange(num_q_heads)).ravel()
    padding: Ints = crow[rows] + listing.padding_at.repeat(num_q_heads)
    values: NDArray[Any] = cols.numpy()
    values[padding] = values[crow[:-1] + listing.last.repeat(num_q_heads)][rows]
    return padding
