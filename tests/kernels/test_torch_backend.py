"""The torch backend against the float64 oracle, for every format, on pools whose unwritten slots are poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import torch_backend
from kernels.attention import paged_attention
from kernels.formats import KV_FORMATS
from kernels.kv_cache import allocate_kv_cache
from kernels.torch_gather import gather_vectors

# Of the relative error's norm, by dtype: what rounding the result costs, or weights over a 16-bit cache.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
QUANTIZED = [name for name, fmt in KV_FORMATS.items() if fmt.quantized]

pytestmark = pytest.mark.usefixtures("torch_kernels")


@pytest.fixture(scope="module", autouse=True)
def torch_kernels() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVONCALL_KERNELS", "torch")
        yield


def attend(case: Any, **changes: Any) -> Tensor:
    return paged_attention(case.query, case.cache, case.fresh_metadata(**changes), case.options)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def tolerance(case: Any) -> float:
    return max(TOLERANCE[case.query.dtype], TOLERANCE.get(case.cache.value.codes.dtype, 0))


def assert_matches_oracle(case: Any) -> None:
    result, expected = attend(case), case.expected()
    assert result.isfinite().all()
    assert result[expected.eq(0).all(-1)].eq(0).all()
    assert relative_error(result, expected) <= tolerance(case)


@st.composite
def ragged(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    length = st.integers(0, 40) | st.sampled_from([block_size - 1, block_size, block_size + 1, 2 * block_size])
    decodes = draw(st.lists(length, max_size=4))
    chunks = draw(st.lists(length, min_size=0 if decodes else 1, max_size=2))
    kv_format = draw(st.sampled_from(list(KV_FORMATS)))
    window = draw(st.none() | st.integers(1, 50))
    return {
        "seq_lens": decodes + chunks,
        "query_lens": [1] * len(decodes) + [draw(st.integers(0, n + 1)) for n in chunks],
        "num_decodes": len(decodes),
        "kv_format": kv_format,
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "num_kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 2, 4, 7])),
        "head_dim": draw(st.sampled_from([4, 8, 20])),
        "block_size": block_size,
        "shared_blocks": draw(st.integers(0, 2)),
        "padding_rows": draw(st.integers(0, 2)),
        "sliding_window": window,
        "sink_tokens": draw(st.integers(0, 10)) if window else 0,
        "soft_cap": draw(st.none() | st.floats(0.5, 50.0)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=150, deadline=None)
@given(arguments=ragged(), workspace=st.sampled_from([1 << 19, 1 << 10, 1]))
def test_any_batch_in_any_format_matches_the_oracle(
    arguments: dict[str, Any], workspace: int, make_case: Callable[..., Any]
) -> None:
    case = make_case(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "WORKSPACE_ELEMENTS", workspace)
        assert_matches_oracle(case)
        mass = torch.full((len(arguments["seq_lens"]), arguments["num_kv_heads"], case.metadata.max_seq_len + 3), 0.5)
        result = paged_attention(case.query, case.cache, case.fresh_metadata(), case.options, mass)
    assert relative_error(result, case.expected()) <= tolerance(case)
    expected = case.expected_mass()
    assert mass[:, :, expected.shape[2] :].eq(0.5).all()
    assert relative_error(mass[:, :, : expected.shape[2]] - 0.5, expected) <= 1e-5


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [32, 96, 256])
def test_large_heads_and_long_contexts(name: str, head_dim: int, make_case: Callable[..., Any]) -> None:
    lens = [130, 700, 1, 64, 0]
    case = make_case([*lens, 90], [1] * 5 + [70], 5, kv_format=name, head_dim=head_dim, block_size=16, scale=0.1)
    assert_matches_oracle(case)


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_block_boundaries_and_head_groups(group: int, length: int, make_case: Callable[..., Any]) -> None:
    assert_matches_oracle(make_case([length, length], [1, length], 1, group=group, block_size=16))


def test_without_mkl_float32_caches_are_gathered(
    monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(torch.sparse, "sampled_addmm", None)  # what such a build cannot do
    assert_matches_oracle(make_case([17, 0, 40, 5], [1, 1, 1, 3], 3))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_unwritten_slots_do_not_matter(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([5, 0, 9, 6], [1, 1, 1, 3], 3, padding_rows=1, kv_format=name)
    poisoned = attend(case)
    for part in (case.cache.key, case.cache.value):
        for tensor in (part.codes, part.params, part.open_blocks):
            if tensor is not None and tensor.dtype.is_floating_point:
                tensor.copy_(torch.where(tensor.float().isnan(), 400.0, tensor.float()))
    assert torch.equal(poisoned, attend(case))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_physical_place_of_blocks_does_not_matter(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([13, 6, 9], [1, 1, 4], 2, kv_format=name)
    result = attend(case)
    order = torch.randperm(case.cache.num_blocks, generator=torch.Generator().manual_seed(1))
    for tensor in case.cache.tensors():
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        raw[order] = raw.clone()
    assert torch.equal(result, attend(case, block_table=order[case.metadata.block_table.long()].int()))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_sequences_may_share_blocks(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([9, 13, 10], [1, 1, 2], 2, shared_blocks=2, kv_format=name)
    assert case.metadata.block_table[:, :2].unique(dim=0).shape[0] == 1
    assert_matches_oracle(case)


def test_block_table_may_be_a_view_of_a_larger_one(make_case: Callable[..., Any]) -> None:
    case = make_case([13, 6, 9], [1, 1, 4], 2)
    larger = torch.full((7, 11), 99, dtype=torch.int32)
    view = larger[1::2, 1:-5]
    view[:, : case.metadata.block_table.shape[1]] = case.metadata.block_table
    assert not view.is_contiguous()
    assert torch.equal(attend(case), attend(case, block_table=view))


def test_padding_sequences_and_rows_are_zero(make_case: Callable[..., Any]) -> None:
    result = attend(make_case([0, 7, 0, 5], [1, 1, 2, 2], 2, padding_rows=3))
    assert result[[0, 2, 3, 6, 7, 8]].eq(0).all()
    assert result[[1, 4, 5]].ne(0).all()


def test_queries_before_the_first_key_are_zero(make_case: Callable[..., Any]) -> None:
    case = make_case([3], [5], 0)
    assert attend(case)[:2].eq(0).all()
    assert_matches_oracle(case)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6, "sink_tokens": 2}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_decode_equals_prefill_of_one_token(name: str, options: dict[str, Any], make_case: Callable[..., Any]) -> None:
    case = make_case([5, 16, 17, 40], [1, 1, 1, 1], 4, kv_format=name, **options)
    assert relative_error(attend(case), attend(case, num_decodes=0)) <= tolerance(case)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6, "sink_tokens": 2}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 21])
def test_prefill_in_chunks_equals_whole_prefill(
    chunk: int, options: dict[str, Any], make_case: Callable[..., Any]
) -> None:
    for name, fmt in KV_FORMATS.items():
        if fmt.keeps_open_blocks:
            continue  # a query sees its own block as it is when the step ends
        case = make_case([21], [21], 0, kv_format=name, **options)
        whole = attend(case)
        for start in range(0, 21, chunk):
            end = min(start + chunk, 21)
            metadata = case.fresh_metadata(
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                slot_mapping=case.metadata.slot_mapping[start:end],
            )
            piece = paged_attention(case.query[start:end], case.cache, metadata, case.options)
            torch.testing.assert_close(piece, whole[start:end], rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_depend_on_its_batch(make_case: Callable[..., Any]) -> None:
    for name in KV_FORMATS:
        case = make_case([3, 40, 17, 16, 30], [1] * 5, 5, kv_format=name)
        together = attend(case)
        for i in range(5):
            metadata = case.fresh_metadata(
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                **{key: getattr(case.metadata, key)[i : i + 1] for key in ("seq_lens", "block_table", "open_rows")},
                slot_mapping=case.metadata.slot_mapping[i : i + 1],
                num_decodes=1,
            )
            alone = paged_attention(case.query[i : i + 1], case.cache, metadata, case.options)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-6)


def test_layers_share_one_plan_but_no_numbers(make_case: Callable[..., Any]) -> None:
    for name in ("float32", "int4_per_token_head", "int4_kivi"):
        first, second = (
            make_case([9, 6, 11], [1, 1, 4], 2, kv_format=name, num_kv_heads=2, sliding_window=5) for _ in range(2)
        )
        second.cache = replace(second.cache, key=first.cache.key)
        second.query = -2 * first.query
        metadata = first.fresh_metadata()
        for case in (first, second, first):
            result = paged_attention(case.query, case.cache, metadata, case.options)
            assert relative_error(result, case.expected()) <= 1e-5
            plans = len(metadata.plans)
        assert plans == 2  # the checks and the plan


def test_query_may_be_a_view_of_a_fused_projection(make_case: Callable[..., Any]) -> None:
    case = make_case([9, 7], [1, 5], 1)
    fused = torch.cat([case.query, torch.full_like(case.query, torch.nan)], dim=1)
    case.query = fused[:, : case.query.shape[1]]
    assert_matches_oracle(case)


@pytest.mark.parametrize("name", ["float32", *QUANTIZED])
def test_a_float_query_sees_no_more_error_than_float32_has(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([9, 30, 7, 64], [1, 1, 5, 1], 2, kv_format=name)
    assert relative_error(attend(case), case.expected()) <= 2e-6


def test_what_is_not_finite_stays_visible(make_case: Callable[..., Any]) -> None:
    for name in ("float32", "float16", "fp8_e4m3", "fp8_e5m2"):
        for part in ("key", "value"):
            case = make_case([9, 30], [1, 1], 2, kv_format=name)
            block, offset = int(case.metadata.block_table[0, 1]), 2
            getattr(case.cache, part).codes[block, 1, offset, 3] = torch.nan
            result = attend(case)
            assert result[1].isfinite().all()
            assert result[0, :2].isfinite().all()
            assert result[0, 2:].isnan().any()


def test_every_fp8_code_is_read_as_torch_reads_it() -> None:
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
        cache = allocate_kv_cache(KV_FORMATS[name], 1, 1, 16, 16)
        cache.key.codes.view(torch.uint8).copy_(codes)
        vectors = gather_vectors(cache.key, torch.zeros(1, dtype=torch.int64), None)
        assert torch.equal(vectors.nan_to_num(7e7), cache.key.codes[0].float().nan_to_num(7e7))
