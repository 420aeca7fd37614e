"""The attention benchmark: what it counts, that it refuses wrong results, and a whole quick run on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import attention, oracle
from kernels.bench import attention as bench
from kernels.bench import check as checking
from kernels.bench import timing
from kernels.bench.cases import (
    GPU_FORMATS,
    GPU_SHAPES,
    TINY,
    TINY_MLA,
    TINY_WINDOW,
    BenchCase,
    cpu_cases,
    gpu_cases,
    grouped,
)
from kernels.bench.check import Reference, Verdict, expected_rows, sample_rows
from kernels.bench.copy import triton_copy
from kernels.bench.inputs import Inputs, make_inputs, make_pool
from kernels.bench.peers import cpu_peers, cuda_peers
from kernels.bench.timing import Stopwatch
from kernels.kv_cache import LayerKVCache

CPU = torch.device("cpu")
FORMATS = ("float32", *GPU_FORMATS)


@pytest.fixture(autouse=True)
def oracle_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark is under test here, not a backend."""
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")
    monkeypatch.setattr(timing, "MIN_RUNS", 2)  # the oracle is slow


def inputs_of(case: BenchCase) -> Inputs:
    return make_inputs(case, make_pool([case], CPU))


def check(inputs: Inputs, output: torch.Tensor, samples: int | None = None) -> Verdict:
    return Reference(inputs, samples).check(output)


def whole_oracle(inputs: Inputs) -> torch.Tensor:
    cache = inputs.pool.cache
    if isinstance(cache, LayerKVCache):
        return oracle.paged_attention_float64(inputs.query, cache, inputs.metadata, inputs.options)[0]
    return oracle.mla_attention_float64(*inputs.query_parts, cache, inputs.metadata, inputs.case.shape.scale)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("context", [64, 41])
def test_bytes_are_those_of_the_tensors(kv_format: str, context: int) -> None:
    case = BenchCase("decode", TINY, kv_format, "float32", 3, context)
    cache = inputs_of(case).pool.cache
    assert isinstance(cache, LayerKVCache)
    per_block = cache.nbytes // cache.num_blocks
    assert case.pool_bytes() == per_block * case.num_blocks()
    if context % case.block_size == 0:
        assert case.kv_bytes() == case.pool_bytes()
    elif case.format.keeps_open_blocks:
        full, rest = divmod(context, case.block_size)
        assert case.kv_bytes() == 3 * (full * per_block + rest * 2 * 2 * 32 * 4)  # K and V, heads, channels, fp32
    else:
        assert case.kv_bytes() == 3 * context * per_block / case.block_size


def test_bytes_of_a_window_an_mla_cache_and_a_write() -> None:
    window = BenchCase("prefill", TINY_WINDOW, "float32", "float32", 2, 64, 8)
    assert window.kv_bytes() == 2 * (24 + 7) * 2 * 2 * 32 * 4  # the first query's 24 keys and the next 7
    mla = BenchCase("decode", TINY_MLA, "bfloat16", "bfloat16", 3, 50)
    assert mla.kv_bytes() == 3 * 50 * 48 * 2
    write = BenchCase("write", TINY, "int8_per_token_head", "float32", 2, 32, 32)
    assert write.kv_bytes() == 2 * 32 * 2 * 2 * (32 * 4 + 32 + 4)  # fp32 read; codes and a scale written


@pytest.mark.parametrize("shape", [TINY, TINY_WINDOW, TINY_MLA])
def test_operations_are_those_of_the_visible_pairs(shape: Any) -> None:
    case = BenchCase("prefill", shape, "float32", "float32", 2, 40, 7)
    window = shape.sliding_window or 1000
    pairs = sum(1 for q in range(33, 40) for k in range(40) if k <= q and k > q - window)
    assert case.flops() == 2 * pairs * shape.num_q_heads * 2 * (shape.head_dim + shape.value_dim)


def test_skewed_lengths_keep_the_total() -> None:
    case = BenchCase("decode", TINY, "float32", "float32", 32, 4096, skewed=True)
    lens = case.seq_lens()
    assert lens == sorted(lens, reverse=True)
    assert 0.99 < sum(lens) / (32 * 4096) <= 1


