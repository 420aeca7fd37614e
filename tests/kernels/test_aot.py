"""Every kernel variant compiles ahead of time for a GPU generation without spilling; the report tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import aot, triton_backend
from kernels.aot import CAPABILITIES, Resources, compile_variant
from kernels.aot_variants import VARIANTS, Variant
from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.formats import KV_FORMATS
from kernels.kv_cache import allocate_kv_cache

ROW = Resources("paged_attention", "decode x", 90, 100, 0, 0, 40 << 10, 4, 4, 0.25)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


# Each variant on one generation in turn, each kernel on all: `kvoncall bench aot` compiles everything for everyone.
@pytest.mark.parametrize(
    ("variant", "capability"),
    [(variant, CAPABILITIES[n % len(CAPABILITIES)]) for n, variant in enumerate(VARIANTS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_variant_compiles_without_spills(variant: Variant, capability: int) -> None:
    for used in compile_variant(variant, capability):
        assert 0 < used.registers <= 255
        assert used.fits, used


def test_every_format_is_among_the_variants() -> None:
    for what in ("decode", "prefill", "write"):
        assert {v.kv_format for v in VARIANTS if v.what == what} >= {n for n, f in KV_FORMATS.items() if f.quantized}
    assert {v.head_dim for v in VARIANTS if v.what == "decode"} == {32, 64, 96, 128, 192, 256}
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_what_does_not_fit_is_told_apart() -> None:
    assert ROW.fits
    assert not replace(ROW, stack_bytes=8).fits
    assert not replace(ROW, local_bytes=4).fits
    assert not replace(ROW, shared_bytes=228 << 10).fits
    assert replace(ROW, shared_bytes=200 << 10).fits
    assert not replace(ROW, capability=80, shared_bytes=200 << 10).fits


def test_occupancy_follows_the_scarcest_resource() -> None:
    """CUDA's occupancy calculator: 64 registers x 128 threads fill a multiprocessor's 65,536 with 8 blocks."""
    assert aot._blocks_per_sm(registers=64, shared=0, num_warps=4, capability=90) == 8
    assert aot._blocks_per_sm(registers=65, shared=0, num_warps=4, capability=90) == 7
    assert aot._blocks_per_sm(registers=32, shared=75 << 10, num_warps=4, capability=90) == 3
    assert aot._blocks_per_sm(registers=32, shared=75 << 10, num_warps=4, capability=80) == 2
    assert aot._blocks_per_sm(registers=16, shared=0, num_warps=4, capability=90) == 16


def test_table_spells_out_spills() -> None:
    table = aot.to_markdown([ROW, replace(ROW, capability=100, stack_bytes=8)])
    assert "| paged_attention | decode x | 100 / 40 / 25% | 100 / 40 / 25% **stack 8 local 0** |" in table
    assert "| kernel | variant | sm_90 | sm_100 |" in table


@pytest.mark.parametrize("as_json", [False, True])
def test_report_fails_on_a_spill_and_on_what_does_not_compile(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any = ([ROW, replace(ROW, stack_bytes=8)], ["prefill y on sm_80 does not compile: why"])
    monkeypatch.setattr(aot, "report", lambda capabilities: found)
    assert aot.main(["--json"] if as_json else []) == 1
    out, err = capsys.readouterr()
    assert "paged_attention (decode x) on sm_90 spills" in err
    assert "prefill y on sm_80 does not compile: why" in err
    if as_json:
        assert [row["stack_bytes"] for row in json.loads(out)["kernels"]] == [0, 8]
    monkeypatch.setattr(aot, "report", lambda capabilities: ([ROW], []))
    assert aot.main([]) == 0


def test_a_variant_that_does_not_compile_does_not_hide_the_others() -> None:
    rows, failed = aot.report([90], [Variant("write"), Variant("write", head_dim=33)])
    assert [row.kernel for row in rows] == ["reshape_and_cache"]
    assert len(failed) == 1
    assert "D33" in failed[0]
    assert "even head_dim" in failed[0]


def test_scratch_of_split_decodes_does_not_grow_with_the_chunks_beside_them() -> None:
    cache = allocate_kv_cache(KV_FORMATS["float16"], 2, 8, 16, 64)
    batch = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 301], dtype=torch.int32),
        seq_lens=torch.tensor([16384, 300], dtype=torch.int32),
        block_table=torch.zeros((2, 1024), dtype=torch.int32),
        slot_mapping=torch.zeros(301, dtype=torch.int64),
        max_query_len=300,
        max_seq_len=16384,
        num_decodes=1,
    )
    with aot.recorded_launches() as launches:
        query = torch.zeros((301, 32, 64), dtype=torch.float16)
        triton_backend.paged_attention(query, cache, batch, AttentionOptions(scale=1.0), None)
    decode, merge, chunk, _ = (bound for _, bound, _ in launches if "scale" in bound or "partial_out_ptr" in bound)
    assert decode["out_ptr"].shape == merge["partial_out_ptr"].shape == (1, 32, 32, 64)
    assert (decode["first_token"], chunk["first_token"]) == (0, 1)
    assert chunk["query_ptr"].shape[0] == 300


def test_nothing_is_compiled_under_the_interpreter() -> None:
    code = "from kernels.aot import *; compile_variant(VARIANTS[0], 90)"
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "unset it and start again" in done.stderr
