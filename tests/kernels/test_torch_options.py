"""Windows, sinks, soft cap and attention mass on the torch backend, and what it may read and allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import torch_backend, torch_plan, torch_prefill, torch_ragged, torch_tiles
from kernels.attention import paged_attention
from kernels.formats import KV_FORMATS


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "torch")


def attend(case: Any, **changes: Any) -> Tensor:
    return paged_attention(case.query, case.cache, case.fresh_metadata(**changes), case.options)


def close(result: Tensor, expected: Tensor, name: str = "float32") -> bool:
    """Within what rounding weights to a 16-bit cache's dtype costs."""
    tolerance = {"float16": 2e-3, "bfloat16": 1e-2}.get(name, 1e-5)
    return bool((result.double() - expected).norm() <= tolerance * expected.norm())


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("num_decodes", [4, 0])
def test_a_window_off_by_one_is_another_result(name: str, num_decodes: int, make_case: Callable[..., Any]) -> None:
    def case(window: int | None, sinks: int = 0) -> Any:
        options = {"sliding_window": window, "sink_tokens": sinks}
        return make_case([5, 16, 17, 40], [1] * 4, num_decodes, kv_format=name, **options)

    for window, sinks in ((4, 0), (5, 4), (5, 6), (1, 0)):
        result = attend(case(window, sinks))
        assert close(result, case(window, sinks).expected(), name)
        assert not close(result, case(window + 1, sinks).expected(), name)
        assert not close(result, case(window, sinks + 1).expected(), name)
    assert close(attend(case(40)), case(None).expected(), name)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_blocks_outside_the_window_may_be_gone(name: str, make_case: Callable[..., Any]) -> None:
    """Decodes and chunks alike: the table may name the poisoned null block where no query looks."""
    case = make_case([37, 50, 60], [1, 1, 9], 2, kv_format=name, sliding_window=9, sink_tokens=3)
    expected = attend(case)
    table = case.metadata.block_table.clone()
    for row, first_seen in zip(table, (28, 41, 43), strict=True):
        row[1 : first_seen // 4] = 0
    assert torch.equal(attend(case, block_table=table), expected)
    for row in table:
        row[0] = 0  # the sinks' block
    assert not torch.equal(attend(case, block_table=table).nan_to_num(), expected)


def test_soft_cap_bounds_scores(make_case: Callable[..., Any]) -> None:
    for num_decodes in (2, 0):
        capped = make_case([9, 30], [1, 1], num_decodes, soft_cap=0.5, scale=20.0)
        assert close(attend(capped), capped.expected())
        assert not close(attend(capped), make_case([9, 30], [1, 1], num_decodes, scale=20.0).expected())


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7, "sink_tokens": 2}, {"soft_cap": 3.0}])
def test_mass_sums_to_queries_times_group(name: str, options: dict[str, Any], make_case: Callable[..., Any]) -> None:
    case = make_case([5, 0, 33, 3, 20], [1, 1, 1, 5, 11], 3, group=3, kv_format=name, **options)
    mass = torch.zeros((5, 2, 40))
    result = paged_attention(case.query, case.cache, case.metadata, case.options, mass)
    assert close(result, case.expected(), name)
    assert close(mass[:, :, :33], case.expected_mass())
    visible_queries = torch.tensor([1.0, 0.0, 1.0, 3.0, 11.0])
    torch.testing.assert_close(mass.sum(2), (visible_queries * 3)[:, None].expand(-1, 2))
    for seq, length in enumerate([5, 0, 33, 3, 20]):
        assert mass[seq, :, length:].eq(0).all()


def test_mass_accumulates_into_a_view(make_case: Callable[..., Any]) -> None:
    case = make_case([5, 33, 20], [1, 1, 11], 2)
    all_layers = torch.ones((3, 2, 4, 40))
    view = all_layers[:, :, 2]
    for _ in range(2):
        paged_attention(case.query, case.cache, case.metadata, case.options, view)
    assert close(view[:, :, :33] - 1, 2 * case.expected_mass())
    assert all_layers[:, :, [0, 1, 3]].eq(1).all()