def test_the_case_lists_cover_what_they_should() -> None:
    cases = gpu_cases()
    assert len(set(cases)) == len(cases)
    assert {(case.shape, case.kv_format) for case in cases} == {
        (shape, kv_format) for shape in GPU_SHAPES for kv_format in (("bfloat16",) if shape.is_mla else GPU_FORMATS)
    }
    core = len(grouped(cases)) // 2  # every shape and format once, before the rest of the grid
    assert {(run[0].shape, run[0].kv_format) for run in grouped(cases)[:core]} == {
        (c.shape, c.kv_format) for c in cases
    }
    decodes = {(case.batch, case.context) for case in cases if case.kind == "decode" and not case.skewed}
    assert decodes == {(b, c) for b in (1, 16, 64, 256) for c in (1024, 4096, 16384, 65536)}
    numbers = [case for case in cpu_cases() if case.kind == "decode" and case.shape.num_q_heads == 8]
    assert {(case.batch, case.context, case.shape.head_dim) for case in numbers} == {(32, 1024, 64)}
    assert {case.kv_format for case in numbers} == set(FORMATS)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("shape", [TINY, TINY_WINDOW])
@pytest.mark.parametrize("query_len", [1, 19])
def test_cut_out_rows_are_the_oracle_of_the_whole_case(kv_format: str, shape: Any, query_len: int) -> None:
    """Also where a row stands in a block that was full, or still open, when the step ended (int4_kivi)."""
    kind = "decode" if query_len == 1 else "prefill"
    inputs = inputs_of(BenchCase(kind, shape, kv_format, "float32", 3, 70, query_len, skewed=kind == "decode"))
    whole = whole_oracle(inputs)
    assert torch.isfinite(whole).all()  # the poison stays out
    rows = [(seq, query) for seq in range(3) for query in range(0, query_len, 2)]
    cut = expected_rows(inputs, rows, kv_head=1, heads=[2, 3])
    wanted = whole[[seq * query_len + query for seq, query in rows]][:, 2:4]
    torch.testing.assert_close(cut, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("query_len", [1, 19])
def test_cut_out_rows_of_mla(query_len: int) -> None:
    inputs = inputs_of(BenchCase("prefill", TINY_MLA, "bfloat16", "bfloat16", 3, 70, query_len))
    rows = sample_rows(inputs, 3)
    cut = expected_rows(inputs, rows, kv_head=0, heads=[0, 3])
    wanted = whole_oracle(inputs)[[seq * query_len + query for seq, query in rows]][:, [0, 3]]
    torch.testing.assert_close(cut, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [TINY, TINY_WINDOW, TINY_MLA])
@pytest.mark.parametrize("query_len", [1, 16, 64])
def test_sdpa_over_gathered_pages_is_right(shape: Any, query_len: int) -> None:
    kind = "decode" if query_len == 1 else "prefill"
    inputs = inputs_of(BenchCase(kind, shape, "bfloat16", "bfloat16", 2, 64, query_len))
    sides = [set_up() for name, set_up in cuda_peers(inputs) if name.startswith("sdpa")]
    assert len(sides) == 2
    for side in sides:
        assert check(inputs, side.run(), samples=8).error < 2e-2


@pytest.mark.parametrize(
    ("kv_format", "dtype", "allowed"),
    [
        ("float16", "float16", 2e-3),
        ("bfloat16", "bfloat16", 1e-2),
        ("int4_kivi", "float16", 2e-3),
        ("int8_per_token_head", "bfloat16", 1e-2),
        ("bfloat16", "float32", 1e-2),
        ("fp8_e5m2", "float32", 2e-3),
        ("float32", "float32", 1e-4),
    ],
)
def test_tolerances(kv_format: str, dtype: str, allowed: float) -> None:
    assert Reference(inputs_of(BenchCase("decode", TINY, kv_format, dtype, 2, 20))).tolerance == allowed


def test_a_result_is_compared_and_poison_is_seen() -> None:
    inputs = inputs_of(BenchCase("decode", TINY, "float32", "float32", 3, 50))
    output = inputs.run()
    assert check(inputs, output).right
    assert not check(inputs, output * 1.001).right
    output[1, 0, 0] = torch.nan
    assert check(inputs, output).error == float("inf")


def test_fewer_rows_of_long_contexts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BenchCase("prefill", TINY, "float32", "float32", 3, 50, 19)
    short = Reference(inputs_of(case))
    monkeypatch.setattr(checking, "LONG_CONTEXT", 49)
    long = Reference(inputs_of(case))
    assert (len(short.tokens), len(short.heads)) == (3, 2)
    assert (len(long.tokens), len(long.heads)) == (2, 1)
    assert long.check(long.inputs.run()).right
    assert short.tokens[0] == long.tokens[0] == 3 * 19 - 1  # the last query, which sees the most


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_write_is_read_back(kv_format: str) -> None:
    inputs = inputs_of(BenchCase("write", TINY, kv_format, "float32", 2, 64, 64))
    assert not check(inputs, inputs.key).right  # nothing written yet
    verdict = check(inputs, inputs.run())
    assert verdict.right
    assert verdict.quantization_error is not None
    assert (verdict.quantization_error == 0) == (kv_format == "float32")


def test_sides_take_turns() -> None:
    order: list[str] = []
    timings = Stopwatch(CPU).compare({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert order[4:] == ["a", "b"] * timings["a"].runs
    assert timings["a"].min_us <= timings["a"].median_us <= timings["a"].max_us


def test_cpu_peers_copy_the_same_bytes() -> None:
    case = BenchCase("decode", TINY, "float32", "float32", 2, 64)
    peers = {name: set_up() for name, set_up in cpu_peers(inputs_of(case))}
    assert set(peers) == {"torch.clone", "warm copy_", "sdpa, gathered"}
    assert peers["torch.clone"].run().nbytes == case.kv_bytes()
    assert peers["warm copy_"].run().nbytes == case.kv_bytes()


def test_a_quick_run_writes_both_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "attention.json").read_text())
    assert report["device"]["type"] == "cpu"
    assert report["backend"] == "oracle"
    assert report["versions"]["torch"] == torch.__version__
    assert report["rates"]["copy_gb_per_s"]["best"] > 0
    assert [row["name"] for row in report["results"]] == [case.name for case in cpu_cases(quick=True)]
    for row in report["results"]:
        assert row["status"] == "ok"
        assert row["error"] <= row["tolerance"]
        side = row["sides"]["kernel"]
        assert 0 < side["min_us"] <= side["median_us"] == row["us"]
        assert row["gb_per_s"] == pytest.approx(row["kv_bytes"] / row["us"] / 1e3)
        assert ("fp32 path" in row["sides"]) == (row["kv_format"] != "float32")
    tables = (tmp_path / "attention.md").read_text()
    assert capsys.readouterr().out == tables
    for title in ("## Numbers to reach", "## Decode", "## Prefill", "## Cache write"):
        assert title in tables
    assert "## Not timed" not in tables


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One head's last key left out: 1 of 64 tokens."""
    real = oracle.paged_attention

    def off_by_one(query: Any, cache: Any, metadata: Any, *rest: Any) -> torch.Tensor:
        out = real(query, cache, metadata, *rest)
        short = attention.AttentionMetadata(
            **{name: getattr(metadata, name) for name in metadata.__dataclass_fields__ if name != "plans"}
            | {"seq_lens": metadata.seq_lens - 1}
        )
        out[:] = real(query, cache, short, *rest)
        return out

    monkeypatch.setattr(oracle, "paged_attention", off_by_one)
    assert bench.main(["--quick", "--device", "cpu", "--json"]) == 1
    captured = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(captured.out)["results"]}
    attentions = [row for row in rows.values() if row["kind"] != "write" and row["shape"]["latent_rank"] is None]
    assert {row["status"] for row in attentions} == {"wrong"}
    assert all("sides" not in row and "not timed" in row["reason"] for row in attentions)
    assert {row["status"] for row in rows.values() if row["shape"]["latent_rank"] is not None} == {"ok"}
    assert "cases were wrong or failed" in captured.err


