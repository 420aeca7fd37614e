"""The torch backend against the float64 oracle, on pools whose unwritten slots are NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import torch_backend, torch_plan
from kernels.attention import paged_attention, reshape_and_cache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.usefixtures("torch_kernels")


@pytest.fixture(scope="module", autouse=True)
def torch_kernels() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVONCALL_KERNELS", "torch")
        yield


def attend(case: Any, **changes: Any) -> Tensor:
    return paged_attention(case.query, case.k_cache, case.v_cache, case.fresh_metadata(**changes), scale=case.scale)


def assert_matches_oracle(case: Any) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(attend(case).double(), case.expected(), rtol=tolerance, atol=tolerance)


@st.composite
def ragged(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    length = st.integers(0, 40) | st.sampled_from([block_size - 1, block_size, block_size + 1, 2 * block_size])
    decodes = draw(st.lists(length, max_size=4))
    chunks = draw(st.lists(length, min_size=0 if decodes else 1, max_size=2))
    query_lens = [1] * len(decodes) + [draw(st.integers(0, max(n, 1))) for n in chunks]
    return {
        "seq_lens": decodes + chunks,
        "query_lens": query_lens,
        "num_decodes": len(decodes),
        "num_kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 2, 4, 7])),
        "head_dim": draw(st.sampled_from([4, 8, 20])),
        "block_size": block_size,
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "shared_blocks": draw(st.integers(0, 2)),
        "padding_rows": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=80, deadline=None)
@given(arguments=ragged())
def test_any_ragged_batch_matches_the_oracle(arguments: dict[str, Any], make_case: Callable[..., Any]) -> None:
    assert_matches_oracle(make_case(**arguments))


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_block_boundaries_and_head_groups(group: int, length: int, make_case: Callable[..., Any]) -> None:
    assert_matches_oracle(make_case([length, length], [1, length], 1, group=group, block_size=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_mkl_keys_are_gathered(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(torch.sparse, "sampled_addmm", None)  # what such a build cannot do
    assert_matches_oracle(make_case([17, 0, 40, 5], [1, 1, 1, 3], 3, dtype=dtype))


def test_unwritten_slots_do_not_matter(make_case: Callable[..., Any]) -> None:
    case = make_case([5, 0, 9, 6], [1, 1, 1, 3], 3, padding_rows=1)
    poisoned = attend(case)
    for cache in (case.k_cache, case.v_cache):
        cache[cache.isnan()] = 1e30
    assert torch.equal(poisoned, attend(case))


def test_physical_place_of_blocks_does_not_matter(make_case: Callable[..., Any]) -> None:
    case = make_case([13, 6, 9], [1, 1, 4], 2)
    result = attend(case)
    order = torch.randperm(case.k_cache.shape[0], generator=torch.Generator().manual_seed(1))
    case.k_cache[order], case.v_cache[order] = case.k_cache.clone(), case.v_cache.clone()
    assert torch.equal(result, attend(case, block_table=order[case.metadata.block_table.long()].int()))


def test_sequences_may_share_blocks(make_case: Callable[..., Any]) -> None:
    case = make_case([9, 13, 10], [1, 1, 2], 2, shared_blocks=2)
    assert case.metadata.block_table[:, :2].unique(dim=0).shape[0] == 1
    assert_matches_oracle(case)


def test_padding_sequences_and_rows_are_zero(make_case: Callable[..., Any]) -> None:
    result = attend(make_case([0, 7, 0, 5], [1, 1, 2, 2], 2, padding_rows=3))
    assert result[[0, 2, 3, 6, 7, 8]].eq(0).all()
    assert result[[1, 4, 5]].ne(0).all()


def test_queries_before_the_first_key_are_zero(make_case: Callable[..., Any]) -> None:
    case = make_case([3], [5], 0)
    assert attend(case)[:2].eq(0).all()
    assert_matches_oracle(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_equals_prefill_of_one_token(dtype: torch.dtype, make_case: Callable[..., Any]) -> None:
    case = make_case([5, 16, 17], [1, 1, 1], 3, dtype=dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attend(case), attend(case, num_decodes=0), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 21])
def test_prefill_in_chunks_equals_whole_prefill(chunk: int, make_case: Callable[..., Any]) -> None:
    case = make_case([21], [21], 0)
    whole = attend(case)
    for start in range(0, 21, chunk):
        end = min(start + chunk, 21)
        piece = paged_attention(
            case.query[start:end],
            case.k_cache,
            case.v_cache,
            case.fresh_metadata(
                query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
            ),
            scale=case.scale,
        )
        torch.testing.assert_close(piece, whole[start:end], rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_depend_on_its_batch(make_case: Callable[..., Any]) -> None:
    lens = [3, 40, 17, 16, 30]
    case = make_case(lens, [1] * 5, 5)
    together = attend(case)
    for i in range(5):
        alone = paged_attention(
            case.query[i : i + 1],
            case.k_cache,
            case.v_cache,
            case.fresh_metadata(
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=case.metadata.seq_lens[i : i + 1],
                block_table=case.metadata.block_table[i : i + 1],
                num_decodes=1,
            ),
            scale=case.scale,
        )
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-6, atol=1e-7)


def test_layers_share_one_plan_but_no_numbers(make_case: Callable[..., Any]) -> None:
    first, second = make_case([9, 6, 11], [1, 1, 4], 2, seed=1), make_case([9, 6, 11], [1, 1, 4], 2, seed=2)
    second.metadata.block_table = first.metadata.block_table
    second.k_cache, second.v_cache = first.v_cache, first.k_cache
    metadata = first.fresh_metadata()
    for case in (first, second, first):
        result = paged_attention(case.query, case.k_cache, case.v_cache, metadata, scale=case.scale)
        torch.testing.assert_close(result.double(), case.expected(), rtol=1e-5, atol=1e-5)
    assert len(metadata.plans) == 1


def test_query_may_be_a_view_of_a_fused_projection(make_case: Callable[..., Any]) -> None:
    case = make_case([9, 7], [1, 5], 1)
    fused = torch.cat([case.query, torch.full_like(case.query, torch.nan)], dim=1)
    case.query = fused[:, : case.query.shape[1]]
    assert_matches_oracle(case)


def test_half_cache_under_a_float_query(make_case: Callable[..., Any]) -> None:
    case = make_case([9, 30, 7], [1, 1, 5], 2, dtype=torch.float16)
    case.query = case.query.float()
    torch.testing.assert_close(attend(case).double(), case.expected(), rtol=2e-3, atol=2e-3)


class LargestOutput(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_workspace_of_a_long_chunk_is_bounded(monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]) -> None:
    case = make_case([300], [200], 0, block_size=16)
    unbounded = attend(case)
    bound = 10 * 300
    monkeypatch.setattr(torch_backend, "WORKSPACE_ELEMENTS", bound)
    with LargestOutput() as largest:
        blocked = attend(case)
    torch.testing.assert_close(blocked, unbounded, rtol=1e-5, atol=1e-5)
    context = 304 * 2 * 8  # keys, whole blocks
    assert largest.elements <= max(bound, context, case.query.numel())
    assert max(bound, context, case.query.numel()) < 200 * 300


def test_keys_of_a_half_cache_are_gathered_in_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    case = make_case([40] * 6, [1] * 6, 6, dtype=torch.float16)
    whole = attend(case)
    monkeypatch.setattr(torch_backend, "WORKSPACE_ELEMENTS", 2 * 40 * 2 * 8)
    assert torch.equal(attend(case), whole)


@settings(max_examples=50, deadline=None)
@given(lens=st.lists(st.integers(0, 3000), max_size=40), num_q_heads=st.sampled_from([1, 4, 32]))
def test_buckets_hold_every_sequence_once_and_waste_little(lens: list[int], num_q_heads: int) -> None:
    buckets = torch_plan._buckets(lens, num_q_heads)
    assert sorted(seq for bucket in buckets for seq in bucket) == [i for i, n in enumerate(lens) if n]
    for bucket in buckets:
        waste = sum(lens[bucket[0]] - lens[seq] for seq in bucket)
        assert min(lens[bucket[0]] - lens[seq] for seq in bucket) == 0
        assert waste * num_q_heads <= torch_plan.BUCKET_WASTE


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
def test_writes_land_in_their_slots_and_nowhere_else(cache_dtype: torch.dtype) -> None:
    caches = [torch.full((5, 2, 4, 8), torch.nan, dtype=cache_dtype) for _ in "kv"]
    key, value = torch.randn(2, 5, 2, 8).unbind()
    slots = [9, -1, 4, 19, -1]
    reshape_and_cache(key, value, *caches, torch.tensor(slots))
    for cache, new in zip(caches, (key, value), strict=True):
        by_slot = cache.transpose(1, 2).reshape(20, 2, 8)
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(by_slot[slot], new[token].to(cache_dtype))
        assert by_slot.isnan().all(dim=(1, 2)).sum() == 20 - 3


def test_writing_only_padding_changes_nothing() -> None:
    caches = [torch.zeros(3, 2, 4, 8) for _ in "kv"]
    reshape_and_cache(torch.ones(2, 2, 8), torch.ones(2, 2, 8), *caches, torch.tensor([-1, -1]))
    assert all(cache.eq(0).all() for cache in caches)
