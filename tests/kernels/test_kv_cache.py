"""Allocation, reading back and copying of paged caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import AttentionMetadata, AttentionOptions, paged_attention, reshape_and_cache
from kernels.formats import KV_FORMATS
from kernels.kv_cache import LayerKVCache, allocate_kv_cache, copy_blocks, copy_open_rows, read_blocks


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_copies_carry_parameters_and_read_before_they_write(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([8, 8], [1, 1], 2, kv_format=name, block_size=4, head_dim=8)
    (a, b), (c, _) = case.metadata.block_table[:, :2].tolist()

    def content(block: int) -> list[torch.Tensor]:
        return [read_blocks(part, torch.tensor([block]), torch.float32) for part in (case.cache.key, case.cache.value)]

    before = {block: content(block) for block in (a, b, c)}
    copy_blocks([case.cache], [a, b, c], [b, a, case.cache.num_blocks - 1])
    for block, source in ((b, a), (a, b), (c, c), (case.cache.num_blocks - 1, c)):
        for got, want in zip(content(block), before[source], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [([1], [1, 2], "same length"), ([1, 2], [3, 3], "twice"), ([4], [1], "between 0 and 3"), ([1], [-1], "between")],
)
def test_copy_blocks_refuses(src: list[int], dst: list[int], message: str) -> None:
    cache = allocate_kv_cache(KV_FORMATS["float32"], 4, 1, 2, 4)
    with pytest.raises(ValueError, match=message):
        copy_blocks([cache], src, dst)


def test_allocation_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="is empty"):
        allocate_kv_cache(KV_FORMATS["float32"], 0, 1, 16, 8)
    with pytest.raises(ValueError, match="num_open_rows must be at least 1"):
        allocate_kv_cache(KV_FORMATS["int4_kivi"], 2, 1, 16, 8)
    with pytest.raises(ValueError, match="int4_symmetric needs a positive head_dim divisible by 2: 7"):
        allocate_kv_cache(KV_FORMATS["int4_symmetric"], 2, 1, 16, 7)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "key",
            {"codes": torch.zeros(4, 2, 8, 4)},
            r"key codes .* must be torch.uint8 \[4, 2, 8, 4\], got .*32",
        ),
        ("value", {"codes": torch.zeros(4, 2, 8, 8, dtype=torch.uint8)}, "value codes .* must be"),
        (
            "value",
            {"codes": torch.zeros(4, 2, 4, 8, dtype=torch.uint8).mT},
            "value codes must be contiguous",
        ),
        ("key", {"params": None}, "key parameters of int4_kivi must be torch.float16 .* got None"),
        (
            "value",
            {"params": torch.zeros(4, 2, 1, 8).half()},
            r"value parameters .* must be .*\[4, 2, 2, 8\]",
        ),
        ("key", {"open_blocks": None}, "key.open_blocks is missing"),
    ],
)
def test_tensors_that_are_not_what_the_format_says(part: str, change: dict[str, Any], message: str) -> None:
    cache = allocate_kv_cache(KV_FORMATS["int4_kivi"], 4, 2, 8, 8, num_open_rows=1)
    with pytest.raises(ValueError, match=message):
        replace(cache, **{part: replace(getattr(cache, part), **change)})


def test_open_blocks_have_the_dtype_and_rows_asked_for() -> None:
    cache = allocate_kv_cache(KV_FORMATS["int4_kivi"], 2, 3, 16, 8, open_dtype=torch.float16, num_open_rows=5)
    for part in (cache.key, cache.value):
        assert part.open_blocks is not None
        assert part.open_blocks.shape == (5, 3, 16, 8)
        assert part.open_blocks.dtype == torch.float16
    assert allocate_kv_cache(KV_FORMATS["float32"], 2, 3, 16, 8).key.open_blocks is None


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_saturates_with_scale_1_and_does_not_with_a_calculated_one(
    name: str, largest: float, make_case: Callable[..., Any]
) -> None:
    case = make_case([6, 9], [6, 9], 0, kv_format=name, num_kv_heads=2, head_dim=8)
    key = torch.randn(15, 2, 8) * 3 * largest
    value = key.flip(0) / 100
    slots = case.metadata.slot_mapping
    errors = {}
    for calculated in (False, True):
        cache = allocate_kv_cache(KV_FORMATS[name], case.cache.num_blocks, 2, 16, 8, calculate_scales=calculated)
        cache = replace(cache)  # what is copied still takes its scales
        assert cache.awaits_scales == calculated
        reshape_and_cache(key, value, cache, case.metadata)
        assert not cache.awaits_scales
        stored = read_blocks(cache.key, torch.arange(cache.num_blocks), torch.float32).transpose(1, 2).flatten(0, 1)
        errors[calculated] = ((stored[slots] - key).abs() / key.abs().clamp(min=largest / 50)).max().item()
        if not calculated:
            assert (cache.key.scale, cache.value.scale) == (1.0, 1.0)
            assert torch.equal(stored[slots][key.abs() > largest].abs().unique(), torch.tensor([largest]))
    assert errors[False] > 0.5
    assert errors[True] < (0.07 if name == "fp8_e4m3" else 0.13)  # half a step of 3 or 2 bits of mantissa
    assert cache.key.scale == pytest.approx(key.abs().max().item() / largest)
    assert cache.value.scale == pytest.approx(value.abs().max().item() / largest)


def test_scales_are_of_the_first_tokens_that_are_stored_and_stay(make_case: Callable[..., Any]) -> None:
    case = make_case([4], [4], 0, kv_format="fp8_e4m3", num_kv_heads=2, head_dim=8, padding_rows=2)
    cache = allocate_kv_cache(KV_FORMATS["fp8_e4m3"], case.cache.num_blocks, 2, 16, 8, calculate_scales=True)
    vectors = torch.ones(6, 2, 8)
    vectors[4:] = 1e6  # of padding, which is not stored
    skipped = replace(case.metadata, slot_mapping=torch.full((6,), -1))
    reshape_and_cache(vectors, vectors, cache, skipped)
    assert cache.awaits_scales
    reshape_and_cache(vectors, 2 * vectors, cache, case.metadata)
    assert (cache.key.scale, cache.value.scale) == pytest.approx((1 / 448, 2 / 448))
    before = read_blocks(cache.key, torch.arange(cache.num_blocks), torch.float32)
    reshape_and_cache(100 * vectors, vectors, cache, skipped)
    assert (cache.key.scale, cache.value.scale) == pytest.approx((1 / 448, 2 / 448))
    assert torch.equal(read_blocks(cache.key, torch.arange(cache.num_blocks), torch.float32), before)


@pytest.mark.parametrize("awkward", [0.0, float("inf"), float("nan")])
def test_nothing_is_learnt_from_zeros_or_what_is_not_finite(awkward: float, make_case: Callable[..., Any]) -> None:
    case = make_case([4], [4], 0, kv_format="fp8_e4m3", num_kv_heads=2, head_dim=8)
    cache = allocate_kv_cache(KV_FORMATS["fp8_e4m3"], case.cache.num_blocks, 2, 16, 8, calculate_scales=True)
    vectors = torch.full((4, 2, 8), awkward)
    reshape_and_cache(vectors, vectors, cache, case.metadata)
    assert (cache.key.scale, cache.awaits_scales) == (1.0, False)


def test_only_fp8_takes_scales() -> None:
    for name, kv_format in KV_FORMATS.items():
        cache = allocate_kv_cache(kv_format, 2, 1, 16, 8, num_open_rows=1, calculate_scales=True)
        assert cache.awaits_scales == (name in ("fp8_e4m3", "fp8_e5m2"))


HEADS, DIM, BLOCK = 2, 8, 4
PROMPT, STEPS = 10, 7  # a fork in the middle of the third block; the fifth is open at the end


def _step(caches: list[LayerKVCache], blocks: list[int], row: int, context: int, tokens: torch.Tensor) -> torch.Tensor:
    """Writes tokens [layers, 3, n, heads, dim] (q, k, v) of a sequence at positions from `context` on, and attends."""
    num_tokens = tokens.shape[2]
    positions = torch.arange(context, context + num_tokens)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([context + num_tokens], dtype=torch.int32),
        block_table=torch.tensor([blocks], dtype=torch.int32),
        slot_mapping=torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK,
        max_query_len=num_tokens,
        max_seq_len=context + num_tokens,
        num_decodes=int(num_tokens == 1),
        open_rows=torch.tensor([row], dtype=torch.int32),
    )
    outputs = []
    for cache, (query, key, value) in zip(caches, tokens, strict=True):
        reshape_and_cache(key, value, cache, metadata)
        outputs.append(paged_attention(query, cache, metadata, AttentionOptions(scale=0.5)))
    return torch.stack(outputs)


@pytest.mark.parametrize("formats", [*([name] for name in KV_FORMATS), ["int4_kivi", "int8_per_token_head", "float32"]])
def test_a_fork_continues_as_its_original_would_and_leaves_it_alone(formats: list[str]) -> None:
    """The full blocks are shared; the partly filled one, and the open row where there is one, are copied."""
    caches = [allocate_kv_cache(KV_FORMATS[name], 12, HEADS, BLOCK, DIM, num_open_rows=3) for name in formats]
    generator = torch.Generator().manual_seed(0)
    prompt, one, other = (
        torch.randn(len(formats), 3, n, HEADS, DIM, generator=generator) for n in (PROMPT, STEPS, STEPS)
    )
    original, fork = ([3, 7, 1, 9, 11], 2), ([3, 7, 5, 2, 8], 0)  # block ids and open row
    _step(caches, *original, 0, prompt)

    def decode(
        where: list[LayerKVCache], sequence: tuple[list[int], int], tokens: torch.Tensor, i: int
    ) -> torch.Tensor:
        return _step(where, *sequence, PROMPT + i, tokens[:, :, i : i + 1])

    alone = {}
    for name, tokens in (("one", one), ("other", other)):
        untouched = copy.deepcopy(caches)
        alone[name] = [decode(untouched, original, tokens, i) for i in range(STEPS)]
    copy_blocks(caches, [1], [5])
    copy_open_rows(caches, [2], [0])
    for i in range(STEPS):
        assert torch.equal(decode(caches, fork, other, i), alone["other"][i])
        assert torch.equal(decode(caches, original, one, i), alone["one"][i])


@pytest.mark.parametrize("forgotten", ["block", "row"])
def test_a_fork_without_its_copies_is_another_sequence(forgotten: str) -> None:
    """What the test above would not see if nothing needed to be copied."""
    name = "int4_kivi" if forgotten == "row" else "int8_per_token_head"
    caches = [allocate_kv_cache(KV_FORMATS[name], 12, HEADS, BLOCK, DIM, num_open_rows=3)]
    prompt, one = (torch.randn(1, 3, n, HEADS, DIM, generator=torch.Generator().manual_seed(n)) for n in (PROMPT, 1))
    _step(caches, [3, 7, 1], 2, 0, prompt)
    if forgotten == "row":
        copy_blocks(caches, [1], [5])
    fork = copy.deepcopy(caches)
    assert not torch.equal(_step(fork, [3, 7, 5], 0, PROMPT, one), _step(caches, [3, 7, 1], 2, PROMPT, one))


def test_copy_open_rows_refuses_rows_that_are_not_there() -> None:
    cache = allocate_kv_cache(KV_FORMATS["int4_kivi"], 4, 1, 2, 4, num_open_rows=2)
    with pytest.raises(ValueError, match="Open rows must lie between 0 and 1"):
        copy_open_rows([cache], [0], [2])
    copy_open_rows([allocate_kv_cache(KV_FORMATS["float32"], 4, 1, 2, 4)], [0], [2])  # has none to copy
