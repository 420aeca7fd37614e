"""Cache writes with torch operators: every token of a step is quantized at once, then scattered to its slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.kv_cache import LayerKVCache, PagedVectors
from kernels.quantize import quantize, rotate
from kernels.torch_plan import check_once


@dataclass(frozen=True)
class _Slots:
    """tokens: those with a slot, None if all. blocks, offsets: int64 [tokens], what the slots mean.

    rows: int64 [tokens * num_kv_heads], into a cache viewed as [num_blocks * num_kv_heads * block_size, ...].
    """

    tokens: Tensor | None
    rows: Tensor
    blocks: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class _OpenWrites:
    """What a step does to open blocks.

    kept: int64, the last token that each open block's slot gets, at open_rows and open_offsets.
    closing: int64, blocks whose last slot is written. members: int64 [closing, block_size], the tokens they consist of;
    but those at early (index into closing, offset) came before this step and lie in old_rows of the open blocks.
    """

    kept: Tensor
    open_rows: Tensor
    open_offsets: Tensor
    closing: Tensor
    members: Tensor
    early: tuple[Tensor, Tensor]
    old_rows: Tensor


def reshape_and_cache(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
    """See `kernels.attention.reshape_and_cache`."""
    open_rows = 0 if cache.key.open_blocks is None else cache.key.open_blocks.shape[0]
    check_once(metadata, cache.block_size, cache.num_blocks, key.shape[0], open_rows)
    if cache.kv_format.keeps_open_blocks:
        writes = _open_writes(metadata, cache.block_size)
        for part, new in ((cache.key, key), (cache.value, value)):
            _write_open(part, new, writes)
        return
    slots = _slots(metadata, cache.num_kv_heads, cache.block_size)
    for part, new in ((cache.key, key), (cache.value, value)):
        _write_tokens(part, new if slots.tokens is None else new.index_select(0, slots.tokens), slots)


def _slots(metadata: AttentionMetadata, num_kv_heads: int, block_size: int) -> _Slots:
    plan_key = ("torch slots", num_kv_heads, block_size)
    slots = metadata.plans.get(plan_key)
    if not isinstance(slots, _Slots):
        wanted, tokens = metadata.slot_mapping.numpy(), None
        if wanted.min(initial=0) < 0:
            tokens = np.flatnonzero(wanted >= 0)
            wanted = wanted[tokens]
        blocks, offsets = wanted // block_size, wanted % block_size
        rows = (blocks[:, None] * num_kv_heads + np.arange(num_kv_heads)) * block_size + offsets[:, None]
        slots = _Slots(
            None if tokens is None else torch.from_numpy(tokens),
            *(torch.from_numpy(array) for array in (rows.ravel(), blocks, offsets)),
        )
        metadata.plans[plan_key] = slots
    return slots


def _write_tokens(part: PagedVectors, new: Tensor, slots: _Slots) -> None:
    """new: [tokens, num_kv_heads, head_dim] of the tokens that have a slot."""
    if new.shape[0] == 0:
        return
    codes, params = quantize((rotate(new) if part.fmt.rotated else new).unsqueeze(2), part.fmt, part.scale)
    pool, width = _movable(part.codes), part.codes.shape[3]
    pool.view(-1, width).index_copy_(0, slots.rows, _movable(codes).reshape(-1, width))
    if params is not None and part.params is not None:
        part.params[slots.blocks, :, :, slots.offsets] = params.squeeze(3)


def _open_writes(metadata: AttentionMetadata, block_size: int) -> _OpenWrites:
    plan_key = ("torch open writes", block_size)
    writes = metadata.plans.get(plan_key)
    if not isinstance(writes, _OpenWrites):
        writes = metadata.plans[plan_key] = _plan_open_writes(metadata, block_size)
    return writes


def _plan_open_writes(metadata: AttentionMetadata, block_size: int) -> _OpenWrites:
    assert metadata.open_rows is not None
    slots, starts = metadata.slot_mapping.numpy(), metadata.query_start_loc.numpy().astype(np.int64)
    seq_of = np.repeat(np.arange(metadata.num_seqs), np.diff(starts))
    rows = metadata.open_rows.numpy().astype(np.int64)
    tokens = np.flatnonzero(slots[: starts[-1]] >= 0)
    offsets = slots % block_size
    place = rows[seq_of[tokens]] * block_size + offsets[tokens]
    kept = tokens[tokens.size - 1 - np.unique(place[::-1], return_index=True)[1]]  # the last token at each place
    closing = tokens[offsets[tokens] == block_size - 1]
    members = closing[:, None] - np.arange(block_size)[::-1]
    seqs = seq_of[closing]
    early = np.nonzero(members < starts[seqs, None])
    members = np.maximum(members, starts[seqs, None])
    as_tensor = torch.from_numpy
    return _OpenWrites(
        kept=as_tensor(kept),
        open_rows=as_tensor(rows[seq_of[kept]]),
        open_offsets=as_tensor(offsets[kept]),
        closing=as_tensor(slots[closing] // block_size),
        members=as_tensor(members),
        early=(as_tensor(early[0]), as_tensor(early[1])),
        old_rows=as_tensor(rows[seqs[early[0]]]),
    )


def _write_open(part: PagedVectors, new: Tensor, writes: _OpenWrites) -> None:
    """Close the blocks whose last slot is written, then keep the other tokens in full precision."""
    assert part.open_blocks is not None
    assert part.params is not None
    new = new.to(part.open_blocks.dtype)
    if writes.closing.numel():
        blocks = new[writes.members].transpose(1, 2)  # [closing, num_kv_heads, block_size, head_dim]
        closed, offsets = writes.early
        blocks[closed, :, offsets] = part.open_blocks[writes.old_rows, :, offsets]
        codes, params = quantize(blocks, part.fmt)
        assert params is not None
        part.codes.index_copy_(0, writes.closing, codes)
        part.params.index_copy_(0, writes.closing, params)
    part.open_blocks[writes.open_rows, :, writes.open_offsets] = new[writes.kept]


def _movable(codes: Tensor) -> Tensor:
    """torch moves no rows of fp8, but it moves bytes."""
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes
