"""The benchmark's way through a CUDA device, as far as it goes without one: its peers, its clock and its tables."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kernels.bench import attention as bench
from kernels.bench import timing
from kernels.bench.cases import (
    GPU_FORMATS,
    LLAMA_8B,
    MLA_16,
    MLA_128,
    TINY,
    TINY_MLA,
    TINY_WINDOW,
    BenchCase,
    gpu_cases,
    grouped,
)
from kernels.bench.inputs import make_inputs, make_pool
from kernels.bench.peers import UnavailableError, cuda_peers
from kernels.bench.report import goals, markdown
from kernels.bench.timing import Stopwatch

CPU = torch.device("cpu")


def test_cases_and_peers_of_a_gpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps on CPU tensors: SDPA takes part, libraries that are not installed are noted once."""
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")
    monkeypatch.setattr(bench, "cpu_peers", cuda_peers)
    for library in ("flash_attn", "flashinfer"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(timing, "MIN_RUNS", 1)
    cases = [
        BenchCase(kind, shape, "bfloat16", "bfloat16", 2, 48, query_len)
        for shape in (TINY, TINY_WINDOW, TINY_MLA)
        for kind, query_len in (("decode", 1), ("prefill", 16), ("prefill", 48))
    ]
    cases += [BenchCase("decode", TINY, name, "float16", 2, 48) for name in GPU_FORMATS if name != "bfloat16"]
    saved: list[int] = []
    report = bench.Bench(CPU, max_seconds=100, quick=True, progress=lambda _: None).run(
        cases, lambda so_far: saved.append(len(so_far["results"]))
    )
    assert saved == [sum(map(len, grouped(cases)[:n])) for n in range(1, len(grouped(cases)) + 1)]
    assert [row["status"] for row in report["results"]] == ["ok"] * len(cases)
    for row in report["results"]:
        sdpa = {"sdpa, gathered", "sdpa, dense"} if row["kv_format"] == "bfloat16" else set()
        assert set(row["sides"]) == {"kernel", *sdpa}
    assert sorted(report["notes"]) == [
        "flash-attn, dense: flash_attn is not installed",
        "flashinfer, paged: flashinfer is not installed",
    ]


def test_a_peer_whose_result_is_wrong_or_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_KERNELS", "oracle")

    def peers(inputs: Any) -> Any:
        yield from cuda_peers(inputs)
        yield "backwards", lambda: bench.Side("backwards", lambda: -inputs.run())
        yield "broken", lambda: bench.Side("broken", lambda: 1 / 0)

    monkeypatch.setattr(bench, "cpu_peers", peers)
    case = BenchCase("decode", TINY, "bfloat16", "bfloat16", 2, 48)
    report = bench.Bench(CPU, max_seconds=100, quick=True, progress=lambda _: None).run([case])
    assert set(report["results"][0]["sides"]) == {"kernel", "sdpa, gathered", "sdpa, dense"}
    notes = "\n".join(report["notes"])
    assert "backwards: its result is off by 2" in notes
    assert "broken: ZeroDivisionError" in notes


def test_scores_of_mla_are_not_materialized_without_bound() -> None:
    case = BenchCase("prefill", TINY_MLA, "bfloat16", "bfloat16", 2, 48, 16)
    inputs = make_inputs(case, make_pool([case], CPU))
    inputs.case = BenchCase("prefill", MLA_128, "bfloat16", "bfloat16", 4, 32768 + 2048, 2048)
    with pytest.raises(UnavailableError, match="4 GiB"):
        next(iter(cuda_peers(inputs)))[1]()


def test_the_clock_flushes_first_and_waits_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """start and end enclose the call and nothing else; the event's milliseconds become microseconds."""
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def elapsed_time(self, end: Event) -> float:
            assert isinstance(end, Event)
            return 0.25

    class Buffer:
        def zero_(self) -> None:
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: order.append("synchronize"))
    watch = Stopwatch(CPU)
    monkeypatch.setattr(watch, "_flush", Buffer())
    us, host_us = watch.once(lambda: order.append("run"))
    assert order == ["flush", "record", "run", "record", "synchronize"]
    assert us == 250
    assert host_us > 0


def test_goals_name_the_worst_case() -> None:
    report = made_up_report()
    found = {what: measured for what, _, measured in goals(report)}
    int4 = next(text for what, text in found.items() if what.startswith("int4_kivi"))
    assert int4.startswith("50% (decode 256 x 65536")
    faster = next(text for what, text in found.items() if "SDPA" in what)
    assert faster.startswith("0.5x (decode 256 x 65536")


def test_every_gpu_case_has_its_place_in_the_tables() -> None:
    report = made_up_report()
    tables = markdown(report)
    rows = [line for line in tables.splitlines() if line.startswith("| 64 x 4096 |")]
    assert len(rows) == 5  # one a shape
    llama = next(row for row in rows if row.count("|") > 10)
    assert llama.count("100.0 us, 80%") == len(GPU_FORMATS)
    assert "32 x 4096 skewed" in tables
    assert "16 x 512 after 32768" in tables
    assert "100.0 us†" in tables  # the host was late
    assert "WRONG: relative error 1" in tables
    assert "NVIDIA H200" in tables


def made_up_report() -> dict[str, Any]:
    """Every GPU case at 80% of both rates in 100 us, SDPA twice as slow; int4_kivi once bad, one case wrong."""
    results = []
    for case in gpu_cases():
        row = bench._row(case, "ok", "")
        bad = case.kv_format == "int4_kivi" and (case.batch, case.context) == (256, 65536) and case.shape == LLAMA_8B
        us = 400.0 if bad else 100.0
        kernel = {"median_us": us, "min_us": us, "max_us": us, "host_us": 900.0 if case.shape == MLA_16 else 50.0}
        sides = {"kernel": kernel}
        if case.kv_format == "bfloat16" and case.kind != "write" and not case.skewed:
            sides["sdpa, gathered"] = kernel | {"median_us": 200.0}
        share = 0.5 if bad else 0.8
        speed = {"us": us, "gb_per_s": 1.0, "tflop_per_s": 1.0, "share_of_copy": share, "share_of_matmul": 0.8}
        results.append(row | {"sides": sides} | speed)
    wrong = bench._row(gpu_cases()[0], "wrong", "relative error 1")
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "device": {"type": "cuda", "name": "NVIDIA H200", "capability": "9.0", "driver": None},
        "versions": {"torch": "2.11", "flash-attn": None},
        "backend": "triton",
        "quick": False,
        "seconds": 400.0,
        "rates": {
            "copy_gb_per_s": {"torch copy_": 4000.0, "triton copy": 4100.0, "best": 4100.0},
            "copy_bytes": 1 << 30,
            "matmul_tflop_per_s": 700.0,
            "matmul": "8192 x 8192 bfloat16",
            "flush_us": 250.0,
        },
        "results": [*results, wrong],
        "notes": [],
    }
