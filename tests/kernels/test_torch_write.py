"""The torch backend's cache writes leave exactly the oracle's bytes, in every format, and touch nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import oracle
from kernels.attention import AttentionMetadata, reshape_and_cache
from kernels.formats import KV_FORMATS
from kernels.kv_cache import LayerKVCache, allocate_kv_cache, read_blocks

BLOCK_SIZES = (1, 4, 16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "torch")


def stored(cache: LayerKVCache) -> Iterator[Tensor]:
    """The bytes of every tensor, open blocks included."""
    for part in (cache.key, cache.value):
        for tensor in (part.codes, part.params, part.open_blocks):
            if tensor is not None:
                yield tensor.view(torch.uint8)


def assert_same_content(ours: LayerKVCache, theirs: LayerKVCache) -> None:
    """The same bytes. A rotation's sums may differ in the last bit with the number of rows, and then tip a rounding."""
    for mine, reference in ((ours.key, theirs.key), (ours.value, theirs.value)):
        pairs = [(mine.codes, reference.codes), (mine.params, reference.params)]
        for a, b in [*pairs, (mine.open_blocks, reference.open_blocks)]:
            if a is None or b is None:
                continue
            a, b = a.view(torch.uint8), b.view(torch.uint8)
            assert torch.equal(a, b) or (mine.fmt.rotated and int((a != b).sum()) <= 2 + a.numel() // 1000)
        if mine.fmt.rotated:
            got, expected = (read_blocks(part, torch.arange(40), torch.float64) for part in (mine, reference))
            assert (got - expected).norm(dim=-1).nan_to_num().max() <= 0.5 * expected.norm(dim=-1).nan_to_num().max()


def twins(name: str, block_size: int, poison: Callable[..., None], **shape: Any) -> tuple[LayerKVCache, LayerKVCache]:
    """Two equal caches, full of what a write must not touch."""
    scales = {"k_scale": 0.25, "v_scale": 0.5} if name.startswith("fp8") else {}
    sizes = {"num_blocks": 40, "num_kv_heads": 2, "head_dim": 8, "num_open_rows": 5} | shape
    made = [allocate_kv_cache(KV_FORMATS[name], block_size=block_size, **sizes, **scales) for _ in range(2)]
    for cache in made:
        poison(cache, seed=1)
        for part in (cache.key, cache.value):
            if part.open_blocks is not None:  # the tokens before this step
                part.open_blocks.copy_(torch.linspace(-3, 3, part.open_blocks.numel()).view_as(part.open_blocks))
    return made[0], made[1]


def step(context: list[int], query_lens: list[int], block_size: int, seed: int) -> AttentionMetadata:
    """A step of sequences that have so many tokens and get so many more; some sequences may be skipped."""
    order = random.Random(seed)
    free = order.sample(range(1, 40), 39)
    slots: list[int] = []
    tables = [[free.pop() for _ in range(-(-(c + n) // block_size))] for c, n in zip(context, query_lens, strict=True)]
    for table, start, length in zip(tables, context, query_lens, strict=True):
        skipped = order.random() < 0.2
        positions = range(start, start + length)
        slots += [-1 if skipped else table[p // block_size] * block_size + p % block_size for p in positions]
    width = max(len(table) for table in tables)
    lens = [c + n for c, n in zip(context, query_lens, strict=True)]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor([*slots, -1], dtype=torch.int64),  # and a row of padding
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
        num_decodes=0,
        open_rows=torch.tensor(order.sample(range(5), len(lens)), dtype=torch.int32),
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(KV_FORMATS)), block_size=st.sampled_from(BLOCK_SIZES))
def test_a_step_of_writes_equals_the_oracles(
    data: st.DataObject, name: str, block_size: int, poison: Callable[..., None]
) -> None:
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=3))
    shape = {"head_dim": data.draw(st.sampled_from([4, 8, 20, 64])), "num_kv_heads": data.draw(st.integers(1, 3))}
    ours, theirs = twins(name, block_size, poison, **shape)
    context, query_lens = ([n * max(block_size // 3, 1) for n in column] for column in zip(*sequences, strict=True))
    metadata = step(context, query_lens, block_size, seed=data.draw(st.integers(0, 1000)))
    generator = torch.Generator().manual_seed(0)
    size = (metadata.slot_mapping.shape[0], ours.num_kv_heads, ours.head_dim)
    dtype = data.draw(st.sampled_from(DTYPES))
    key, value = ((3 * torch.randn(size, generator=generator)).to(dtype) for _ in "kv")
    reshape_and_cache(key, value, ours, metadata)
    oracle.reshape_and_cache(key, value, theirs, metadata)
    assert_same_content(ours, theirs)


def test_writing_only_padding_changes_nothing(poison: Callable[..., None]) -> None:
    for name in KV_FORMATS:
        ours, theirs = twins(name, 4, poison)
        metadata = step([0], [0], 4, seed=0)  # one row of padding
        reshape_and_cache(*torch.full((2, 1, 2, 8), torch.nan, dtype=torch.float64).unbind(), ours, metadata)
        assert all(torch.equal(a, b) for a, b in zip(stored(ours), stored(theirs), strict=True))


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("chunk", [1, 3, 16, 21])
def test_writing_in_chunks_leaves_what_writing_at_once_leaves(
    name: str, chunk: int, poison: Callable[..., None]
) -> None:
    whole, pieces = twins(name, 8, poison)
    metadata = step([0], [21], 8, seed=3)
    assert metadata.slot_mapping[:21].ge(0).all()
    key, value = torch.randn((2, 22, 2, 8), generator=torch.Generator().manual_seed(0)).unbind()
    reshape_and_cache(key, value, whole, metadata)
    for start in range(0, 21, chunk):
        end = min(start + chunk, 21)
        part = replace(
            metadata,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            slot_mapping=metadata.slot_mapping[start:end],
        )
        reshape_and_cache(key[start:end], value[start:end], pieces, part)
    assert_same_content(whole, pieces)


def test_a_token_keeps_its_bytes_when_its_neighbours_are_written(poison: Callable[..., None]) -> None:
    for name, fmt in KV_FORMATS.items():
        cache, _ = twins(name, 4, poison)
        if fmt.keeps_open_blocks:
            continue
        for slot, size in ((4, 1.0), (5, 1000.0)):  # the second token's scale is far larger
            metadata = replace(step([0], [1], 4, seed=3), slot_mapping=torch.tensor([slot]))
            reshape_and_cache(*torch.full((2, 1, 2, 8), size).unbind(), cache, metadata)
            rows = [p.codes.view(torch.uint8)[1, :, 0] for p in (cache.key, cache.value)]
            params = [p.params[1, :, :, 0] for p in (cache.key, cache.value) if p.params is not None]
            if slot == 4:
                before = [t.clone() for t in rows + params]
        assert all(torch.equal(a, b) for a, b in zip(before, rows + params, strict=True))


@pytest.mark.parametrize("name", ["float16", "fp8_e4m3", "int4_per_token_head", "int4_kivi"])
def test_a_slot_outside_the_pool_is_refused_and_nothing_is_written(name: str, poison: Callable[..., None]) -> None:
    ours, theirs = twins(name, 4, poison)
    metadata = replace(step([0], [2], 4, seed=3), slot_mapping=torch.tensor([4, 160]))
    with pytest.raises(ValueError, match="outside the pool of 160 slots"):
        reshape_and_cache(*torch.zeros((2, 2, 2, 8)).unbind(), ours, metadata)
    assert all(torch.equal(a, b) for a, b in zip(stored(ours), stored(theirs), strict=True))


def test_an_open_row_outside_the_rows_is_refused(poison: Callable[..., None]) -> None:
    ours, _ = twins("int4_kivi", 4, poison)
    metadata = replace(step([0], [2], 4, seed=3), open_rows=torch.tensor([5], dtype=torch.int32))
    with pytest.raises(ValueError, match="outside the 5 rows of open blocks"):
        reshape_and_cache(*torch.zeros((2, 3, 2, 8)).unbind(), ours, metadata)


def test_layers_share_what_a_step_derives(poison: Callable[..., None]) -> None:
    metadata = step([3, 5], [6, 1], 4, seed=3)
    for name in ("int8_per_token_head", "int4_kivi"):
        caches = [twins(name, 4, poison)[0] for _ in range(2)]
        reshape_and_cache(*torch.ones((2, 8, 2, 8)).unbind(), caches[0], metadata)
        known = dict(metadata.plans)
        reshape_and_cache(*torch.ones((2, 8, 2, 8)).unbind(), caches[1], metadata)
        assert metadata.plans == known
        assert all(torch.equal(a, b) for a, b in zip(*map(stored, caches), strict=True))