class Recorder(TorchDispatchMode):
    """The largest newly allocated result in elements, and how many elements index_select took."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {None, *(self._storage(a) for a in (*args, *(kwargs or {}).values()))}
        if self._storage(result) not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        if isinstance(result, Tensor) and "index_select" in str(func):
            self.gathered += result.numel()
        return result

    @staticmethod
    def _storage(value: object) -> int | None:
        """Where a dense tensor's data lies."""
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        return value.untyped_storage().data_ptr() if dense else None


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "int4_kivi"])
def test_decode_reads_no_more_than_the_window(name: str, make_case: Callable[..., Any]) -> None:
    def gathered(length: int) -> int:
        case = make_case([length] * 3, [1] * 3, 3, kv_format=name, sliding_window=20, sink_tokens=2)
        with Recorder() as recorder:
            attend(case)
        return recorder.gathered

    assert gathered(200) == gathered(80)


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_decode_in_place_reads_no_more_than_the_window(name: str, make_case: Callable[..., Any]) -> None:
    case = make_case([80, 200], [1] * 2, 2, kv_format=name, sliding_window=20, sink_tokens=2)
    metadata = case.fresh_metadata()
    paged_attention(case.query, case.cache, metadata, case.options)
    (plan,) = (p for p in metadata.plans.values() if isinstance(p, torch_plan.Plan))
    assert plan.decodes is not None
    (ragged,) = plan.decodes.derived.values()
    assert isinstance(ragged, torch_ragged.RaggedPlan)
    columns = ragged.cols.view(2, 4, 24)  # 20 of the window, 4 of the sinks' block
    seen = case.metadata.block_table[[0, 1]][:, [0, *range(15, 20)]]
    seen[1, 1:] = case.metadata.block_table[1, 45:50]
    for seq in range(2):
        assert set((columns[seq] // 8).unique().tolist()) == set(seen[seq].tolist())


@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0}, {"sliding_window": 30}])
def test_workspace_of_a_long_chunk_is_bounded(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    case = make_case([300], [200], 0, block_size=16, **options)
    unbounded = attend(case)
    bound = 10 * 300 * 4
    monkeypatch.setattr(torch_prefill, "SCORE_ELEMENTS", bound)
    with Recorder() as recorder:
        blocked = attend(case)
    torch.testing.assert_close(blocked, unbounded, rtol=1e-5, atol=1e-5)
    context = 304 * 2 * 8  # keys, whole blocks
    assert recorder.largest <= max(bound, context, case.query.numel())
    assert max(bound, context, case.query.numel()) < 200 * 300


@pytest.mark.parametrize("name", [name for name, fmt in KV_FORMATS.items() if fmt.quantized])
def test_workspace_of_decodes_is_bounded(
    name: str, monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    case = make_case([700, 40, 40, 41, 600], [1] * 5, 5, kv_format=name, group=1, head_dim=32)
    whole = attend(case)
    monkeypatch.setattr(torch_backend, "WORKSPACE_ELEMENTS", 1 << 12)
    with Recorder() as recorder:
        pieces = attend(case)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)
    scores_and_indices = 2 * 2 * (1421 + 5 * 32)
    assert recorder.largest <= max(1 << 12, scores_and_indices)
    assert scores_and_indices < 700 * 2 * 32


def test_keys_of_a_half_cache_are_gathered_in_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch, make_case: Callable[..., Any]
) -> None:
    case = make_case([40] * 6, [1] * 6, 6, kv_format="float16", group=1, head_dim=32)
    whole = attend(case)
    bound = 2 * 40 * 2 * 32
    monkeypatch.setattr(torch_backend, "WORKSPACE_ELEMENTS", bound)
    with Recorder() as recorder:
        assert torch.equal(attend(case), whole)
    assert recorder.largest <= bound


@settings(max_examples=50, deadline=None)
@given(lens=st.lists(st.integers(1, 3000), max_size=40), num_q_heads=st.sampled_from([1, 4, 32]))
def test_buckets_hold_every_sequence_once_and_waste_little(lens: list[int], num_q_heads: int) -> None:
    buckets = torch_ragged._buckets(lens, num_q_heads)
    assert sorted(seq for bucket in buckets for seq in bucket) == list(range(len(lens)))
    for bucket in buckets:
        waste = sum(lens[bucket[0]] - lens[seq] for seq in bucket)
        assert min(lens[bucket[0]] - lens[seq] for seq in bucket) == 0
        assert waste * num_q_heads <= torch_ragged.BUCKET_WASTE


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), block_size=st.sampled_from([1, 8, 16, 600]))
def test_tiles_waste_little(counts: list[int], block_size: int) -> None:
    key = torch_plan.PlanKey(1000, 2, block_size, 64, 40, torch_backend.WORKSPACE_ELEMENTS)
    n = torch_tiles._tile_blocks(np.array(counts), key)
    assert 1 <= n <= max(counts)
    assert n * block_size <= max(torch_tiles.TILE_SIZES[-1], block_size) or n * block_size * 128 <= key.workspace
    padded = sum(-(-count // n) * n for count in counts) * block_size
    worst = len(counts) * (torch_tiles.TILE_SIZES[0] + block_size) + torch_tiles.MERGE_OVERHEAD
    assert padded <= 1.5 * sum(counts) * block_size + worst
