"""The Triton attention kernels under the interpreter against the float64 oracle, in every KV format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import merge_splits
from kernels import paged_attention as paged
from kernels.attention import paged_attention
from kernels.formats import KV_FORMATS

# Relative error of the norm. The interpreter's dot is wrong for bfloat16, so queries are float32 or float16.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
FORMATS = sorted(KV_FORMATS)
Call = Callable[..., Any]


def relative_error(result: Tensor, expected: Tensor) -> float:
    assert not result.isnan().any()
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def attend(case: Any, interpreted: Call, mass: Tensor | None = None) -> Tensor:
    return interpreted(paged_attention, case.query, case.cache, case.fresh_metadata(), case.options, mass)


def assert_matches_oracle(case: Any, interpreted: Call) -> Tensor:
    result, expected = attend(case, interpreted), case.expected()
    assert relative_error(result, expected) <= TOLERANCE[case.query.dtype]
    assert result[expected.eq(0).all(dim=(1, 2))].eq(0).all()
    return result


@st.composite
def ragged(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([8, 16, 32]))
    length = st.integers(0, 40) | st.sampled_from([block_size - 1, block_size, block_size + 1])
    decodes = draw(st.lists(length, max_size=2))
    chunks = draw(st.lists(length, min_size=0 if decodes else 1, max_size=2))
    options = draw(
        st.sampled_from(
            [
                {},
                {"soft_cap": 2.0},
                {"sliding_window": 1},
                {"sliding_window": 9},
                {"sliding_window": 5, "sink_tokens": 3},
            ]
        )
    )
    return {
        "seq_lens": decodes + chunks,
        "query_lens": [1] * len(decodes) + [draw(st.integers(0, max(n, 1))) for n in chunks],
        "num_decodes": len(decodes),
        "num_kv_heads": draw(st.sampled_from([1, 3])),
        "group": draw(st.sampled_from([1, 2, 7])),
        "head_dim": draw(st.sampled_from([8, 20])),
        "block_size": block_size,
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "shared_blocks": draw(st.integers(0, 1)),
        "padding_rows": draw(st.integers(0, 1)),
        "seed": draw(st.integers(0, 1000)),
        **options,
    }


@pytest.mark.parametrize("kv_format", FORMATS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=ragged())
def test_any_ragged_batch_in_any_format(
    kv_format: str, arguments: dict[str, Any], make_case: Call, interpreted: Call
) -> None:
    assert_matches_oracle(make_case(**arguments, kv_format=kv_format), interpreted)


@pytest.mark.parametrize(
    "kv_format", ["float16", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head", "int4_kivi"]
)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_head_dims(head_dim: int, kv_format: str, make_case: Call, interpreted: Call) -> None:
    arguments = {"num_kv_heads": 1, "head_dim": head_dim, "block_size": 16, "dtype": torch.float16, "scale": 0.1}
    assert_matches_oracle(make_case([37, 20], [1, 9], 1, kv_format=kv_format, **arguments), interpreted)


@pytest.mark.parametrize(("length", "group"), [(15, 1), (16, 2), (17, 4), (48, 7), (33, 24)])
def test_block_boundaries_and_head_groups(length: int, group: int, make_case: Call, interpreted: Call) -> None:
    case = make_case([length, length], [1, length], 1, num_kv_heads=1, group=group, block_size=16)
    assert_matches_oracle(case, interpreted)


@pytest.mark.parametrize("kv_format", ["float32", "int4_kivi"])
@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40, "sink_tokens": 20}])
def test_any_number_of_splits(
    options: dict[str, Any], num_splits: int, kv_format: str, make_case: Call, interpreted: Call
) -> None:
    lens = [100, 3, 0, 64]
    case = make_case(lens, [1] * 4, 4, kv_format=kv_format, num_kv_heads=1, block_size=16, **options)
    out = torch.full_like(case.query, torch.nan)
    lse = interpreted(
        paged.paged_attention,
        *(case.query, case.cache, case.fresh_metadata(), case.options, out),
        first_seq=0, num_seqs=4, max_query_len=1, native_e4m3=True, num_splits=num_splits,
    )  # fmt: skip
    assert relative_error(out, case.expected()) <= 2e-6
    assert lse.isinf().all(dim=1).tolist() == [length == 0 for length in lens]


def test_a_chunk_can_be_split_too(make_case: Call, interpreted: Call) -> None:
    case = make_case([90, 50], [5, 3], 0, num_kv_heads=1, block_size=16, padding_rows=2)
    out = torch.zeros_like(case.query)
    interpreted(
        paged.paged_attention,
        *(case.query, case.cache, case.fresh_metadata(), case.options, out),
        first_seq=0, num_seqs=2, max_query_len=5, native_e4m3=True, num_splits=4,
    )  # fmt: skip
    assert relative_error(out[:8], case.expected()[:8]) <= 2e-6


def test_lse_is_that_of_the_scores(make_case: Call, interpreted: Call) -> None:
    case = make_case([21], [1], 1, num_kv_heads=1, group=1, block_size=8)
    lse = interpreted(
        paged.paged_attention,
        *(case.query, case.cache, case.fresh_metadata(), case.options, torch.empty_like(case.query)),
        first_seq=0, num_seqs=1, max_query_len=1, native_e4m3=True,
    )  # fmt: skip
    keys = case.cache.key.codes[case.metadata.block_table[0].long()].transpose(1, 2).flatten(0, 1)[:21, 0]
    scores = keys.double() @ case.query[0, 0].double() * case.options.scale
    torch.testing.assert_close(lse[0, 0].double() * torch.tensor(2.0).log(), torch.logsumexp(scores, 0).double())


def test_e4m3_decoded_by_hand_as_on_older_gpus(make_case: Call, interpreted: Call) -> None:
    case = make_case([30], [1], 1, kv_format="fp8_e4m3", num_kv_heads=1, head_dim=16, block_size=16)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(torch.float8_e4m3fn).float().isnan()]
    every = case.cache.value.codes.view(torch.uint8).view(-1)
    first = int(case.metadata.block_table[0, 0]) * 256
    every[first : first + codes.numel()] = codes
    out = torch.empty_like(case.query)
    interpreted(
        paged.paged_attention,
        *(case.query, case.cache, case.fresh_metadata(), case.options, out),
        first_seq=0, num_seqs=1, max_query_len=1, native_e4m3=False,
    )  # fmt: skip
    assert relative_error(out, case.expected()) <= 2e-6
    every[first] = 0x7F
    interpreted(
        paged.paged_attention,
        *(case.query, case.cache, case.fresh_metadata(), case.options, out),
        first_seq=0, num_seqs=1, max_query_len=1, native_e4m3=False,
    )  # fmt: skip
    assert out[..., 0].isnan().all()
    assert out[..., 1:].isfinite().all()


def test_chunk_longer_than_a_query_block_after_a_shared_prefix(make_case: Call, interpreted: Call) -> None:
    case = make_case([70, 50], [41, 20], 0, num_kv_heads=1, group=4, shared_blocks=2, dtype=torch.float16)
    assert_matches_oracle(case, interpreted)


@pytest.mark.parametrize("kv_format", ["float32", "fp8_e4m3", "int8_per_token_head", "int4_symmetric", "int4_kivi"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6, "sink_tokens": 2, "soft_cap": 2.0}])
def test_attention_mass(options: dict[str, Any], kv_format: str, make_case: Call, interpreted: Call) -> None:
    case = make_case([5, 0, 21, 20, 9], [1, 1, 1, 17, 9], 3, kv_format=kv_format, block_size=8, **options)
    mass = torch.full((5, 2, 25), 0.5)
    attend(case, interpreted, mass)
    torch.testing.assert_close(mass[:, :, :21].double(), case.expected_mass() + 0.5, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass.sum(dim=(1, 2)), 0.5 * 50 + 4.0 * torch.tensor([1, 0, 1, 17, 9]))
    assert mass[:, :, 21:].eq(0.5).all()


def test_weights_far_below_a_tiles_largest_scale(make_case: Call, interpreted: Call) -> None:
    """In float16, values of 1e-4 have int8 scales that a weight times a scale could not represent."""
    case = make_case([40], [1], 1, kv_format="int8_per_token_head", dtype=torch.float16, block_size=16)
    case.cache.value.params.mul_(1e-4)
    assert_matches_oracle(case, interpreted)


def test_odd_head_dim_is_refused(make_case: Call, interpreted: Call) -> None:
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        attend(make_case([4], [1], 1, head_dim=5), interpreted)


def test_splits_follow_the_load() -> None:
    assert merge_splits.choose_num_splits(num_programs=1, max_seq_len=100, num_processors=132) == 1
    assert merge_splits.choose_num_splits(num_programs=1, max_seq_len=131072, num_processors=132) == 32
    assert merge_splits.choose_num_splits(num_programs=64, max_seq_len=131072, num_processors=132) == 8
    assert merge_splits.choose_num_splits(num_programs=1024, max_seq_len=131072, num_processors=132) == 1
