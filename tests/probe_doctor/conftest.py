"""Pages of metrics made of figures: seven scrapes over a window, counters rising evenly, gauges as given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from probe.doctor.observed import Observed, of_pages
from probe.doctor.report import Diagnosis, diagnose

SCRAPES, WINDOW_S, BEGAN = 7, 15.0, 1_700_000_000.0
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "tokens": "vllm:generation_tokens_total",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "evicted": "kvoncall:kv_block_evictions_total",
    "missed_soon": "kvoncall:kv_evicted_before_reuse_total",
    "corrupted": "vllm:corrupted_requests_total",
}
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
}
# name -> (metric, objective's bound)
HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "2.5"),
    "itl": ("vllm:inter_token_latency_seconds", "0.1"),
    "queue": ("vllm:request_queue_time_seconds", "2.5"),
    "prefill": ("vllm:request_prefill_time_seconds", "2.5"),
    "prompt_len": ("vllm:request_prompt_tokens", "1000.0"),
    "answer_len": ("vllm:request_generation_tokens", "1000.0"),
}
INFO = {
    "block_size": "16",
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "num_gpu_blocks": "4001",
    "num_gpu_blocks_override": "None",
    "kv_cache_size_tokens": "64000",
}
Engine = Mapping[str, Any]


def page(engines: Sequence[Engine], at: float, info: Mapping[str, str], started: float | None) -> str:
    """One page: `at` is the place in the window, 0 to 1. A figure is a number, (from, to), or a function of `at`."""

    def value(figure: Any) -> float:
        if callable(figure):
            return float(figure(at))
        return figure[0] + (figure[1] - figure[0]) * at if isinstance(figure, tuple) else float(figure)

    lines = [f"process_start_time_seconds {started}"] if started else []
    labels = ",".join(f'{name}="{text}"' for name, text in info.items())
    lines.append(f'vllm:cache_config_info{{engine="0",{labels}}} 1.0')
    typed: dict[str, str] = {}
    series: dict[str, list[str]] = {}
    for number, engine in enumerate(engines):
        own = f'engine="{number}",model_name="m"'
        for name, figure in engine.items():
            if name in HISTOGRAMS:
                metric, bound = HISTOGRAMS[name]
                count, within, total = (value((0.0, float(part))) for part in figure)
                series.setdefault(metric, []).extend(
                    [
                        f'{metric}_bucket{{{own},le="{bound}"}} {within}',
                        f'{metric}_bucket{{{own},le="+Inf"}} {count}',
                        f"{metric}_count{{{own}}} {count}",
                        f"{metric}_sum{{{own}}} {total}",
                    ]
                )
                typed[metric] = "histogram"
                continue
            metric = {**COUNTERS, **GAUGES}[name]
            more = ',finished_reason="stop"' if name == "finished" else ""
            typed[metric] = "gauge" if name in GAUGES else "counter"
            series.setdefault(metric, []).append(f"{metric}{{{own}{more}}} {value(figure)}")
    for metric, found in series.items():
        lines += [f"# TYPE {metric} {typed[metric]}", *found]
    return "\n".join(lines) + "\n"


@pytest.fixture
def window() -> Callable[..., Observed]:
    """`window(figures or list of figures by replica, engine=, version=, info=, seconds=, started=)`."""

    def make(
        figures: Engine | Sequence[Engine],
        *,
        engine: str = "vllm",
        version: str = "0.32.0",
        info: Mapping[str, str] | None = None,
        seconds: float = WINDOW_S,
        started: Callable[[float], float] | float | None = 1_699_990_000.0,
        lost: Sequence[int] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> Observed:
        engines = [figures] if isinstance(figures, Mapping) else list(figures)
        pages: list[tuple[float, str | None]] = []
        for turn in range(SCRAPES):
            at = turn / (SCRAPES - 1)
            began = started(at) if callable(started) else started
            text = page(engines, at, {**INFO, **(info or {})}, began)
            pages.append((BEGAN + seconds * at, None if turn in lost else text))
        return of_pages(engine, pages, {"version": version, **(facts or {})})

    return make


@pytest.fixture
def diagnosed(window: Callable[..., Observed]) -> Callable[..., Diagnosis]:
    """`window`, and its diagnosis."""
    return lambda *args, **kwargs: diagnose(window(*args, **kwargs))
