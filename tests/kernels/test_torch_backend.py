"""The torch backend against the float64 oracle, for every format, on pools whose unwritten slots are poisoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import torch_backend
from kernels.attention import AttentionOptions, paged_attention
from kernels.formats import KV_FORMATS

# Of the relative error's norm, by the query's dtype: what rounding the result costs.
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


def assert_matches_oracle(case: Any) -> None:
    result, expected = attend(case), case.expected()
    assert result.isfinite().all()
    assert result[expected.eq(0).all(-1)].eq(0).all()
    assert relative_error(result, expected) <= TOLERANCE[case.query.dtype]


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


@settings(max_examples=300, deadline=None)
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
    assert relative_error(result, case.expected()) <= TOLERANCE[case.query.dtype]
    expected = case.expected_mass()
    assert mass[:, :, expected.shape[2] :].eq(0.5).all()
    assert relative_error(mass[:, :, : expected.shape[2]] - 0.5, expected) <= 1e-5
