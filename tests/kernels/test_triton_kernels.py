"""The Triton kernels under the interpreter against the oracle, and compiled ahead of time for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import paged_decode, paged_prefill
from kernels.aot import compile_kernel
from kernels.attention import paged_attention, reshape_and_cache

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
Call = Callable[..., Any]


def assert_matches_oracle(case: Any, interpreted: Call) -> None:
    result = interpreted(
        paged_attention, case.query, case.k_cache, case.v_cache, case.fresh_metadata(), scale=case.scale
    )
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(result.double(), case.expected(), rtol=tolerance, atol=tolerance)


@st.composite
def ragged(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([4, 16]))
    length = st.integers(0, 40) | st.sampled_from([block_size - 1, block_size, block_size + 1])
    decodes = draw(st.lists(length, max_size=2))
    chunks = draw(st.lists(length, min_size=0 if decodes else 1, max_size=2))
    return {
        "seq_lens": decodes + chunks,
        "query_lens": [1] * len(decodes) + [draw(st.integers(0, max(n, 1))) for n in chunks],
        "num_decodes": len(decodes),
        "num_kv_heads": draw(st.sampled_from([1, 3])),
        "group": draw(st.sampled_from([1, 2, 7])),
        "head_dim": draw(st.sampled_from([8, 20])),
        "block_size": block_size,
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "padding_rows": draw(st.integers(0, 1)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=ragged())
def test_any_ragged_batch_matches_the_oracle(arguments: dict[str, Any], make_case: Call, interpreted: Call) -> None:
    assert_matches_oracle(make_case(**arguments), interpreted)


@pytest.mark.parametrize(("length", "group"), [(15, 1), (16, 2), (17, 4), (48, 7)])
def test_block_boundaries_and_head_groups(length: int, group: int, make_case: Call, interpreted: Call) -> None:
    case = make_case([length, length], [1, length], 1, num_kv_heads=1, group=group, block_size=16)
    assert_matches_oracle(case, interpreted)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_any_number_of_splits_matches_the_oracle(num_splits: int, make_case: Call, interpreted: Call) -> None:
    case = make_case([100, 3, 0, 64], [1] * 4, 4, num_kv_heads=1, block_size=16)
    out = torch.full_like(case.query, torch.nan)
    table, lens = case.metadata.block_table, case.metadata.seq_lens
    interpreted(
        paged_decode.paged_decode,
        *(case.query, case.k_cache, case.v_cache, table, lens, out),
        max_seq_len=100,
        scale=case.scale,
        num_splits=num_splits,
    )
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_chunk_longer_than_a_query_block_after_a_shared_prefix(make_case: Call, interpreted: Call) -> None:
    case = make_case([70, 50], [41, 20], 0, num_kv_heads=1, group=4, shared_blocks=2, dtype=torch.float16)
    assert_matches_oracle(case, interpreted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_writes_land_in_their_slots_and_nowhere_else(dtype: torch.dtype, interpreted: Call) -> None:
    caches = [torch.full((5, 3, 4, 20), torch.nan, dtype=dtype) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    fused = torch.randn(4, 6, 20)
    key, value, slots = fused[:, :3], fused[:, 3:], torch.tensor([9, -1, 4, 19])
    interpreted(reshape_and_cache, key, value, *caches, slots)
    for cache, untouched, new in zip(caches, expected, (key, value), strict=True):
        for token in (0, 2, 3):
            untouched[slots[token] // 4, :, slots[token] % 4] = new[token].to(dtype)
        torch.testing.assert_close(cache, untouched, rtol=0, atol=0, equal_nan=True)


def test_splits_follow_the_load() -> None:
    assert paged_decode.choose_num_splits(num_programs=1, max_seq_len=100, num_processors=132) == 1
    assert paged_decode.choose_num_splits(num_programs=1, max_seq_len=131072, num_processors=132) == 32
    assert paged_decode.choose_num_splits(num_programs=64, max_seq_len=131072, num_processors=132) == 8
    assert paged_decode.choose_num_splits(num_programs=1024, max_seq_len=131072, num_processors=132) == 1


HALF, INDEX = "*fp16", "*i32"
SHAPE = {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
INPUTS = {"query_ptr": HALF, "k_cache_ptr": HALF, "v_cache_ptr": HALF, "block_table_ptr": INDEX, "seq_lens_ptr": INDEX}
KERNELS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "kernels.cache_write:reshape_and_cache_kernel": (
        dict.fromkeys(("key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr"), HALF) | {"slot_mapping_ptr": "*i64"},
        {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "PADDED_HEADS": 8, "PADDED_DIM": 128},
    ),
    "kernels.paged_decode:paged_decode_kernel": (
        INPUTS | {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "scale_log2": "fp32"},
        SHAPE | {"NUM_SPLITS": 8, "PADDED_GROUP": 16, "PADDED_DIM": 128} | paged_decode.launch_options(torch.float16),
    ),
    "kernels.paged_decode:merge_splits_kernel": (
        {"partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32", "out_ptr": HALF},
        {"NUM_Q_HEADS": 32, "HEAD_DIM": 128, "NUM_SPLITS": 8, "PADDED_DIM": 128},
    ),
    "kernels.paged_prefill:paged_prefill_kernel": (
        INPUTS | {"query_start_loc_ptr": INDEX, "out_ptr": HALF, "scale_log2": "fp32"},
        SHAPE | {"PADDED_DIM": 128} | paged_prefill.launch_options(torch.float16, 4),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types, constants = KERNELS[name]
    options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
    constants = {key: value for key, value in constants.items() if key not in options}
    used = compile_kernel(name, types, constants, capability=90, **options)
    assert 0 < used.registers <= 255
    assert used.stack_bytes == used.local_bytes == 0
    assert used.shared_bytes <= 99 * 1024
