"""Cache writes with torch operators: every token of a step is quantized at once, then scattered to its slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.formats import VectorFormat
from kernels.kv_cache import LayerKVCache, PagedVectors
from kernels.quantize import quantize, rotate
from kernels.torch_plan import check_once


@dataclass(frozen=True)
class _Slots:
    """tokens: those with a slot, None if all. places: int64, see `_slots`."""

    tokens: Tensor | None
    places: Tensor


@dataclass(frozen=True)
class _OpenWrites:
    """What a step does to open blocks; rows of new tokens are counted in [num_tokens * num_kv_heads, head_dim].

    kept: int64, the rows of the last token that each open block's slot gets, to be written to the rows open_places of
    the open blocks. closing: int64, blocks whose last slot is written. members: int64, the rows they consist of, in the
    order [closing, num_kv_heads, block_size]; but those at early came before this step and lie in the rows early_places
    of the open blocks.
    """

    kept: Tensor
    open_places: Tensor
    closing: Tensor
    members: Tensor
    early: Tensor
    early_places: Tensor


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """See `kernels.attention.reshape_and_cache`."""
    open_rows = 0 if cache.key.open_blocks is None else cache.key.open_blocks.shape[0]
    check_once(metadata, cache.block_size, cache.num_blocks, key.shape[0], open_rows)
    if cache.kv_format.keeps_open_blocks:
        writes = _open_writes(metadata, cache.num_kv_heads, cache.block_size)
        for part, new in ((cache.key, key), (cache.value, value)):
            _write_open(part, new, writes)
        return
    tokens = _slots(metadata, cache).tokens
    if tokens is not None:
        key, value = key.index_select(0, tokens), value.index_select(0, tokens)
    if key.shape[0] == 0:
        return
    alike = cache.key.fmt == cache.value.fmt and cache.key.scale == cache.value.scale
    if alike and cache.kv_format.quantized:  # both at once: half as many operators
        codes, params = _quantize(torch.stack((key, value)), cache.key.fmt, cache.key.scale)
        _store(cache.key, codes[0], None if params is None else params[0], cache, metadata)
        _store(cache.value, codes[1], None if params is None else params[1], cache, metadata)
        return
    for part, new in ((cache.key, key), (cache.value, value)):
        _store(part, *_quantize(new, part.fmt, part.scale), cache, metadata)


def _slots(metadata: AttentionMetadata, cache: LayerKVCache, rows: int = 1) -> _Slots:
    """places: int64 [tokens * num_kv_heads * rows], into a tensor [num_blocks, num_kv_heads, rows, block_size, ...]
    with its first four dimensions taken as one.
    """
    num_kv_heads, block_size = cache.num_kv_heads, cache.block_size
    plan_key = ("torch slots", num_kv_heads, block_size, rows)
    slots = metadata.plans.get(plan_key)
    if not isinstance(slots, _Slots):
        wanted, tokens = metadata.slot_mapping.numpy(), None
        if wanted.min(initial=0) < 0:
            tokens = np.flatnonzero(wanted >= 0)
            wanted = wanted[tokens]
        blocks, offsets = wanted[:, None] // block_size, wanted[:, None] % block_size
        places = (blocks * (num_kv_heads * rows) + np.arange(num_kv_heads * rows)) * block_size + offsets
        slots = _Slots(None if tokens is None else torch.from_numpy(tokens), torch.from_numpy(places.ravel()))
        metadata.plans[plan_key] = slots
    return slots


def _quantize(new: Tensor, fmt: VectorFormat, scale: float) -> tuple[Tensor, Tensor | None]:
    """Codes [..., 1, row width] and parameters [..., 1 or 2, 1] of tokens [..., num_kv_heads, head_dim]."""
    return quantize((rotate(new.contiguous()) if fmt.rotated else new).unsqueeze(-2), fmt, scale)


def _store(
    part: PagedVectors, codes: Tensor, params: Tensor | None, cache: LayerKVCache, metadata: AttentionMetadata
) -> None:
    """Scatter codes and parameters of the tokens that have a slot."""
    pool, width = _movable(part.codes), part.codes.shape[3]
    pool.view(-1, width).index_copy_(0, _slots(metadata, cache).places, _movable(codes).reshape(-1, width))
    if params is not None and part.params is not None:
        part.params.view(-1).index_copy_(0, _slots(metadata, cache, part.fmt.num_params).places, params.reshape(-1))


def _open_writes(metadata: AttentionMetadata, num_kv_heads: int, block_size: int) -> _OpenWrites:
    plan_key = ("torch open writes", num_kv_heads, block_size)
    writes = metadata.plans.get(plan_key)
    if not isinstance(writes, _OpenWrites):
        writes = metadata.plans[plan_key] = _plan_open_writes(metadata, num_kv_heads, block_size)
    return writes


def _plan_open_writes(metadata: AttentionMetadata, num_kv_heads: int, block_size: int) -> _OpenWrites:
    assert metadata.open_rows is not None
    slots, starts = metadata.slot_mapping.numpy(), metadata.query_start_loc.numpy().astype(np.int64)
    seq_of = np.repeat(np.arange(metadata.num_seqs), np.diff(starts))
    rows, heads = metadata.open_rows.numpy().astype(np.int64), np.arange(num_kv_heads)
    tokens = np.flatnonzero(slots[: starts[-1]] >= 0)
    offsets = slots % block_size
    place = rows[seq_of[tokens]] * block_size + offsets[tokens]
    kept = tokens[tokens.size - 1 - np.unique(place[::-1], return_index=True)[1]]  # the last token at each place
    open_places = (rows[seq_of[kept], None] * num_kv_heads + heads) * block_size + offsets[kept, None]
    closing = tokens[offsets[tokens] == block_size - 1]
    members = closing[:, None] - np.arange(block_size)[::-1]  # [closing, block_size]
    seqs = seq_of[closing]
    first = starts[seqs, None]
    is_early = np.broadcast_to((members < first)[:, None], (closing.size, num_kv_heads, block_size))
    members = np.maximum(members, first)[:, None] * num_kv_heads + heads[:, None]  # [closing, num_kv_heads, block_size]
    early_places = (rows[seqs, None] * num_kv_heads + heads)[:, :, None] * block_size + np.arange(block_size)
    as_tensor = torch.from_numpy
    return _OpenWrites(
        kept=as_tensor((kept[:, None] * num_kv_heads + heads).ravel()),
        open_places=as_tensor(open_places.ravel()),
        closing=as_tensor(slots[closing] // block_size),
        members=as_tensor(members.ravel()),
        early=as_tensor(np.flatnonzero(is_early)),
        early_places=as_tensor(early_places[is_early]),
    )


def _write_open(part: PagedVectors, new: Tensor, writes: _OpenWrites) -> None:
    """Close the blocks whose last slot is written, then keep the other tokens in full precision."""
    assert part.open_blocks is not None
    assert part.params is not None
    _, *block, head_dim = part.open_blocks.shape
    pool = part.open_blocks.view(-1, head_dim)
    new = new.to(pool.dtype).reshape(-1, head_dim)
    if writes.closing.numel():
        vectors = new.index_select(0, writes.members)
        vectors.index_copy_(0, writes.early, pool.index_select(0, writes.early_places))
        codes, params = quantize(vectors.view(-1, *block, head_dim), part.fmt)
        assert params is not None
        part.codes.index_copy_(0, writes.closing, codes)
        part.params.index_copy_(0, writes.closing, params)
    pool.index_copy_(0, writes.open_places, new.index_select(0, writes.kept))


def _movable(codes: Tensor) -> Tensor:
    """torch moves no rows of fp8, but it moves bytes."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
