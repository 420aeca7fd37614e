"""`python -m kernels.bench`, or `kvoncall bench attention`: how fast attention over the paged cache is on this device.

Needs only torch (and triton on CUDA). Rates of the device first (copying, matrix products), then case by case: the
result is checked against the float64 oracle on sampled rows, and only a right one is timed, in turns with its peers.
Without a CUDA device the torch backend is measured, against copies of the same bytes. Writes attention.json and
attention.md to --output. Exit codes: 0 all right, 1 a result was wrong or a case failed, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from kernels.attention import backend_name
from kernels.bench.cases import BenchCase, cpu_cases, gpu_cases, grouped
from kernels.bench.check import Reference
from kernels.bench.inputs import Inputs, make_inputs, make_pool
from kernels.bench.peers import Side, UnavailableError, cpu_peers, cuda_peers
from kernels.bench.report import describe_device, markdown
from kernels.bench.timing import Stopwatch, measure_copy, measure_matmul

MEMORY_SHARE = 0.6  # of the free memory that one case's KV cache may take
MAX_SECONDS = {"cuda": 420.0, "cpu": 50.0}
SECONDS_A_SIDE = {"cuda": 0.06, "cpu": 0.2}
Progress = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


class Bench:
    """One run over a list of cases; `report` is what it found so far, ready for JSON."""

    def __init__(self, device: torch.device, *, max_seconds: float, quick: bool, progress: Progress) -> None:
        self.device = device
        self.quick = quick
        self.progress = progress
        self.deadline = time.monotonic() + max_seconds
        self.memory = _free_memory(device) * MEMORY_SHARE
        self.watch = Stopwatch(device)
        self.notes: dict[str, None] = {}  # an ordered set
        self.report: dict[str, Any] = {
            "schema": 1,
            **describe_device(device),
            "backend": _backend(device),
            "quick": quick,
            "rates": {},
            "results": [],
        }

    def measure_rates(self) -> None:
        """GB/s of copying and TFLOP/s of a matrix product, which the cases' shares refer to."""
        cuda = self.device.type == "cuda"
        self.progress("copy bandwidth and matrix products")
        num_bytes = int(min(1 << 30, self.memory / 4)) if cuda else 64 << 20
        copies = measure_copy(self.watch, num_bytes=num_bytes >> (6 if self.quick and not cuda else 0))
        dtype = torch.bfloat16 if cuda else torch.float32
        size = 8192 if cuda else 128 if self.quick else 1024
        self.report["rates"] = {
            "copy_gb_per_s": {**copies, "best": max(copies.values())},
            "copy_bytes": num_bytes,
            "matmul_tflop_per_s": measure_matmul(self.watch, size=size, dtype=dtype),
            "flush_us": self.watch.flush_us(),
            "matmul": f"{size} x {size} {str(dtype).removeprefix('torch.')}",
        }

    def run(self, cases: Sequence[BenchCase], save: Save = lambda _: None) -> dict[str, Any]:
        """Measure the cases in order; `save` is given the report whenever it has grown, and at the end."""
        started = time.monotonic()
        self.measure_rates()
        for group in grouped(cases):
            self.report["results"] += self._run_group(group)
            self.report["notes"] = list(self.notes)
            self.report["seconds"] = round(time.monotonic() - started, 1)
            save(self.report)
        return self.report

    def _run_group(self, group: list[BenchCase]) -> Iterator[dict[str, Any]]:
        """Cases that share a pool. Nothing but the pool and one case's tensors is held at a time."""
        if time.monotonic() > self.deadline:
            yield from (_row(case, "skipped", "the time was used up") for case in group)
            return
        fitting = [case for case in group if case.pool_bytes() <= self.memory]
        for case in group:
            if case not in fitting:
                size = case.pool_bytes() / 1e9
                yield _row(case, "skipped", f"needs {size:.0f} GB of {self.memory / 1e9:.0f} GB for the KV cache")
        if not fitting:
            return
        kinds = "+".join(dict.fromkeys(case.kind for case in fitting))
        self.progress(f"{fitting[0].shape.name}, {fitting[0].kv_format}: {kinds}")
        try:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # of the pool before
            pool = make_pool(fitting, self.device)
        except Exception as error:
            yield from (self._no_result(case, error) for case in fitting)
            return
        for number, case in enumerate(fitting):
            if time.monotonic() > self.deadline:
                yield _row(case, "skipped", "the time was used up")
                continue
            try:
                yield self._measure(make_inputs(case, pool, seed=number))
            except Exception as error:  # a kernel that does not compile must not end the run, only be reported
                yield self._no_result(case, error)

    def _no_result(self, case: BenchCase, error: Exception) -> dict[str, Any]:
        if isinstance(error, torch.OutOfMemoryError):
            return _row(case, "skipped", "out of memory")
        self.progress(f"  FAILED {case.name}: {error}")
        return _row(case, "failed", f"{type(error).__name__}: {error}"[:500])

    def _measure(self, inputs: Inputs) -> dict[str, Any]:
        case = inputs.case
        reference = Reference(inputs)
        verdict = reference.check(_run_on_poison(inputs))
        row = _row(case, "ok" if verdict.right else "wrong", "")
        row |= {"error": verdict.error if math.isfinite(verdict.error) else None, "tolerance": verdict.tolerance}
        if verdict.quantization_error is not None:
            row["quantization_error"] = verdict.quantization_error
        if not verdict.right:
            row["reason"] = f"relative error {verdict.error:.2g}, {verdict.tolerance:.0e} allowed: not timed"
            self.progress(f"  WRONG {case.name}: {row['reason']}")
            return row
        sides = {"kernel": inputs.run} | {side.name: side.run for side in self._peers(reference)}
        timings = self.watch.compare(sides, seconds=SECONDS_A_SIDE[self.device.type] / (50 if self.quick else 1))
        row["sides"] = {name: asdict(timing) for name, timing in timings.items()}
        return row | self._speed(case, timings["kernel"].median_us)

    def _peers(self, reference: Reference) -> Iterator[Side]:
        """The peers that run here and are right; why others do not goes to the notes."""
        inputs = reference.inputs
        peers = cuda_peers(inputs) if self.device.type == "cuda" else cpu_peers(inputs)
        for name, set_up in peers:
            try:
                side = set_up()
                if side.checked:
                    verdict = reference.check(side.run())
                    if not verdict.right:  # the fault may be in how we call it: either way it must not be timed
                        raise UnavailableError(f"its result is off by {verdict.error:.2g}")
            except UnavailableError as reason:
                self.notes[f"{name}: {reason}" + ("" if "installed" in str(reason) else f" ({inputs.case.name})")] = (
                    None
                )
            except Exception as error:  # a library that cannot do this case is no failure of ours
                text = str(error).strip().splitlines() or [""]
                self.notes[f"{name}: {type(error).__name__}: {text[0][:200]} ({inputs.case.name})"] = None
            else:
                yield side

    def _speed(self, case: BenchCase, us: float) -> dict[str, float]:
        rates = self.report["rates"]
        gb_per_s, tflop_per_s = case.kv_bytes() / us / 1e3, case.flops() / us / 1e6
        return {
            "us": us,
            "gb_per_s": gb_per_s,
            "share_of_copy": gb_per_s / rates["copy_gb_per_s"]["best"],
            "tflop_per_s": tflop_per_s,
            "share_of_matmul": tflop_per_s / rates["matmul_tflop_per_s"],
        }


def _row(case: BenchCase, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": case.name,
        "kind": case.kind,
        "shape": asdict(case.shape),
        "kv_format": case.kv_format,
        "dtype": case.dtype,
        "batch": case.batch,
        "context": case.context,
        "query_len": case.query_len,
        "skewed": case.skewed,
        "block_size": case.block_size,
        "kv_bytes": case.kv_bytes(),
        "flops": case.flops(),
        "status": status,
        "reason": reason,
    }


def _run_on_poison(inputs: Inputs) -> torch.Tensor:
    """The case's result, made where NaN was: allocators hand freed memory out again, so what is not written shows."""
    shape = inputs.case.shape
    poison = torch.full((*inputs.query.shape[:2], shape.value_dim), torch.nan, device=inputs.query.device)
    stale = poison.to(inputs.query.dtype)
    del poison, stale
    return inputs.run()


def _backend(device: torch.device) -> str:
    name = backend_name(device)
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return f"{name}, interpreted: its times mean nothing" if interpreted else name


def _free_memory(device: torch.device) -> float:
    """Bytes; on the CPU a fixed figure that the CPU's cases stay far below."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 8e9


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help tells more)")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="kvoncall bench attention", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path, metavar="DIR", help="write attention.json and attention.md here")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few and small cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument(
        "--max-seconds", type=float, metavar="S", help="start no case after this long (default: 420 on cuda, 50 on cpu)"
    )
    return parser.parse_args(argv)


def run_bench(
    device: str | None = None,
    *,
    quick: bool = False,
    max_seconds: float | None = None,
    progress: Progress = lambda _: None,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """The whole benchmark; returns what attention.json holds. ValueError when the device is not there.

    max_seconds: no case is started later than this; MAX_SECONDS of the device if None. save: see `Bench.run`.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("there is no CUDA device; leave --device out to measure the CPU")
    where = torch.device("cuda", torch.cuda.current_device()) if has_cuda and device != "cpu" else torch.device("cpu")
    cases = gpu_cases(quick=quick) if where.type == "cuda" else cpu_cases(quick=quick)
    if max_seconds is None:
        max_seconds = MAX_SECONDS[where.type]
    with torch.no_grad():
        return Bench(where, max_seconds=max_seconds, quick=quick, progress=progress).run(cases, save)


def failures(report: dict[str, Any]) -> list[str]:
    """Names of the cases whose result was wrong or that raised."""
    return [row["name"] for row in report["results"] if row["status"] in ("wrong", "failed")]


def _json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _write(report: dict[str, Any], folder: Path) -> None:
    """Both reports, of a run that may be stopped at any time: each file is replaced as a whole."""
    for name, text in (("attention.json", _json(report)), ("attention.md", markdown(report))):
        (folder / f"{name}.new").write_text(text)
        (folder / f"{name}.new").replace(folder / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the tables and returns the exit code."""
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
        report = run_bench(
            options.device,
            quick=options.quick,
            max_seconds=options.max_seconds,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
            save=lambda report: _write(report, options.output) if options.output else None,
        )
    except (ValueError, OSError) as error:
        print(f"bench attention: {error}", file=sys.stderr)
        return 2
    print(_json(report) if options.json else markdown(report), end="")
    wrong = failures(report)
    if wrong:
        print(f"bench attention: {len(wrong)} cases were wrong or failed, first: {wrong[0]}", file=sys.stderr)
    return 1 if wrong else 0
