"""Decodes cut into tiles of equally many blocks, so that a ragged batch is one dense batch with little padding.

Tiles are read in pieces that fit a workspace; a sequence's tiles share one softmax (`kernels.torch_decode`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.torch_plan import Decodes, Ints, OpenBlocks, PlanKey, open_blocks_at

# A tile costs about as much as this many more tokens, so short tiles waste time and long ones waste padding.
TILE_OVERHEAD = 4
MERGE_OVERHEAD = 512  # and merging a sequence's tiles about as much as so many, once
TILE_SIZES = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Piece:
    """Tiles [first, last) of the decodes, and what is hidden among them, counted from the piece's start.

    hidden: int64, indices into [tiles, num_kv_heads, tile_tokens] of what no query sees; None if there are none.
    """

    first: int
    last: int
    hidden: Tensor | None


@dataclass
class TilePlan:
    """Tiles of all decodes of a step. What only some formats need is derived when asked for.

    seqs: int64 [n], the sequences that have keys; decode i is query row i.
    tile_seq: int64 [tiles], rising, into seqs; None if every sequence is one tile.
    block_rows: int64 [tiles, num_kv_heads, tile_blocks] of a cache viewed as [num_blocks * num_kv_heads, ...].
    block_starts: int64 [tiles, tile_blocks], position of each block's first slot.
    hidden: bool [tiles, tile_tokens], True where no query sees the slot; None if there are none.
    scratch: buffers that every layer overwrites, by use and dtype.
    """

    seqs: Tensor
    tile_seq: Tensor | None
    block_rows: Tensor
    block_starts: Tensor
    hidden: Tensor | None
    open_blocks: OpenBlocks | None
    block_size: int
    piece_tiles: int
    scratch: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    _entries: dict[int, Tensor] = field(default_factory=dict)
    _open_rows: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def tile_queries(self) -> Tensor:
        """int64 [tiles], the query row, and sequence, of each."""
        return self.seqs if self.tile_seq is None else self.seqs[self.tile_seq]

    @property
    def num_tiles(self) -> int:
        return self.block_rows.shape[0]

    @property
    def tile_tokens(self) -> int:
        return self.block_rows.shape[2] * self.block_size

    def hidden_entries(self, num_heads: int) -> Tensor | None:
        """Indices int64 into [tiles, num_heads, tile_tokens] of what is hidden: fewer than a mask has; by tile."""
        if self.hidden is not None and num_heads not in self._entries:
            tiles, offsets = self._hidden_at
            starts = (tiles * (num_heads * self.tile_tokens) + offsets)[:, None]
            flat = (starts + np.arange(num_heads) * self.tile_tokens).ravel()
            self._entries[num_heads] = torch.from_numpy(flat)
        return self._entries.get(num_heads)

    @cached_property
    def _hidden_at(self) -> tuple[Ints, Ints]:
        """Tile and offset of each hidden slot."""
        assert self.hidden is not None
        flat = np.flatnonzero(self.hidden.numpy())
        return flat // self.tile_tokens, flat % self.tile_tokens

    @cached_property
    def open_tiles(self) -> Tensor:
        """int64 [open blocks], into [tiles * num_kv_heads]: where each belongs."""
        assert self.open_blocks is not None
        return self.open_blocks.target // self.block_rows.shape[2]

    def open_rows(self, group: int) -> Tensor:
        """int64 [open blocks * group], into [tiles * num_kv_heads * group * tile_blocks]: their scores and weights."""
        if group not in self._open_rows:
            assert self.open_blocks is not None
            tile_blocks = self.block_rows.shape[2]
            first = self.open_tiles * (group * tile_blocks) + self.open_blocks.target % tile_blocks
            self._open_rows[group] = (first[:, None] + torch.arange(group) * tile_blocks).flatten()
        return self._open_rows[group]

    @cached_property
    def open_empty(self) -> Tensor:
        """int64, into [open blocks * block_size]: slots that no query sees."""
        assert self.open_blocks is not None
        if self.hidden is None:
            return self.open_blocks.target[:0]
        num_kv_heads, tile_blocks = self.block_rows.shape[1:]
        block = self.open_tiles // num_kv_heads * tile_blocks + self.open_blocks.target % tile_blocks
        return torch.from_numpy(np.flatnonzero(self.hidden.view(-1, self.block_size)[block].numpy()))

    @cached_property
    def positions(self) -> Tensor:
        """int64 [tiles, tile_tokens]; that of some visible key where hidden."""
        positions = (self.block_starts[:, :, None] + torch.arange(self.block_size)).view(self.num_tiles, -1)
        if self.hidden is None:
            return positions
        seen = torch.from_numpy(self.hidden.numpy().argmin(1))
        return torch.where(self.hidden, positions.gather(1, seen[:, None]), positions)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The tiles, cut so that keys or values of a piece fit the workspace."""
        num_kv_heads = self.block_rows.shape[1]
        hidden = self.hidden_entries(num_kv_heads)
        pieces = []
        for first in range(0, self.num_tiles, self.piece_tiles):
            last = min(first + self.piece_tiles, self.num_tiles)
            inside = None if hidden is None else _between(hidden, first, last, num_kv_heads * self.tile_tokens)
            pieces.append(Piece(first, last, inside))
        return pieces


