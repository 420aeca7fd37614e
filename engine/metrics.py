"""The engine's Prometheus metrics: vLLM's names, labels and buckets, and ours under `kvoncall:`.

Written by the engine thread (it is the LLMEngine's observer), read by a scrape. Samples are plain
additions without locks, because an inter-token latency is observed for every token; a scrape may see a
step half booked, and histogram counts are derived from their buckets, so that each series is consistent
in itself. There are no `_created` series.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.config import EngineConfig
from engine.memory import MemoryPlan

if TYPE_CHECKING:
    from engine.engine import RequestOutput
    from engine.scheduler import SchedulerStats

# vLLM 0.33's buckets.
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
        640, 2560)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
PARAMS_N = (1, 2, 5, 10, 20)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # ours

FINISH_REASONS = ("stop", "length", "abort", "error")
LAST_STEPS = 100


class Histogram:
    """Counts per bucket and a sum; written by one thread."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        """The cumulative buckets for exposition."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, for `/debug/scheduler`."""

    at: float  # Unix time of its end
    step_seconds: float
    num_scheduled_tokens: int
    num_prompt_tokens: int
    num_generation_tokens: int


class EngineMetrics(Collector):
    """Observes one LLMEngine and exposes what it saw. `stats` gives the scheduler's latest published state."""

    def __init__(self, config: EngineConfig, stats: Callable[[], SchedulerStats | None]) -> None:
        self._config = config
        self._stats = stats
        self._labels = {"model_name": config.served_model_name, "engine": "0"}
        self._plan: MemoryPlan | None = None
        self.memory_used: Callable[[], int | None] = lambda: None  # bytes of device memory now
        self.last_steps: deque[StepRecord] = deque(maxlen=LAST_STEPS)
        self._prompt_tokens = self._generation_tokens = self._rejections = 0
        self._finished = dict.fromkeys(FINISH_REASONS, 0)

        self._histograms: list[Histogram] = []
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a finished request.", TOKENS
        )
        self._iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one engine step.", STEP_TOKENS
        )
        self._params_n = self._histogram("vllm:request_params_n", "The n of requests.", PARAMS_N)
        self._params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "The max_tokens of requests, after clamping.", TOKENS
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from arrival to the first token.", TTFT
        )
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a request.", PER_TOKEN
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds per output token after the first, by request.",
            PER_TOKEN,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to the last token.", PER_REQUEST
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Seconds from arrival to the first step.", PER_REQUEST
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "Seconds from the first step to the last token.", PER_REQUEST
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Seconds from the first step to the first token.", PER_REQUEST
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "Seconds from the first to the last token.", PER_REQUEST
        )
        self._preemptions = self._histogram(
            "vllm:request_num_preemptions", "How often a finished request was preempted.", PREEMPTIONS
        )
        self._computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that the prefix cache did not hold.",
            TOKENS,
        )
        self._step_seconds = self._histogram("kvoncall:step_seconds", "Seconds of one engine step.", STEP_SECONDS)
        self.registry = self._registry()

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(name, documentation, bounds)
        self._histograms.append(histogram)
        return histogram

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        return registry

    def set_plan(self, plan: MemoryPlan, memory_used: Callable[[], int | None]) -> None:
        """What is known once the model is loaded; `memory_used` gives bytes of device memory now."""
        self._plan = plan
        self.memory_used = memory_used

    # EngineObserver, called by the engine thread.

    def on_step(
        self, step_seconds: float, num_scheduled_tokens: int, num_prompt_tokens: int, num_generation_tokens: int
    ) -> None:
        self._iteration_tokens.observe(num_scheduled_tokens)
        self._step_seconds.observe(step_seconds)
        self._prompt_tokens += num_prompt_tokens
        self._generation_tokens += num_generation_tokens
        self.last_steps.append(
            StepRecord(time.time(), step_seconds, num_scheduled_tokens, num_prompt_tokens, num_generation_tokens)
        )

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_inter_token(self, itl_s: float) -> None:
        self._itl.observe(itl_s)

    def on_finished(self, output: RequestOutput) -> None:
        reason = output.finish_reason or "error"
        self._finished[reason] = self._finished.get(reason, 0) + 1
        timings = output.metrics
        if timings is None or timings.first_scheduled is None:
            return  # aborted in the queue
        self._request_prompt_tokens.observe(output.num_prompt_tokens)
        self._request_generation_tokens.observe(output.num_output_tokens)
        self._computed_tokens.observe(output.num_prompt_tokens - max(0, output.num_cached_tokens))
        self._preemptions.observe(timings.num_preemptions)
        self._queue.observe(timings.first_scheduled - timings.arrival)
        if timings.first_token is None or timings.last_token is None:
            return  # aborted before its first token
        self._prefill.observe(timings.first_token - timings.first_scheduled)
        self._decode.observe(timings.last_token - timings.first_token)
        self._inference.observe(timings.last_token - timings.first_scheduled)
        self._e2e.observe(timings.last_token - timings.arrival)
        if output.num_output_tokens > 1:
            self._tpot.observe((timings.last_token - timings.first_token) / (output.num_output_tokens - 1))

    # Called by the server.

    def on_submitted(self, n: int, max_tokens: int) -> None:
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def on_rejected(self) -> None:
        self._rejections += 1

    @property
    def tokens_total(self) -> tuple[int, int]:
        """Prompt and generated tokens since start."""
        return self._prompt_tokens, self._generation_tokens

    def exposition(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        return generate_latest(self.registry)

    # Scrape.

    def collect(self) -> Iterable[Metric]:
        if self._config.disable_log_stats:
            return  # as in vLLM, whose /metrics then has the process's own series only
        yield from self._collect_counters()
        stats = self._stats()
        if stats is not None:
            yield from self._collect_stats(stats)
        for histogram in self._histograms:
            yield histogram.family(self._labels)
        if self._plan is not None:
            yield from self._collect_plan(self._plan)

    def _collect_counters(self) -> Iterable[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", self._generation_tokens)
        yield self._counter("vllm:request_success", "Finished requests.", self._finished, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused by a queue limit.", labels=["model_name", "reason"]
        )
        rejections.add_metric([self._labels["model_name"], "max_num_queued_reqs"], self._rejections)
        yield rejections

    def _collect_stats(self, stats: SchedulerStats) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", stats.waiting)
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            {"capacity": stats.waiting, "deferred": 0},
            "reason",
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage)
        yield self._counter("vllm:num_preemptions", "Preemptions.", stats.preemptions_total)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries_total
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits_total
        )
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in any cache.", stats.prefix_hits_total)
        yield self._counter(
            "kvoncall:requests_preempted", "Requests preempted at least once.", stats.preempted_requests_total
        )
        yield self._counter("kvoncall:kv_block_evictions", "Cached blocks dropped for new ones.", stats.evictions_total)
        yield self._counter(
            "kvoncall:kv_evicted_before_reuse",
            "Prompt blocks looked up soon after they were dropped.",
            stats.evicted_before_reuse_total,
        )
        yield self._gauge("kvoncall:kv_blocks", "KV blocks by state.", stats.block_states, "state")
        yield from self._collect_prefix_stats(stats)

    def _collect_prefix_stats(self, stats: SchedulerStats) -> Iterable[Metric]:
        """Who shares the prefix cache with whom, what isolation costs, and whether it was broken."""
        yield self._counter(
            "kvoncall:prefix_hits_by_scope",
            "Prompt tokens found in the prefix cache, by whose blocks they are.",
            stats.prefix_hits_by_scope,
            "scope",
        )
        yield self._counter(
            "kvoncall:prefix_hits_lost_to_isolation",
            "Prompt tokens that sharing with everybody would have found as well.",
            stats.prefix_hits_lost_total,
        )
        yield self._counter(
            "kvoncall:isolation_breaches",
            "Cached blocks served although they are another's, or of other content.",
            stats.isolation_breaches,
            "kind",
        )
        yield self._counter(
            "kvoncall:prefix_hits_refused",
            "Requests whose hits --prefix-cache-verify cut short.",
            stats.prefix_hits_refused,
            "kind",
        )
        yield self._counter(
            "kvoncall:prefix_blocks_expired", "Cached blocks dropped by their time to live.", stats.prefix_expired_total
        )
        yield self._gauge(
            "kvoncall:prefix_cached_blocks",
            "Cached blocks by who computed them, labels hashed.",
            stats.cached_blocks_by_owner,
            "owner",
        )
        yield self._counter("kvoncall:forks", "Requests started from another's blocks.", stats.forks_total)
        yield self._counter(
            "kvoncall:fork_block_copies", "Blocks copied because a fork would write into them.", stats.fork_copies_total
        )
        yield self._gauge("kvoncall:weights_version", "Weight updates since start.", stats.weights_version)

    def _collect_plan(self, plan: MemoryPlan) -> Iterable[Metric]:
        config = self._config
        info = {
            "engine": "0",
            "block_size": plan.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_dtype_skip_layers": list(config.kv_cache_dtype_skip_layers),
            "kv_cache_max_concurrency": plan.max_concurrency,
            "kv_cache_memory_bytes": plan.kv_cache_bytes,
            "kv_cache_size_tokens": plan.kv_cache_size_tokens,
            "num_gpu_blocks": plan.num_gpu_blocks,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
            "prefix_cache_scope": config.prefix_cache_scope,
            "prefix_cache_ttl": config.prefix_cache_ttl,
            "prefix_cache_verify": config.prefix_cache_verify,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's configuration.", labels=list(info))
        family.add_metric([str(value) for value in info.values()], 1)
        yield family
        yield self._gauge(
            "kvoncall:memory_plan_bytes",
            "Device memory by purpose, as planned at start.",
            {
                "device": plan.device_memory_bytes,
                "weights": plan.weights_bytes,
                "activation_peak": plan.activation_peak_bytes,
                "kv_cache": plan.kv_cache_bytes,
                "open_blocks": plan.open_blocks_bytes,
                "bookkeeping": plan.bookkeeping_bytes,
            },
            "part",
        )
        yield self._gauge(
            "kvoncall:kv_bytes_per_token",
            "Bytes of K and V that a token takes over all layers.",
            plan.kv_bytes_per_token,
        )
        used = self.memory_used()
        if used is not None:
            yield self._gauge("kvoncall:device_memory_used_bytes", "Device memory in use.", used)

    def _counter(
        self, name: str, documentation: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._fill(CounterMetricFamily(name, documentation, labels=self._label_names(label)), value)

    def _gauge(
        self, name: str, documentation: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._fill(GaugeMetricFamily(name, documentation, labels=self._label_names(label)), value)

    def _label_names(self, label: str | None) -> list[str]:
        return [*self._labels, label] if label else [*self._labels]

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[str, float]) -> Metric:
        labels = list(self._labels.values())
        if isinstance(value, Mapping):
            for name, part in value.items():
                family.add_metric([*labels, name], part)
        else:
            family.add_metric(labels, value)
        return family
