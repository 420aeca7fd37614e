"""Decode speed of every KV format on the embedded engine, as a ratio to the full-precision cache in the same run.

One engine a format, in this process, on the same ragged batch. They take turns of a few decode steps, so that whatever
else the machine does in the meantime hits all of them; prompts are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import SamplingParams
from kernels.formats import KV_FORMATS
from probe.bench import Report
from probe.bench.decode import NUM_REQUESTS, PROMPT_TOKENS, ragged_prompts

FULL_PRECISION = "auto"
TURNS = 9
STEPS = 8  # of decoding, in a turn; ragged sequences fill their blocks at different steps
NEW_TOKENS = TURNS * STEPS + 32  # some come while others' prompts are still computed


def bench_formats(
    model: str,
    *,
    report: Report,
    formats: Sequence[str] = tuple(KV_FORMATS),
    num_requests: int = NUM_REQUESTS,
) -> dict[str, Any]:
    """Tokens per second of the full-precision cache and, by format, the ratio to it: median and range over turns."""
    import torch

    engines = {name: _engine(model, name, num_requests) for name in (FULL_PRECISION, *formats)}
    full = engines[FULL_PRECISION].plan.kv_cache_dtype
    engines.pop(full, None)  # it would be compared with itself
    prompts = ragged_prompts(range(4, engines[FULL_PRECISION].dims.vocab_size), seed=1)[:num_requests]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        _run_prompts(engine, prompts)
    order = list(engines)
    for turn in range(TURNS):
        order = [*order[1:], order[0]]  # nobody always follows the same
        for name in order:
            elapsed = _time_steps(engines[name])
            if turn:  # the first warms up
                seconds[name].append(elapsed)
        report(f"turn {turn + 1} of {TURNS}{' (warm-up)' if turn == 0 else ''}")
    exact = seconds.pop(FULL_PRECISION)
    ratios = {name: [a / b for a, b in zip(exact, taken, strict=True)] for name, taken in seconds.items()}
    return {
        "requests": num_requests,
        "prompt_tokens": sum(map(len, prompts)),
        "decode_steps": len(exact) * STEPS,
        "threads": torch.get_num_threads(),
        "full_precision": full,
        "full_precision_tokens_per_s": round(num_requests * STEPS / statistics.median(exact)),
        "full_precision_kv_bytes_per_token": engines[FULL_PRECISION].plan.kv_bytes_per_token,
        **{
            name: {
                "ratio": round(statistics.median(found), 2),
                "ratio_min_max": [round(min(found), 2), round(max(found), 2)],
                "kv_bytes_per_token": engines[name].plan.kv_bytes_per_token,
            }
            for name, found in ratios.items()
        },
        "lowest_ratio": round(min(statistics.median(found) for found in ratios.values()), 2),
    }


def _engine(model: str, kv_cache_dtype: str, num_requests: int) -> LLMEngine:
    longest = PROMPT_TOKENS[1] + NEW_TOKENS
    blocks = 1 + num_requests * -(-longest // EngineConfig().block_size)
    return LLMEngine(
        EngineConfig(
            model=model,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=num_requests,
            max_model_len=longest,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=False,
        )
    )


def _run_prompts(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> None:
    """Steps until every request has its first token, so that all that follows is decoding."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    started: set[str] = set()
    while len(started) < len(prompts):
        started.update(output.request_id for output in engine.step())


def _time_steps(engine: LLMEngine) -> float:
    """Seconds of `STEPS` steps."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return time.perf_counter() - begin