def _between(indices: Tensor, first: int, last: int, per_tile: int) -> Tensor:
    """Those of indices, sorted by tile, that lie in tiles [first, last), counted from there."""
    begin, end = torch.searchsorted(indices, torch.tensor([first * per_tile, last * per_tile])).tolist()
    return indices[begin:end] - first * per_tile


def tile_plan(decodes: Decodes) -> TilePlan:
    """The tiles of these decodes, cut at the first layer that asks."""
    plan = decodes.derived.get("tiles")
    if not isinstance(plan, TilePlan):
        plan = decodes.derived["tiles"] = _cut(decodes)
    return plan


def _cut(decodes: Decodes) -> TilePlan:
    visible, key = decodes.visible, decodes.key
    tile_blocks = _tile_blocks(visible.counts, key)
    tiles = -(-visible.counts // tile_blocks)
    of_tile = np.arange(tiles.size).repeat(tiles)
    nth = np.arange(of_tile.size) - (tiles.cumsum() - tiles).repeat(tiles)
    places = nth[:, None] * tile_blocks + np.arange(tile_blocks)  # [tiles, tile_blocks], into the visible blocks
    at = of_tile[:, None]
    blocks = visible.blocks(at, places)
    exists = places < visible.counts[at]
    ids = np.where(exists, decodes.table[decodes.seqs[at], np.where(exists, blocks, 0)], 0).astype(np.int64)
    block_rows = ids[:, None, :] * key.num_kv_heads + np.arange(key.num_kv_heads)[:, None]
    block_starts = blocks * key.block_size
    hidden = visible.hides(at[:, :, None], block_starts[:, :, None] + np.arange(key.block_size))
    opened = None
    if decodes.open_rows is not None:
        is_open = exists & (blocks == visible.lens[at] // key.block_size)
        opened = open_blocks_at(is_open, decodes.open_rows[decodes.seqs[of_tile]], key.num_kv_heads)
    return TilePlan(
        seqs=torch.from_numpy(decodes.seqs),
        tile_seq=torch.from_numpy(of_tile) if of_tile.size > tiles.size else None,
        block_rows=torch.from_numpy(block_rows),
        block_starts=torch.from_numpy(block_starts),
        hidden=torch.from_numpy(hidden.reshape(of_tile.size, -1)) if hidden.any() else None,
        open_blocks=opened,
        block_size=key.block_size,
        piece_tiles=max(key.workspace // (tile_blocks * key.block_elements), 1),
    )


def _tile_blocks(counts: Ints, key: PlanKey) -> int:
    """Blocks of a tile: what costs least, padding and overhead of all tiles taken together.

    One tile a sequence is among the choices if it fits the workspace, and spares the merging.
    """
    most = int(counts.max())
    sizes = {min(max(size // key.block_size, 1), most) for size in TILE_SIZES} | {most}
    fitting = np.array(sorted((n for n in sizes if n * key.block_elements <= key.workspace), reverse=True) or [1])
    num_tiles = (-(-counts[:, None] // fitting)).sum(0)
    cost = num_tiles * (fitting * key.block_size + TILE_OVERHEAD) + np.where(fitting < most, MERGE_OVERHEAD, 0)
    return int(fitting[cost.argmin()])
