"""How an engine lays a stage's KV out in blocks: which layers share a block table, what a block costs, what a request
needs.

A layer's page is one block of it on one rank. Layers that keep the same of every token share a table; where several
tables share one pool (vLLM's hybrid cache), all pages are padded to one size and the tables to one number of layers,
so that any block serves any table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from engine.errors import ConfigError
from engine.memory.shape import LayerGroup
from engine.memory.slots import head_block_bytes, latent_block_bytes

GROWING = ("full", "latent")  # what keeps all tokens
SMALLEST_BLOCK = 16  # tokens of the smallest block that attention kernels take
_PAD_INSTEAD = 1.5  # vLLM: kinds of nearly as many layers are padded to the larger number, others split by the smaller


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal pages. kv_format: canonical, of these layers."""

    group: LayerGroup
    kv_format: str

    @property
    def count(self) -> int:
        return self.group.count

    @property
    def key(self) -> tuple[LayerGroup, str]:
        """Equal for layers whose pages and tables are equal."""
        return replace(self.group, count=1), self.kv_format


def merged(kinds: Iterable[LayerKind]) -> list[LayerKind]:
    """Equal kinds as one, in the order in which they first appear: a draft's layers may be those of its target."""
    counts: dict[tuple[LayerGroup, str], int] = {}
    for kind in kinds:
        counts[kind.key] = counts.get(kind.key, 0) + kind.count
    return [LayerKind(replace(group, count=count), kv) for (group, kv), count in counts.items()]


@dataclass(frozen=True)
class Rank:
    """What of the parallel layout decides a page: tensor-parallel size, decode context parallel size."""

    tp: int = 1
    dcp: int = 1


