"""What the torch backend derives from one step's attention metadata, built once and shared by all layers.

Decodes: each sequence's visible blocks (sinks and window, or all) are cut into tiles of equally many blocks, so that a
ragged batch becomes one dense batch of tiles with little padding, and blocks no query sees are not read. Tiles are read
in pieces that fit a workspace. Prefill chunks: the visible blocks of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.checks import check_indices

# A tile costs about as much as this many more tokens, so short tiles waste time and long ones waste padding.
TILE_OVERHEAD = 16
MERGE_OVERHEAD = 512  # and merging a sequence's tiles about as much as so many, once
TILE_SIZES = (32, 64, 128, 256, 512)

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


@dataclass(frozen=True)
class OpenBlocks:
    """Where open blocks belong among gathered ones: gathered[target[i]] is row source[i] of the open blocks.

    source: into open blocks viewed as [num_open_rows * num_kv_heads, ...].
    """

    target: Tensor
    source: Tensor


@dataclass(frozen=True)
class Piece:
    """Tiles [first, last) of the decodes. hidden: token rows of the piece, as gathered, that no query sees, if any."""

    first: int
    last: int
    hidden: Tensor | None
    open_blocks: OpenBlocks | None


@dataclass(frozen=True)
class DecodePlan:
    """Tiles of all decodes of a step.

    seqs: int64 [n], the sequences that have keys (decode i is query row i); None if all have.
    tile_seq: int64 [tiles], rising, into seqs; None if every sequence is one tile.
    block_rows: int64 [tiles, num_kv_heads, tile_blocks] of a cache viewed as [num_blocks * num_kv_heads, ...].
    hidden: bool [tiles, tile_tokens], or None if nothing is. positions: int64 [tiles, tile_tokens]; a visible one
        where hidden.
    scratch: buffers that every layer overwrites, by use and dtype. matrices: what `kernels.torch_csr` derives.
    """

    num_seqs: int
    seqs: Tensor | None
    tile_seq: Tensor | None
    block_rows: Tensor
    hidden: Tensor | None
    positions: Tensor
    open_blocks: OpenBlocks | None
    pieces: list[Piece]
    scratch: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    matrices: dict[int, object] = field(default_factory=dict)


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
    decode: DecodePlan | None
    chunks: list[Chunk]


def check_once(metadata: AttentionMetadata, block_size: int, num_blocks: int, num_tokens: int, open_rows: int) -> None:
    """ValueError when the metadata contradicts itself or names what is not there; looked at once a step."""
    key = ("torch checked", block_size, num_blocks, num_tokens, open_rows)
    if key in metadata.plans:
        return
    check_indices(metadata, block_size, num_blocks, num_tokens)
    rows = metadata.open_rows
    if open_rows and rows is not None and rows.numel() and int(rows.max()) >= open_rows:
        raise ValueError(f"open_rows names a row outside the {open_rows} rows of open blocks.")
    metadata.plans[key] = True


def plan_for(metadata: AttentionMetadata, key: PlanKey) -> Plan:
    """The plan of this step, built at the first layer that asks. ValueError when the metadata is wrong."""
    plan = metadata.plans.get(("torch", key))
    if not isinstance(plan, Plan):
        check_once(metadata, key.block_size, key.num_blocks, key.num_tokens, key.open_rows)
        plan = Plan(_plan_decodes(metadata, key), _plan_chunks(metadata, key))
        metadata.plans["torch", key] = plan
    return plan


@dataclass(frozen=True)
class _Visible:
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


def _visible(lens: Ints, first_query: Ints, key: PlanKey) -> _Visible:
    """What queries from position first_query on see of sequences of these lengths."""
    start = np.zeros_like(lens)
    if key.sliding_window is not None:
        start = np.maximum(first_query - key.sliding_window + 1, 0)
    first = start // key.block_size
    sink_end = np.minimum(key.sink_tokens, start)
    sink_blocks = np.minimum(-(-sink_end // key.block_size), first)
    return _Visible(lens, start, sink_end, sink_blocks, first, -(-lens // key.block_size))


def _plan_decodes(metadata: AttentionMetadata, key: PlanKey) -> DecodePlan | None:
    lens = metadata.seq_lens[: metadata.num_decodes].numpy().astype(np.int64)
    seqs = np.flatnonzero(lens)
    if not seqs.size:
        return None
    visible = _visible(lens[seqs], lens[seqs] - 1, key)
    tile_blocks = _tile_blocks(visible.counts, key)
    tiles = -(-visible.counts // tile_blocks)
    of_tile = np.repeat(np.arange(seqs.size), tiles)
    nth = np.arange(of_tile.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    listed = nth[:, None] * tile_blocks + np.arange(tile_blocks)  # [tiles, tile_blocks], place in the list of blocks
    sinks = visible.sink_blocks[of_tile, None]
    blocks = np.where(listed < sinks, listed, listed - sinks + visible.first[of_tile, None])
    exists = listed < visible.counts[of_tile, None]
    table = metadata.block_table.numpy()
    ids = np.where(exists, table[seqs[of_tile, None], np.where(exists, blocks, 0)], 0).astype(np.int64)
    block_rows = ids[:, None, :] * key.num_kv_heads + np.arange(key.num_kv_heads)[:, None]
    positions = (blocks[:, :, None] * key.block_size + np.arange(key.block_size)).reshape(of_tile.size, -1)
    seen = positions < visible.lens[of_tile, None]
    if key.sliding_window is not None:
        start, sink_end = (a[of_tile, None] for a in (visible.start, visible.sink_end))
        seen &= (positions >= start) | (positions < sink_end)
    open_blocks = None
    if key.open_rows:
        is_open = exists & (blocks == visible.lens[of_tile, None] // key.block_size)
        open_blocks = _open_blocks(metadata, is_open, seqs[of_tile], key.num_kv_heads)
    return DecodePlan(
        num_seqs=seqs.size,
        seqs=None if seqs.size == lens.size else torch.from_numpy(seqs),
        tile_seq=torch.from_numpy(of_tile) if of_tile.size > seqs.size else None,
        block_rows=torch.from_numpy(block_rows),
        hidden=None if seen.all() else torch.from_numpy(~seen),
        positions=torch.from_numpy(np.where(seen, positions, visible.lens[of_tile, None] - 1)),
        open_blocks=open_blocks,
        pieces=_pieces(~seen, open_blocks, tile_blocks, key),
    )


def _tile_blocks(counts: Ints, key: PlanKey) -> int:
    """Blocks of a tile: what costs least, padding and overhead of all tiles taken together.

    One tile a sequence is among the choices if it fits the workspace, and spares the merging.
    """
    most = int(counts.max())
    per_block = key.block_size * key.num_kv_heads * key.head_dim
    sizes = {min(max(size // key.block_size, 1), most) for size in TILE_SIZES} | {most}
    sizes = {n for n in sizes if n * per_block <= key.workspace} or {1}

    def cost(n: int) -> int:
        tokens = int((-(-counts // n)).sum()) * (n * key.block_size + TILE_OVERHEAD)
        return tokens + (MERGE_OVERHEAD if n < most else 0)

    return min(sorted(sizes, reverse=True), key=cost)


def _open_blocks(metadata: AttentionMetadata, is_open: NDArray[Any], seqs: Ints, num_kv_heads: int) -> OpenBlocks:
    """is_open: [tiles, tile_blocks]; seqs: the sequence of each tile."""
    assert metadata.open_rows is not None
    tiles, places = np.nonzero(is_open)
    heads = np.arange(num_kv_heads)
    target = (tiles[:, None] * num_kv_heads + heads) * is_open.shape[1] + places[:, None]
    source = metadata.open_rows.numpy().astype(np.int64)[seqs[tiles], None] * num_kv_heads + heads
    return OpenBlocks(torch.from_numpy(target.ravel()), torch.from_numpy(source.ravel()))


def _pieces(hidden: NDArray[Any], open_blocks: OpenBlocks | None, tile_blocks: int, key: PlanKey) -> list[Piece]:
    """Cut the tiles into pieces of at most key.workspace elements, or one tile where that is more."""
    num_tiles, tokens = hidden.shape
    step = max(key.workspace // (key.num_kv_heads * tokens * key.head_dim), 1)
    heads = np.arange(key.num_kv_heads)
    pieces = []
    for first in range(0, num_tiles, step):
        last = min(first + step, num_tiles)
        tiles, offsets = np.nonzero(hidden[first:last])
        rows = (tiles[:, None] * key.num_kv_heads + heads) * tokens + offsets[:, None]
        inside = None
        if open_blocks is not None:
            per_tile = key.num_kv_heads * tile_blocks
            bounds = torch.tensor([first * per_tile, last * per_tile])
            a, b = torch.searchsorted(open_blocks.target, bounds).tolist()
            inside = OpenBlocks(open_blocks.target[a:b] - first * per_tile, open_blocks.source[a:b])
        pieces.append(Piece(first, last, torch.from_numpy(rows.ravel()) if rows.size else None, inside))
    return pieces


def _plan_chunks(metadata: AttentionMetadata, key: PlanKey) -> list[Chunk]:
    table, heads = metadata.block_table.numpy(), np.arange(key.num_kv_heads)
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.numpy().astype(np.int64)
    chunks = []
    for seq in range(metadata.num_decodes, metadata.num_seqs):
        seq_len = int(lens[seq])
        query_len = min(starts[seq + 1] - starts[seq], seq_len)  # earlier queries stand before the first key
        if not query_len:
            continue
        visible = _visible(lens[seq : seq + 1], lens[seq : seq + 1] - query_len, key)
        first, end, sink_blocks = int(visible.first[0]), int(visible.ends[0]), int(visible.sink_blocks[0])
        blocks = np.concatenate([np.arange(sink_blocks), np.arange(first, end)])
        open_blocks = None
        if key.open_rows and seq_len % key.block_size:
            is_open = blocks == seq_len // key.block_size
            open_blocks = _open_blocks(metadata, is_open[None], np.array([seq]), key.num_kv_heads)
        chunks.append(
            Chunk(
                seq=seq,
                start=starts[seq + 1] - query_len,
                end=starts[seq + 1],
                seq_len=seq_len,
                num_sinks=sink_blocks * key.block_size,
                window_start=first * key.block_size,
                block_rows=torch.from_numpy(table[seq, blocks].astype(np.int64) * key.num_kv_heads + heads[:, None]),
                open_blocks=open_blocks,
            )
        )
    return chunks
