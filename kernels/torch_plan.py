"""What the torch backend derives from one step's attention metadata, built once and shared by all layers.

Decodes become one ragged score matrix in CSR form: row (sequence, query head), one entry per visible token, the
column being that token's row in the cache viewed as [num_blocks * num_kv_heads * block_size, head_dim]. The same
indices drive scores and values, so nothing is gathered or padded to a dense batch.
Rows of similar length form buckets padded to one length, so that one softmax call serves a bucket; a padding entry
points at the sequence's first token and its score is set to -inf. Memory: 8 bytes (4 index, 4 score; 12 when the
cache has 2**31 rows or more) per query head and visible token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import AttentionMetadata

# A bucket may waste this many score entries on padding: about what one more softmax call costs on a CPU.
BUCKET_WASTE = 512

Ints = NDArray[np.int64] | NDArray[np.int32]


@dataclass(frozen=True)
class CacheShape:
    """The part of the caches' and query's shape that indices depend on."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    group: int

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self.num_kv_heads * self.block_size


@dataclass(frozen=True)
class DecodePlan:
    """Indices of all decodes of a step.

    tokens: int64 [n], the query rows in plan order. crow [n * num_q_heads + 1] and cols [nnz]: the CSR indices.
    scores: the CSR matrix [n * num_q_heads, num_rows]; its values are scratch that every layer overwrites.
    buckets: views of those values, [sequences * num_q_heads, bucket length]. padding: positions in the values.
    """

    tokens: Tensor
    crow: Tensor
    cols: Tensor
    scores: Tensor
    buckets: list[Tensor]
    padding: Tensor


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk: query rows [start, end) whose last position is seq_len - 1, and where its context lies.

    rows: int64 [num_kv_heads * blocks], rows of the cache viewed as [num_blocks * num_kv_heads, block_size * head_dim],
    KV head by KV head.
    """

    start: int
    end: int
    seq_len: int
    rows: Tensor


@dataclass(frozen=True)
class Plan:
    decode: DecodePlan | None
    chunks: list[Chunk]


def build_plan(metadata: AttentionMetadata, shape: CacheShape, num_tokens: int, dtype: torch.dtype) -> Plan:
    """Derive the indices. dtype: of the scores. Raises ValueError when the metadata contradicts itself."""
    starts = metadata.query_start_loc.tolist()
    lens = metadata.seq_lens.tolist()
    _check_values(metadata, starts, lens, num_tokens)
    table = metadata.block_table.numpy().astype(np.int64)
    num_decodes = metadata.num_decodes
    chunks = []
    for seq in range(num_decodes, len(lens)):
        visible = min(starts[seq + 1] - starts[seq], lens[seq])  # earlier queries stand before the first key
        if visible:
            rows = _block_rows(table[seq, : -(-lens[seq] // shape.block_size)], shape)
            chunks.append(Chunk(starts[seq + 1] - visible, starts[seq + 1], lens[seq], rows))
    return Plan(_plan_decodes(table[:num_decodes], lens[:num_decodes], shape, dtype), chunks)


def _check_values(metadata: AttentionMetadata, starts: list[int], lens: list[int], num_tokens: int) -> None:
    query_lens = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or min(query_lens, default=0) < 0 or starts[-1] > num_tokens:
        raise ValueError(f"query_start_loc must rise from 0 to at most num_tokens = {num_tokens}, got {starts}.")
    if any(length != 1 for length in query_lens[: metadata.num_decodes]):
        raise ValueError(f"The first num_decodes = {metadata.num_decodes} sequences must have one query token each.")
    if min(lens, default=0) < 0 or max(lens, default=0) > metadata.max_seq_len:
        raise ValueError(f"seq_lens must lie between 0 and max_seq_len = {metadata.max_seq_len}.")


def _plan_decodes(table: Ints, lens: list[int], shape: CacheShape, dtype: torch.dtype) -> DecodePlan | None:
    order = sorted((seq for seq, length in enumerate(lens) if length), key=lambda seq: -lens[seq])
    if not order:
        return None
    num_q_heads = shape.num_kv_heads * shape.group
    buckets = _buckets(order, lens, num_q_heads)
    row_lens = np.concatenate([np.full(len(seqs) * num_q_heads, lens[seqs[0]]) for seqs in buckets])
    crow = np.concatenate([[0], np.cumsum(row_lens)])
    index_dtype = np.int32 if max(shape.num_rows, int(crow[-1])) < 2**31 else np.int64
    cols: Ints = np.empty(int(crow[-1]), dtype=index_dtype)
    values = torch.zeros(cols.size, dtype=dtype)
    views, padding, start = [], [np.empty(0, dtype=np.int64)], 0
    for seqs in buckets:
        end = start + len(seqs) * num_q_heads * lens[seqs[0]]
        padding += _fill_bucket(cols[start:end], table[seqs], [lens[seq] for seq in seqs], shape, start)
        views.append(values[start:end].view(-1, lens[seqs[0]]))
        start = end
    if cols.min() < 0 or cols.max() >= shape.num_rows:
        raise ValueError(f"block_table names a block outside the pool of {shape.num_blocks} blocks.")
    crow_tensor, cols_tensor = torch.from_numpy(crow.astype(index_dtype)), torch.from_numpy(cols)
    size = (row_lens.size, shape.num_rows)
    return DecodePlan(
        tokens=torch.tensor([seq for seqs in buckets for seq in seqs]),
        crow=crow_tensor,
        cols=cols_tensor,
        scores=torch.sparse_csr_tensor(crow_tensor, cols_tensor, values, size, check_invariants=False),
        buckets=views,
        padding=torch.from_numpy(np.concatenate(padding)),
    )


def _buckets(order: list[int], lens: list[int], num_q_heads: int) -> list[list[int]]:
    """Group sequences, longest first, into buckets of similar length.

    torch splits rows evenly between threads, so the sequences are first dealt out to one hand per thread: each
    thread's share of the rows then holds about the same number of tokens.
    """
    hands = [order[thread :: torch.get_num_threads()] for thread in range(torch.get_num_threads())]
    buckets: list[list[int]] = []
    for hand in hands:
        waste = BUCKET_WASTE + 1
        for seq in hand:
            waste += (lens[buckets[-1][0]] - lens[seq]) * num_q_heads if waste <= BUCKET_WASTE else 0
            if waste > BUCKET_WASTE:
                buckets.append([])
                waste = 0
            buckets[-1].append(seq)
    return buckets


def _fill_bucket(cols: Ints, table: Ints, lens: list[int], shape: CacheShape, start: int) -> list[Ints]:
    """Write the cache rows of one bucket to cols; return the positions of its padding, counted from `start`."""
    block_size, num_q_heads, longest = shape.block_size, shape.num_kv_heads * shape.group, lens[0]
    blocks = table[:, : -(-longest // block_size), None] * (shape.num_kv_heads * block_size)
    rows = (blocks + np.arange(block_size)).reshape(len(lens), -1)[:, :longest]
    padding = []
    for i, length in enumerate(lens):
        if length < longest:
            rows[i, length:] = rows[i, 0]
            heads = start + (i * num_q_heads + np.arange(num_q_heads)) * longest
            padding.append((heads[:, None] + np.arange(length, longest)).ravel())
    head_offsets = np.arange(shape.num_kv_heads)[:, None, None] * block_size
    view = cols.reshape(len(lens), shape.num_kv_heads, shape.group, longest)
    np.add(rows[:, None, None, :], head_offsets, out=view, casting="same_kind")
    return padding


def _block_rows(blocks: Ints, shape: CacheShape) -> Tensor:
    if blocks.min() < 0 or blocks.max() >= shape.num_blocks:
        raise ValueError(f"block_table names a block outside the pool of {shape.num_blocks} blocks.")
    return torch.from_numpy((blocks * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]).ravel())
