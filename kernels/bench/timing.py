"""Clocks of the attention benchmark: sides of a comparison take turns, medians count.

On CUDA every run starts with a cold L2: a buffer of more than four times its size is overwritten first. That also
keeps the device busy while the host queues the call: as long as host_us is below the time this takes, the host is not
part of the measurement.
On the CPU the other sides' turns are what empties the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 1 << 30
MIN_RUNS, MAX_RUNS = 5, 30


@dataclass(frozen=True)
class Timing:
    """Microseconds of one side. host_us: median time until the call came back to the host (on the CPU, all of it)."""

    median_us: float
    min_us: float
    max_us: float
    host_us: float
    runs: int


class Stopwatch:
    """Times calls on one device; on CUDA it holds the buffer that flushes the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def once(self, run: Callable[[], object]) -> tuple[float, float]:
        """(microseconds, host microseconds) of one call."""
        if self._flush is None:
            started = time.perf_counter()
            run()
            elapsed = (time.perf_counter() - started) * 1e6
            return elapsed, elapsed
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        self._flush.zero_()
        start.record()
        started = time.perf_counter()
        run()
        host = (time.perf_counter() - started) * 1e6
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end)) * 1e3, host

    def flush_us(self) -> float | None:
        """Microseconds for which flushing keeps the device busy; a host that queues slower than this shows."""
        if self._flush is None:
            return None
        flush = self._flush
        return self.compare({"flush": flush.zero_}, seconds=0.05)["flush"].median_us

    def compare(self, sides: Mapping[str, Callable[[], object]], *, seconds: float) -> dict[str, Timing]:
        """Run the sides in turns, about `seconds` for each, MIN_RUNS to MAX_RUNS rounds after a first that warms up."""
        slowest = max(min(self.once(run)[0] for _ in range(2)) for run in sides.values())
        rounds = min(max(int(seconds * 1e6 / max(slowest, 1.0)), MIN_RUNS), MAX_RUNS)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, run in sides.items():
                taken[name].append(self.once(run))
        return {name: _summary(runs) for name, runs in taken.items()}


def _summary(runs: list[tuple[float, float]]) -> Timing:
    device = [us for us, _ in runs]
    host = statistics.median(us for _, us in runs)
    return Timing(statistics.median(device), min(device), max(device), host, len(runs))


def measure_copy(watch: Stopwatch, *, num_bytes: int) -> dict[str, float]:
    """GB/s, read plus written, of copies between two buffers of num_bytes: torch's, and on CUDA a Triton kernel's."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=watch.device).random_(0, 1 << 30)
    target = torch.zeros_like(source)
    sides: dict[str, Callable[[], object]] = {"torch copy_": lambda: target.copy_(source)}
    if watch.device.type == "cuda":
        from kernels.bench.copy import triton_copy

        triton_copy(source, target)
        if not torch.equal(source, target):
            raise RuntimeError("The Triton copy kernel did not copy.")
        sides["triton copy"] = lambda: triton_copy(source, target)
    timings = watch.compare(sides, seconds=0.2)
    return {name: 2 * source.nbytes / (timing.median_us * 1e3) for name, timing in timings.items()}


def measure_matmul(watch: Stopwatch, *, size: int, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product of random numbers."""
    a, b = (torch.randn((size, size), device=watch.device).to(dtype) for _ in "ab")
    timing = watch.compare({"matmul": lambda: a @ b}, seconds=0.2)["matmul"]
    return float(2 * size**3 / (timing.median_us * 1e6))
