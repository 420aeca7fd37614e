"""What the torch backend derives from one step's attention metadata, built once and shared by all layers.

Here: which blocks of each sequence its queries see (sinks and window, or all), for decodes and prefill chunks, and the
checks of every index. `kernels.torch_ragged` and `kernels.torch_tiles` lay decodes out further.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.checks import check_indices

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PlanKey:
    """All that a plan depends on beside the metadata. workspace: elements of one piece of keys or values."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    num_tokens: int
    workspace: int
    sliding_window: int | None = None
    sink_tokens: int = 0
    open_rows: int = 0  # rows of open blocks, 0 where the format keeps none

    @property
    def block_elements(self) -> int:
        """Elements of the keys, or values, of one block."""
        return self.block_size * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class OpenBlocks:
    """Where open blocks belong among gathered ones: gathered[target[i]] is row source[i] of the open blocks.

    source: into open blocks viewed as [num_open_rows * num_kv_heads, ...].
    """

    target: Tensor
    source: Tensor


@dataclass(frozen=True)
class Visible:
    """Arrays [n]: keys [0, sink_end) and [start, lens) are visible, in blocks [0, sink_blocks) and [first, ends)."""

    lens: Ints
    start: Ints
    sink_end: Ints
    sink_blocks: Ints
    first: Ints
    ends: Ints

    @property
    def counts(self) -> Ints:
        return self.sink_blocks + self.ends - self.first

    def blocks(self, seqs: Ints, places: Ints) -> Ints:
        """Index into the block table of the visible block at each place; seqs: into these arrays."""
        if not self.first.any():
            return places
        sinks = self.sink_blocks[seqs]
        return np.where(places < sinks, places, places + (self.first[seqs] - sinks))

    def hides(self, seqs: Ints, positions: Ints) -> NDArray[np.bool_]:
        """Whether the slots at these positions hold no key, or one outside window and sinks."""
        hidden = positions >= self.lens[seqs]
        if self.start.any():
            hidden |= (positions < self.start[seqs]) & (positions >= self.sink_end[seqs])
        return hidden


@dataclass
class Decodes:
    """The decodes of a step that have keys. derived: how they are laid out, kept for the next layer.

    seqs: [n], their sequences; decode i is query row i. table: all of the block table. open_rows: of all sequences.
    """

    seqs: Ints
    visible: Visible
    table: NDArray[np.int32]
    open_rows: Ints | None
    key: PlanKey
    derived: dict[object, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk: query rows [start, end), the last of them at position seq_len - 1.

    block_rows: int64 [num_kv_heads, blocks], of a cache viewed as [num_blocks * num_kv_heads, ...]; they hold keys
    [0, num_sinks) and [window_start, seq_len) of the sequence, then slots without a token.
    """

    seq: int
    start: int
    end: int
    seq_len: int
    num_sinks: int
    window_start: int
    block_rows: Tensor
    open_blocks: OpenBlocks | None


@dataclass(frozen=True)
class Plan:
    decodes: Decodes | None
    chunks: list[Chunk]


def check_once(metadata: AttentionMetadata, block_size: int, num_blocks: int, num_tokens: int, open_rows: int) -> None:
    """ValueError when the metadata contradicts itself or names what is not there; looked at once a step."""
    key = ("torch checked", block_size, num_blocks, num_tokens, open_rows)
    if key in metadata.plans:
        return
    check_indices(metadata, block_size, num_blocks, num_tokens, open_rows)
    metadata.plans[key] = True


def plan_for(metadata: AttentionMetadata, key: PlanKey) -> Plan:
    """The plan of this step, built at the first layer that asks. ValueError when the metadata is wrong."""
    plan = metadata.plans.get(("torch", key))
    if not isinstance(plan, Plan):
        check_once(metadata, key.block_size, key.num_blocks, key.num_tokens, key.open_rows)
        plan = Plan(_plan_decodes(metadata, key), _plan_chunks(metadata, key))
        metadata.plans["torch", key] = plan
    return plan


def open_blocks_at(is_open: NDArray[np.bool_], open_rows: Ints, num_kv_heads: int) -> OpenBlocks:
    """is_open: [n, blocks], of gathered [n, num_kv_heads, blocks]; open_rows: [n]."""
    lists, places = np.nonzero(is_open)
    heads = np.arange(num_kv_heads)
    target = (lists[:, None] * num_kv_heads + heads) * is_open.shape[1] + places[:, None]
    source = open_rows[lists, None] * num_kv_heads + heads
    return OpenBlocks(torch.from_numpy(target.ravel()), torch.from_numpy(source.ravel()))


def _visible(lens: Ints, first_query: Ints, key: PlanKey) -> Visible:
    """What queries from position first_query on see of sequences of these lengths."""
    ends = -(-lens // key.block_size)
    if key.sliding_window is None:
        nothing = np.zeros_like(lens)
        return Visible(lens, nothing, nothing, nothing, nothing, ends)
    start = np.maximum(first_query - key.sliding_window + 1, 0)
    first = start // key.block_size
    sink_end = np.minimum(key.sink_tokens, start)
    sink_blocks = np.minimum(-(-sink_end // key.block_size), first)
    return Visible(lens, start, sink_end, sink_blocks, first, ends)


def _open_rows(metadata: AttentionMetadata, key: PlanKey) -> Ints | None:
    if not key.open_rows or metadata.open_rows is None:
        return None
    return metadata.open_rows.numpy().astype(np.int64)


def _plan_decodes(metadata: AttentionMetadata, key: PlanKey) -> Decodes | None:
    lens = metadata.seq_lens[: metadata.num_decodes].numpy().astype(np.int64)
    seqs = lens.nonzero()[0]
    if not seqs.size:
        return None
    lens = lens[seqs]
    table = metadata.block_table.numpy()
    return Decodes(seqs, _visible(lens, lens - 1, key), table, _open_rows(metadata, key), key)


def _plan_chunks(metadata: AttentionMetadata, key: PlanKey) -> list[Chunk]:
    if metadata.num_decodes == metadata.num_seqs:
        return []
    table, heads = metadata.block_table.numpy(), np.arange(key.num_kv_heads)
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.numpy().astype(np.int64)
    open_rows, chunks = _open_rows(metadata, key), []
    for seq in range(metadata.num_decodes, metadata.num_seqs):
        seq_len = int(lens[seq])
        query_len = min(starts[seq + 1] - starts[seq], seq_len)  # earlier queries stand before the first key
        if not query_len:
            continue
        visible = _visible(lens[seq : seq + 1], lens[seq : seq + 1] - query_len, key)
        first, end, sink_blocks = int(visible.first[0]), int(visible.ends[0]), int(visible.sink_blocks[0])
        blocks = np.concatenate([np.arange(sink_blocks), np.arange(first, end)])
        opened = None
        if open_rows is not None:
            is_open = blocks == seq_len // key.block_size
            opened = open_blocks_at(is_open[None], open_rows[seq : seq + 1], key.num_kv_heads)
        chunks.append(
            Chunk(
                seq=seq,
                start=starts[seq + 1] - query_len,
                end=starts[seq + 1],
                seq_len=seq_len,
                num_sinks=sink_blocks * key.block_size,
                window_start=first * key.block_size,
                block_rows=torch.from_numpy(table[seq, blocks].astype(np.int64) * key.num_kv_heads + heads[:, None]),
                open_blocks=opened,
            )
        )
    return chunks