@dataclass(frozen=True)
class Table:
    """`copies` block tables of a pool. block_size: tokens of one block in this table, over all dcp ranks."""

    attention: str
    copies: int
    block_size: int
    window: int | None = None
    in_flight: int = 0  # tokens scheduled beyond the window before its oldest blocks are freed
    state_blocks: int = 1  # blocks of a recurrent layer's state

    def blocks_for(self, tokens: int) -> int:
        """Blocks that one request of `tokens` holds at most in these tables."""
        if self.attention == "recurrent":
            return self.copies * self.state_blocks
        needed = tokens
        if self.window is not None:
            kept = self.window - (1 if self.attention == "sliding" else 0)
            needed = min(kept + self.in_flight, tokens)
        blocks = -(-needed // self.block_size)
        if self.window is not None and self.attention == "sliding":
            blocks += 1  # a window need not begin where a block does
        return self.copies * blocks


@dataclass(frozen=True)
class Layout:
    """One stage's pool. bytes_per_block: of one block id, in all layers that it serves; padding included."""

    tables: tuple[Table, ...]
    bytes_per_block: int
    state_bytes: int = 0  # a request's recurrent state outside the pool

    def blocks_for(self, tokens: int) -> int:
        """Blocks that one request of `tokens` needs."""
        return sum(table.blocks_for(tokens) for table in self.tables)

    @property
    def num_tables(self) -> int:
        return sum(table.copies for table in self.tables)

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block."""
        return min((t.block_size for t in self.tables if t.attention != "recurrent"), default=1)

    @property
    def bytes_per_token(self) -> int | None:
        """What one more token of a long context costs, rounded up; None where nothing grows."""
        growing = [table for table in self.tables if table.window is None and table.attention != "recurrent"]
        if not growing:
            return None
        return ceil(sum(self.bytes_per_block * table.copies / table.block_size for table in growing))

    def fixed_bytes(self, tokens: int) -> int:
        """What a request of `tokens` holds besides its growing part: windows and states."""
        fixed = [table for table in self.tables if table.window is not None or table.attention == "recurrent"]
        return self.bytes_per_block * sum(table.blocks_for(tokens) for table in fixed) + self.state_bytes


def page_bytes(kind: LayerKind, block_size: int, rank: Rank) -> int:
    """Bytes of one block of one layer on one rank.

    KV heads are divided by tensor parallelism until each rank has one, then kept by several ranks; latents are kept by
    every rank, whole. Recurrent state is divided; "none" keeps nothing.
    """
    group = kind.group
    if group.attention == "none":
        return 0
    if group.attention == "recurrent":
        return -(-group.state_bytes // rank.tp)
    index = group.index_width * block_size
    if group.attention == "latent" or group.latent_width:
        return latent_block_bytes(kind.kv_format, group.latent_width, block_size) + index
    heads = heads_per_rank(group.num_kv_heads, rank.tp)
    values = group.head_dim if group.v_head_dim is None else group.v_head_dim
    return heads * head_block_bytes(kind.kv_format, group.head_dim, values, block_size) + index


def heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """KV heads one rank keeps. Raises `ConfigError` where they cannot be shared out evenly."""
    if num_kv_heads < 1:
        raise ConfigError("a layer with attention needs at least one KV head: state --kv-heads")
    larger, smaller = max(num_kv_heads, tp), min(num_kv_heads, tp)
    if larger % smaller:
        raise ConfigError(
            f"--tensor-parallel-size {tp} does not go with {num_kv_heads} KV heads: one must divide the other; "
            f"use one of {', '.join(str(n) for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0)}"
        )
    return max(1, num_kv_heads // tp)


def single_table(kinds: list[LayerKind], block_size: int, rank: Rank) -> Layout:
    """Every layer billed for every token: one table. Recurrent state stays outside the pool."""
    paged = [kind for kind in kinds if kind.group.attention not in ("recurrent", "none")]
    state = sum(kind.count * page_bytes(kind, 1, rank) for kind in kinds if kind.group.attention == "recurrent")
    per_block = sum(kind.count * page_bytes(kind, block_size, rank) for kind in paged)
    tables = (Table("full", 1, block_size * rank.dcp),) if paged else ()
    return Layout(tables, per_block, state)


def two_pools(kinds: list[LayerKind], block_size: int, rank: Rank, window_share: float) -> Layout:
    """SGLang: windowed layers have a pool of their own, `window_share` as many tokens as the full one."""
    full = [kind for kind in kinds if kind.group.attention in GROWING]
    windowed = [kind for kind in kinds if kind.group.attention in ("sliding", "chunked")]
    if not full or not windowed:
        return single_table(kinds, block_size, rank)
    layout = single_table([kind for kind in kinds if kind not in windowed], block_size, rank)
    extra = sum(kind.count * page_bytes(kind, block_size, rank) for kind in windowed)
    return replace(layout, bytes_per_block=layout.bytes_per_block + ceil(extra * window_share))


def shared_pool(
    kinds: list[LayerKind],
    held: list[LayerKind],
    block_size: int,
    rank: Rank,
    *,
    in_flight: int,
    state_blocks: int,
    window_page: int = 0,
) -> Layout:
    """vLLM's hybrid cache. kinds: of the whole model, which decide the tables. held: of the stage, which decide what a
    block takes there. in_flight: tokens of the batches in progress. state_blocks: blocks of a recurrent state.

    The block size grows until an attention page holds a recurrent layer's state. window_page: bytes that a sliding
    layer's page is padded to; it then takes as many tokens as fit, in blocks that kernels take.
    """
    kinds, held = (merged(kind for kind in layers if kind.group.attention != "none") for layers in (kinds, held))
    attention = [kind for kind in kinds if kind.group.attention != "recurrent"]
    if len({_memory_of(kind) for kind in kinds}) < 2 or not attention:
        layout = single_table(held, block_size, rank)
        return _windowed(layout, kinds, in_flight) if attention else _states_only(held, rank, state_blocks)
    block_size = _block_size_for_states(kinds, attention, block_size, rank)
    padded = {kind for kind in attention if window_page and kind.group.attention == "sliding"}
    page = max(window_page if kind in padded else page_bytes(kind, block_size, rank) for kind in attention)
    table_layers = _layers_per_table([kind.count for kind in kinds])
    on_stage = {kind.key: kind.count for kind in held}
    tables, deepest = [], 0
    for kind in kinds:
        copies = -(-kind.count // table_layers)
        deepest = max(deepest, -(-on_stage.get(kind.key, 0) // copies))
        own = page_bytes(kind, block_size, rank)
        stretch = page // own if kind.group.attention != "recurrent" and page % own == 0 else 1
        tokens = block_size * stretch
        if kind in padded:
            tokens = SMALLEST_BLOCK * max(1, window_page // page_bytes(kind, SMALLEST_BLOCK, rank))
        sharded = rank.dcp if kind.group.attention in GROWING else 1
        tables.append(
            Table(
                kind.group.attention,
                copies,
                tokens * sharded,
                kind.group.window,
                in_flight,
                state_blocks,
            )
        )
    return Layout(tuple(tables), deepest * page)


def _memory_of(kind: LayerKind) -> tuple[str, int | None]:
    """Layers with equal values can share a table: all that keep every token, whatever their pages."""
    attention = kind.group.attention
    return ("full", None) if attention in GROWING else (attention, kind.group.window)


def _windowed(layout: Layout, kinds: list[LayerKind], in_flight: int) -> Layout:
    group = kinds[0].group
    if group.attention in GROWING:
        return layout
    tables = tuple(
        replace(table, attention=group.attention, window=group.window, in_flight=in_flight) for table in layout.tables
    )
    return replace(layout, tables=tables)


def _states_only(kinds: list[LayerKind], rank: Rank, state_blocks: int) -> Layout:
    """A model without attention: a block is one request's state in all layers."""
    state = sum(kind.count * page_bytes(kind, 1, rank) for kind in kinds)
    return Layout((Table("recurrent", 1, 1, state_blocks=state_blocks),), state) if state else Layout((), 0)


def _block_size_for_states(kinds: list[LayerKind], attention: list[LayerKind], block_size: int, rank: Rank) -> int:
    """The smallest multiple of the block size whose attention page holds one recurrent layer's state."""
    states = [page_bytes(kind, 1, rank) for kind in kinds if kind.group.attention == "recurrent"]
    if not states:
        return block_size
    latent = any(kind.group.attention == "latent" for kind in attention)
    step = max(block_size, 128) if latent else block_size
    per_step = max(page_bytes(kind, step, rank) for kind in attention)
    return max(block_size, step * -(-max(states) // per_step))


def block_size_for_exact(kinds: list[LayerKind], exact: str, block_size: int, rank: Rank) -> int:
    """vLLM, where layers may keep the model's format `exact` beside a smaller one: the smallest multiple of the block
    size at which a page of the smaller one holds the smallest block in `exact`."""
    packed = [k for k in kinds if k.group.attention not in ("recurrent", "none") and k.kv_format != exact]
    if not packed:
        return block_size
    needed = max(page_bytes(replace(kind, kv_format=exact), SMALLEST_BLOCK, rank) for kind in packed)
    step = max(SMALLEST_BLOCK, block_size)
    return max(block_size, step * -(-needed // min(page_bytes(kind, step, rank) for kind in packed)))


def _layers_per_table(counts: list[int]) -> int:
    return max(counts) if max(counts) < _PAD_INSTEAD * min(counts) else min(counts)
