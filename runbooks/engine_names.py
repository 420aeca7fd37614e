"""What engines other than vLLM call the flags and metrics that advice is made of, and what vLLM called them before.

The names of vLLM's newest release are the ones the remedies are written in; the embedded engine has them too.
"""

from __future__ import annotations

import re

from runbooks.flags import EMBEDDED, version_key

VLLM = "vllm"
SGLANG = "sglang"
TENSORRT_LLM = "tensorrt-llm"

_FLAGS = {
    SGLANG: {
        "--max-num-seqs": "--max-running-requests",
        "--max-num-batched-tokens": "--chunked-prefill-size",
        "--max-num-queued-reqs": "--max-queued-requests",
        "--max-model-len": "--context-length",
        "--gpu-memory-utilization": "--mem-fraction-static",
        "--block-size": "--page-size",
    },
    TENSORRT_LLM: {
        "--max-num-seqs": "--max_batch_size",
        "--max-num-batched-tokens": "--max_num_tokens",
        "--max-model-len": "--max_seq_len",
        "--gpu-memory-utilization": "kv_cache_config.free_gpu_memory_fraction",
        "--kv-cache-dtype": "kv_cache_config.dtype",
        "--block-size": "kv_cache_config.tokens_per_block",
    },
}
_METRICS = {
    SGLANG: {
        "vllm:num_preemptions_total": "sglang:num_retracted_requests_total",
        "vllm:num_requests_running": "sglang:num_running_reqs",
        "vllm:num_requests_waiting": "sglang:num_queue_reqs",
        "vllm:kv_cache_usage_perc": "sglang:token_usage",
        "vllm:time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds": "sglang:inter_token_latency_seconds",
    },
}
# name of today -> (first version that has it, the name before). Read from the releases.
_FORMER = {
    VLLM: {
        "vllm:kv_cache_usage_perc": ("0.9.2", "vllm:gpu_cache_usage_perc"),
        "vllm:inter_token_latency_seconds": ("0.10.2", "vllm:time_per_output_token_seconds"),
        "vllm:prefix_cache_hits_total": ("0.9.2", "vllm:gpu_prefix_cache_hits_total"),
        "vllm:prefix_cache_queries_total": ("0.9.2", "vllm:gpu_prefix_cache_queries_total"),
    },
}
# SGLang counts retractions by several names; before the first of these versions by none.
_RETRACTIONS = (
    ("0.5.10.post1", "increase(sglang:num_retracted_requests_total[5m]) == 0"),
    ("0.5.2", "max_over_time(sglang:num_retracted_reqs[5m]) == 0"),
    ("0", "max_over_time(sglang:token_usage[5m]) < 1"),
)
_SUFFIXES = ("_bucket", "_sum", "_count")
_SERIES = re.compile(r"\b[a-z]+:[a-zA-Z_]+")
_HIT_COUNTERS_SINCE = "0.7.3"


def has_vllm_flags(engine: str) -> bool:
    """Whether the engine takes vLLM's flags, so that a value in one of them can be advised."""
    return engine in (EMBEDDED, VLLM)


def flag_for(engine: str, flag: str) -> str:
    """The engine's own flag for one of vLLM's; the same where no other is known."""
    return _FLAGS.get(engine, {}).get(flag, flag)


def vllm_flag(engine: str, flag: str) -> str:
    """vLLM's flag for an engine's own; the same where no other is known."""
    return next((name for name, own in _FLAGS.get(engine, {}).items() if own == flag), flag)


def metric_for(engine: str, metric: str, version: str | None = None) -> str:
    """The engine's own name of one of vLLM's metrics in that version; the same where no other is known."""
    name = _METRICS.get(engine, {}).get(metric, metric)
    since, former = _FORMER.get(engine, {}).get(name, ("0", name))
    if version is not None and version_key(version) < version_key(since):
        return former
    return name


def query_for(engine: str, version: str | None, query: str) -> str:
    """A PromQL query in vLLM's newest names, rewritten in those of the engine and version."""

    def own(match: re.Match[str]) -> str:
        name = match[0]
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), "")
        return metric_for(engine, name.removesuffix(suffix), version) + suffix

    return _SERIES.sub(own, query)


def prefix_hits_query(engine: str, version: str | None) -> str:
    """PromQL that is above zero when prompts are found in the prefix cache."""
    if engine == SGLANG:
        return "sglang:cache_hit_rate"
    if engine == VLLM and version is not None and version_key(version) < version_key(_HIT_COUNTERS_SINCE):
        return "vllm:gpu_prefix_cache_hit_rate"
    hits = "increase(vllm:prefix_cache_hits_total[10m]) / increase(vllm:prefix_cache_queries_total[10m])"
    return query_for(engine, version, hits)


def no_preemptions_query(engine: str, version: str | None) -> str:
    """PromQL that holds while no running request loses its blocks."""
    if engine != SGLANG:
        return f"increase({metric_for(engine, 'vllm:num_preemptions_total', version)}[5m]) == 0"
    here = version_key(version) if version is not None else version_key(_RETRACTIONS[0][0])
    return next(query for since, query in _RETRACTIONS if here >= version_key(since))
