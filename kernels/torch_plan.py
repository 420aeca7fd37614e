"""What the torch backend derives from one step's attention metadata, built once and shared by all layers.

Decodes become one ragged score matrix in CSR form: row (sequence, query head), one entry per visible token, the
column being that token's row in the cache viewed as [num_blocks * num_kv_heads * block_size, head_dim]. The same
indices drive scores and values, so nothing is gathered or padded to a dense batch.
Rows of similar length form buckets padded to one length, so that one softmax call serves a bucket. A padding entry
points at its sequence's first token, and its score is set to -inf. Memory: 8 bytes (index and score) per query
head and visible token, 12 when the cache has 2**31 rows or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import AttentionMetadata

# A bucket may waste this many score entries on padding: about what one more softmax call costs on a CPU.
BUCKET_WASTE = 512

Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class CacheShape:
    """The part of the caches' and the query's shape that indices depend on; group = query heads per KV head."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    group: int

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

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
    """One prefill chunk: query rows [start, end), the last of them at position seq_len - 1.

    rows: int64 [num_kv_heads * blocks], KV head by KV head, the context's rows of the cache viewed as
    [num_blocks * num_kv_heads, block_size * head_dim].
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
    table = metadata.block_table.numpy()
    num_decodes = metadata.num_decodes
    chunks = []
    for seq in range(num_decodes, len(lens)):
        visible = min(starts[seq + 1] - starts[seq], lens[seq])  # earlier queries stand before the first key
        if visible:
            rows = _block_rows(table[seq, : -(-lens[seq] // shape.block_size)], shape)
            chunks.append(Chunk(starts[seq + 1] - visible, starts[seq + 1], lens[seq], rows))
    return Plan(_plan_decodes(table, lens[:num_decodes], shape, dtype), chunks)


def _check_values(metadata: AttentionMetadata, starts: list[int], lens: list[int], num_tokens: int) -> None:
    query_lens = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or min(query_lens, default=0) < 0 or starts[-1] > num_tokens:
        raise ValueError(f"query_start_loc must rise from 0 to at most num_tokens = {num_tokens}, got {starts}.")
    if any(length != 1 for length in query_lens[: metadata.num_decodes]):
        raise ValueError(f"The first num_decodes = {metadata.num_decodes} sequences must have one query token each.")
    if max(query_lens, default=0) > metadata.max_query_len:
        raise ValueError(f"A sequence has {max(query_lens)} query tokens, more than max_query_len.")
    if min(lens, default=0) < 0 or max(lens, default=0) > metadata.max_seq_len:
        raise ValueError(f"seq_lens must lie between 0 and max_seq_len = {metadata.max_seq_len}.")


def _block_rows(blocks: Ints, shape: CacheShape) -> Tensor:
    _check_blocks(blocks, shape)
    rows = blocks.astype(np.int64) * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
    return torch.from_numpy(rows.ravel())


def _check_blocks(blocks: Ints, shape: CacheShape) -> None:
    if blocks.min() < 0 or blocks.max() >= shape.num_blocks:
        raise ValueError(f"block_table names a block outside the pool of {shape.num_blocks} blocks.")


def _plan_decodes(table: Ints, lens: list[int], shape: CacheShape, dtype: torch.dtype) -> DecodePlan | None:
    buckets = _buckets(lens, shape.num_q_heads)
    if not buckets:
        return None
    seqs = np.array([seq for bucket in buckets for seq in bucket])
    padded_blocks = np.array([-(-lens[bucket[0]] // shape.block_size) for bucket in buckets for _ in bucket])
    crow, cols = _csr_indices(table, seqs, padded_blocks, shape)
    padding = _pad(cols.numpy(), crow, np.array(lens)[seqs].repeat(shape.num_q_heads))
    values = torch.zeros(cols.numel(), dtype=dtype)
    crow_tensor = torch.from_numpy(crow).to(cols.dtype)
    size = (crow.size - 1, shape.num_rows)
    bucket_rows = [len(bucket) * shape.num_q_heads for bucket in buckets]
    bucket_ends = crow[np.cumsum(bucket_rows)].tolist()
    return DecodePlan(
        tokens=torch.from_numpy(seqs),
        crow=crow_tensor,
        cols=cols,
        scores=torch.sparse_csr_tensor(crow_tensor, cols, values, size, check_invariants=False),
        buckets=[
            part.view(rows, -1)
            for part, rows in zip(torch.tensor_split(values, bucket_ends[:-1]), bucket_rows, strict=True)
        ],
        padding=torch.from_numpy(padding),
    )


def _buckets(lens: list[int], num_q_heads: int) -> list[list[int]]:
    """Group the non-empty sequences into buckets of similar length, each longest first.

    torch splits rows evenly between threads, so the sequences are first dealt out to one hand per thread: each
    thread's share of the rows then holds about the same number of tokens.
    """
    order = sorted((seq for seq, length in enumerate(lens) if length), key=lambda seq: -lens[seq])
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


def _csr_indices(table: Ints, seqs: Ints, padded_blocks: Ints, shape: CacheShape) -> tuple[Ints, Tensor]:
    """Row starts and columns when every (sequence, head) row takes that many whole blocks of the table."""
    row_blocks = padded_blocks.repeat(shape.num_q_heads)
    first_block = np.concatenate([[0], row_blocks.cumsum()])
    num_entries = int(first_block[-1])
    table_offset = (seqs * table.shape[1]).repeat(shape.num_q_heads) - first_block[:-1]
    blocks = table.ravel()[table_offset.repeat(row_blocks) + np.arange(num_entries)]
    _check_blocks(blocks, shape)
    kv_head = np.arange(row_blocks.size) % shape.num_q_heads // shape.group
    block_starts = (blocks * np.int64(shape.num_kv_heads) + kv_head.repeat(row_blocks)) * shape.block_size
    dtype = torch.int32 if max(shape.num_rows, num_entries * shape.block_size) < 2**31 else torch.int64
    offsets = torch.arange(shape.block_size, dtype=dtype)
    cols = torch.from_numpy(block_starts).to(dtype)[:, None] + offsets  # torch: numpy broadcasts this slowly
    return first_block * shape.block_size, cols.view(-1)


def _pad(cols: Ints, crow: Ints, row_lens: Ints) -> Ints:
    """Point every entry past its row's length at the row's first entry; return the positions of those entries."""
    starts = crow[:-1] + row_lens
    counts = crow[1:] - starts
    offsets = np.cumsum(counts) - counts
    padding = np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))
    cols[padding] = np.repeat(cols[crow[:-1]], counts)
    return padding
