"""The Triton cache writes under the interpreter: bit for bit what `kernels.quantize` says, and nothing else touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import oracle
from kernels.attention import AttentionMetadata, reshape_and_cache
from kernels.formats import KV_FORMATS
from kernels.kv_cache import LayerKVCache, allocate_kv_cache

Call = Callable[..., Any]


def assert_same_pool(cache: LayerKVCache, expected: LayerKVCache) -> None:
    for tensor, other in zip(cache.tensors(), expected.tensors(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def assert_same_open(cache: LayerKVCache, expected: LayerKVCache, metadata: AttentionMetadata) -> None:
    assert metadata.open_rows is not None
    for part, other in ((cache.key, expected.key), (cache.value, expected.value)):
        if part.open_blocks is None or other.open_blocks is None:
            continue
        for row, length in zip(metadata.open_rows.tolist(), metadata.seq_lens.tolist(), strict=True):
            used = length % cache.block_size
            assert torch.equal(part.open_blocks[row, :, :used], other.open_blocks[row, :, :used])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_format", sorted(KV_FORMATS))
def test_writes_equal_the_oracle(
    kv_format: str, dtype: torch.dtype, make_case: Call, poison: Call, interpreted: Call
) -> None:
    arguments = {"num_kv_heads": 3, "head_dim": 20, "block_size": 8, "dtype": dtype}
    case = make_case([5, 19, 16, 40, 3, 37], [1, 1, 1, 40, 3, 20], 3, kv_format=kv_format, padding_rows=1, **arguments)
    poison(case.cache, 1)
    fill_open(case.cache)
    expected = copy.deepcopy(case.cache)
    generator = torch.Generator().manual_seed(0)
    fused = 3 * torch.randn((case.metadata.slot_mapping.shape[0], 6, 20), generator=generator).to(dtype)
    if kv_format == "bfloat16":  # the interpreter truncates to bfloat16 where hardware rounds
        fused = fused.bfloat16().to(dtype)
    key, value = fused[:, :3], fused[:, 3:]
    interpreted(reshape_and_cache, key, value, case.cache, case.metadata)
    oracle.reshape_and_cache(key, value, expected, case.metadata)
    assert_same_pool(case.cache, expected)
    assert_same_open(case.cache, expected, case.metadata)


def fill_open(cache: LayerKVCache) -> None:
    """What earlier steps left in the open rows."""
    generator = torch.Generator().manual_seed(7)
    for part in (cache.key, cache.value):
        if part.open_blocks is not None:
            part.open_blocks.copy_(torch.randn(part.open_blocks.shape, generator=generator))


def one_sequence(slots: list[int], seq_len: int, width: int) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, len(slots)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=torch.arange(1, width + 1, dtype=torch.int32)[None],
        slot_mapping=torch.tensor(slots),
        max_query_len=len(slots),
        max_seq_len=seq_len,
        num_decodes=int(len(slots) == 1),
        open_rows=torch.tensor([0], dtype=torch.int32),
    )


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_float16_is_encoded_as_torch_does(kv_format: str, interpreted: Call) -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[~numbers.isnan()]
    numbers = torch.cat([numbers, numbers.new_zeros(-numbers.numel() % 2048)]).view(-1, 8, 256)
    cache = allocate_kv_cache(KV_FORMATS[kv_format], 3, 8, 32, 256)
    expected = copy.deepcopy(cache)
    metadata = one_sequence([32 + i for i in range(numbers.shape[0])], numbers.shape[0], 2)
    interpreted(reshape_and_cache, numbers, numbers, cache, metadata)
    oracle.reshape_and_cache(numbers, numbers, expected, metadata)
    assert_same_pool(cache, expected)


@pytest.mark.parametrize("kv_format", ["int8_per_token_head", "int4_symmetric", "int4_per_token_head", "int4_kivi"])
@pytest.mark.parametrize("vector", ["zero", "constant", "one-sided", "tiny"])
def test_awkward_vectors(vector: str, kv_format: str, interpreted: Call) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((8, 1, 16), generator=generator)
    new = {"zero": 0 * noise, "constant": 0 * noise + 3.3, "one-sided": noise + 40, "tiny": noise * 1e-7}[vector]
    cache = allocate_kv_cache(KV_FORMATS[kv_format], 2, 1, 8, 16, num_open_rows=1)
    expected = copy.deepcopy(cache)
    metadata = one_sequence(list(range(8, 16)), 8, 1)
    interpreted(reshape_and_cache, new, new, cache, metadata)
    oracle.reshape_and_cache(new, new, expected, metadata)
    assert_same_pool(cache, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_format", ["int8_per_token_head", "int4_symmetric", "int4_kivi"])
def test_what_is_not_finite_does_not_come_back_finite(kv_format: str, bad: float, interpreted: Call) -> None:
    new = torch.ones((8, 1, 16))
    new[3, 0, 5] = bad
    cache = allocate_kv_cache(KV_FORMATS[kv_format], 2, 1, 8, 16, num_open_rows=1)
    interpreted(reshape_and_cache, new, new, cache, one_sequence(list(range(8, 16)), 8, 1))
    keys, values = stored(cache, 1)
    assert not keys[0, 3, 5].isfinite()
    assert not values[0, 3, 5].isfinite()
    assert keys[0, 2, 4].isfinite()


def stored(cache: LayerKVCache, block: int) -> tuple[Tensor, Tensor]:
    from kernels.kv_cache import read_blocks

    keys, values = (read_blocks(part, torch.tensor([block]), torch.float32)[0] for part in (cache.key, cache.value))
    return keys, values


def test_a_block_that_fills_token_by_token_equals_one_written_at_once(interpreted: Call) -> None:
    new = torch.randn((11, 2, 12), generator=torch.Generator().manual_seed(0))
    slots = list(range(8, 19))
    at_once, stepwise = (allocate_kv_cache(KV_FORMATS["int4_kivi"], 3, 2, 8, 12, num_open_rows=1) for _ in range(2))
    interpreted(reshape_and_cache, new, -new, at_once, one_sequence(slots, 11, 2))
    for first, last in ((0, 5), (5, 6), (6, 10), (10, 11)):
        interpreted(
            reshape_and_cache, new[first:last], -new[first:last], stepwise, one_sequence(slots[first:last], last, 2)
        )
    assert_same_pool(stepwise, at_once)
    assert_same_open(stepwise, at_once, one_sequence(slots, 11, 2))


def test_open_blocks_need_a_power_of_two(interpreted: Call) -> None:
    cache = allocate_kv_cache(KV_FORMATS["int4_kivi"], 2, 1, 6, 8, num_open_rows=1)
    with pytest.raises(ValueError, match="power of two, got 6"):
        interpreted(reshape_and_cache, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), cache, one_sequence([6], 1, 1))