def test_a_case_that_raises_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(oracle, "mla_attention", broken)
    report = bench.run_bench("cpu", quick=True)
    failed = [row for row in report["results"] if row["status"] == "failed"]
    assert [row["name"] for row in failed] == bench.failures(report)
    assert {row["shape"]["name"] for row in failed} == {TINY_MLA.name}
    assert all("no such instruction" in row["reason"] for row in failed)


def test_what_the_time_does_not_allow_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--device", "cpu", "--max-seconds", "0"]) == 0
    tables = capsys.readouterr().out
    assert "skipped: the time was used up" in tables
    assert all(case.name in tables for case in cpu_cases(quick=True))


def test_what_the_memory_does_not_allow_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MEMORY_SHARE", 1e-6)
    report = bench.run_bench("cpu", quick=True)
    skipped = [row for row in report["results"] if row["status"] == "skipped"]
    assert skipped
    assert all("GB for the KV cache" in row["reason"] for row in skipped)
    assert {row["name"] for row in skipped} == {case.name for case in cpu_cases(quick=True) if case.pool_bytes() > 8e3}


@pytest.mark.parametrize(
    ("args", "says"), [(["--frobnicate"], "--frobnicate"), (["--output", "/proc/nowhere"], "/proc/nowhere")]
)
def test_bad_arguments_are_one_sentence(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(args) == 2
    message = capsys.readouterr().err
    assert says in message
    assert len(message.splitlines()) == 1


def test_the_triton_copy_copies_and_stops(interpreted: Callable[..., Any]) -> None:
    source = torch.arange(4096 + 5, dtype=torch.int32)
    target = torch.full((4096 + 64,), -1, dtype=torch.int32).share_memory_()
    interpreted(triton_copy, source, target[: 4096 + 5])
    assert torch.equal(target[: 4096 + 5], source)
    assert (target[4096 + 5 :] == -1).all()
