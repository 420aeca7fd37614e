"""Cost of a scheduling step without the model: `python -m engine.bench_scheduler` prints it as JSON.

Measures `schedule` + `update_from_output` with all sequences decoding and prefix caching on. The pool is full of
cached blocks of earlier requests, so that every new block also evicts one; prompt lengths differ, so that
sequences cross block boundaries in different steps as they do in service.
"""

from __future__ import annotations

import json
import statistics
import time

from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler


def bench_step(num_seqs: int = 256, steps: int = 200) -> dict[str, float | int]:
    """Milliseconds per step of `num_seqs` decoding sequences over `steps` steps.

    `step_ms_*` is wall time; `step_cpu_ms_*` is the thread's CPU time, which other processes disturb less.
    """
    block_size, longest_prompt = 16, 512
    max_model_len = longest_prompt + steps + 128  # the first to be admitted decode while the last are prefilled
    num_blocks = 1 + num_seqs * -(-max_model_len // block_size)
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192, block_size=block_size)
    scheduler = Scheduler(config, num_gpu_blocks=num_blocks, max_model_len=max_model_len)

    _fill_cache(scheduler, num_seqs, max_model_len)
    params = SamplingParams(max_tokens=max_model_len, ignore_eos=True)
    for index in range(num_seqs):
        length = longest_prompt // 2 + index % (longest_prompt // 2)
        scheduler.add_request(Request(f"bench-{index}", [index] * length, params))
    while scheduler.waiting or any(request.num_output_tokens == 0 for request in scheduler.running):
        _step(scheduler, 7)

    evictions = scheduler.stats().evictions_total
    wall, cpu = [], []
    for step in range(steps):
        start, cpu_start = time.perf_counter(), time.thread_time()
        _step(scheduler, step)
        cpu.append((time.thread_time() - cpu_start) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
    return {
        "num_seqs": num_seqs,
        "steps": steps,
        "step_ms_median": round(statistics.median(wall), 4),
        "step_ms_p95": round(statistics.quantiles(wall, n=20)[-1], 4),
        "step_cpu_ms_median": round(statistics.median(cpu), 4),
        "step_cpu_ms_p95": round(statistics.quantiles(cpu, n=20)[-1], 4),
        "blocks_evicted": scheduler.stats().evictions_total - evictions,
        "running_at_end": len(scheduler.running),
    }


def _fill_cache(scheduler: Scheduler, num_seqs: int, max_model_len: int) -> None:
    """Leaves the pool free, and all of it cached but for the last, partly filled block of each request."""
    params = SamplingParams(max_tokens=1)
    for index in range(num_seqs):
        scheduler.add_request(Request(f"old-{index}", [10_000 + index] * (max_model_len - 1), params))
    while scheduler.has_unfinished_requests():
        _step(scheduler, 7)


def _step(scheduler: Scheduler, token_id: int) -> None:
    output = scheduler.schedule()
    scheduler.update_from_output(output, [token_id if entry.samples else None for entry in output.scheduled])


if __name__ == "__main__":
    print(json.dumps(bench_step(), indent=2))
