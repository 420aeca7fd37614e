"""What to write in place of names that are gone or never were, where a dialect's own sources do not say it.

Renames inside a dialect are read from the dialect. Here stand: names replaced by an expression, names with nothing in
their place, and wrong spellings found in published articles and dashboards. Sources: the engines' own definitions by
version (see `probe/dialects/exposed`) and their release notes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """`name`: the metric to use; else `expr`: what stands for it; else only `why`."""

    why: str
    name: str = ""
    expr: str = ""


_V0_ONLY = "it belonged to the V0 scheduler, which swapped; V1 never swaps, it recomputes"
_HITS = "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])"

REPLACED: dict[str, Replacement] = {
    # vLLM: gone, with something else in their place
    "vllm:gpu_prefix_cache_hit_rate": Replacement("the ready-made rate gave way to two counters", expr=_HITS),
    "vllm:cpu_prefix_cache_hit_rate": Replacement("the ready-made rate gave way to two counters", expr=_HITS),
    "vllm:cpu_cache_usage_perc": Replacement(_V0_ONLY),
    "vllm:num_requests_swapped": Replacement(_V0_ONLY, name="vllm:num_preemptions_total"),
    "vllm:time_in_queue_requests": Replacement("", name="vllm:request_queue_time_seconds"),
    "vllm:tokens_total": Replacement(
        "", expr="rate(vllm:prompt_tokens_total[5m]) + rate(vllm:generation_tokens_total[5m])"
    ),
    "vllm:avg_prompt_throughput_toks_per_s": Replacement("", expr="rate(vllm:prompt_tokens_total[1m])"),
    "vllm:avg_generation_throughput_toks_per_s": Replacement("", expr="rate(vllm:generation_tokens_total[1m])"),
    "vllm:spec_decode_draft_acceptance_rate": Replacement(
        "",
        expr="rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / rate(vllm:spec_decode_num_draft_tokens_total[5m])",
    ),
    # vLLM: published, but in no version
    "vllm:cache_usage_percent": Replacement("it is in no version", name="vllm:kv_cache_usage_perc"),
    "vllm:cache_usage_perc": Replacement("it is in no version", name="vllm:kv_cache_usage_perc"),
    "vllm:gpu_cache_usage_percent": Replacement("it is in no version", name="vllm:kv_cache_usage_perc"),
    "vllm:num_cache_evictions": Replacement(
        "no version counts evictions of cached blocks; preemptions are what pressure on the cache does to requests",
        name="vllm:num_preemptions_total",
    ),
    "vllm:avg_generation_throughput": Replacement("it is in no version", expr="rate(vllm:generation_tokens_total[1m])"),
    "vllm:avg_prompt_throughput": Replacement("it is in no version", expr="rate(vllm:prompt_tokens_total[1m])"),
    "vllm:prompt_tokens_per_second": Replacement("it is in no version", expr="rate(vllm:prompt_tokens_total[1m])"),
    "vllm:generation_tokens_per_second": Replacement(
        "it is in no version", expr="rate(vllm:generation_tokens_total[1m])"
    ),
    "vllm:prefix_cache_hit_rate": Replacement("it is in no version", expr=_HITS),
    "vllm:request_preemption_total": Replacement("it is in no version", name="vllm:num_preemptions_total"),
    "vllm:num_prompt_tokens_processed_total": Replacement("it is in no version", name="vllm:prompt_tokens_total"),
    "vllm:num_generation_tokens_processed_total": Replacement(
        "it is in no version", name="vllm:generation_tokens_total"
    ),
    # SGLang
    "sglang:num_retracted_reqs_total": Replacement("it is in no version", name="sglang:num_retracted_requests_total"),
    "sglang:total_retracted_reqs": Replacement("", name="sglang:num_retracted_requests_total"),
    "sglang:num_preemptions_total": Replacement(
        "SGLang calls it retraction", name="sglang:num_retracted_requests_total"
    ),
    "sglang:kv_cache_usage_perc": Replacement("SGLang calls it token_usage", name="sglang:token_usage"),
}

# A gauge that people take the rate of, and the counter they mean.
COUNTER_MEANT = {
    "sglang:num_retracted_reqs": "sglang:num_retracted_requests_total",
    "sglang:total_retracted_reqs": "sglang:num_retracted_requests_total",
    "sglang:cache_hit_rate": "sglang:cached_tokens_total",
}

# Names under an engine's prefix that another program exposes: vLLM production-stack's router.
OTHER_EXPORTERS = frozenset(
    f"vllm:{name}"
    for name in (
        "current_qps", "avg_decoding_length", "num_prefill_requests", "num_decoding_requests",
        "num_incoming_requests_total", "routing_decisions_total", "healthy_pods_total", "avg_latency", "avg_itl",
        "input_tokens_total", "output_tokens_total", "request_errors_total", "request_latency_seconds",
        "request_latency_seconds_bucket", "request_latency_seconds_sum", "request_latency_seconds_count",
    )
)  # fmt: skip

# What people write for a label, and the label that is exposed.
LABEL_MEANT = {
    "model": "model_name",
    "modelname": "model_name",
    "model_id": "model_name",
    "finish_reason": "finished_reason",
    "reason": "finished_reason",
    "engine_id": "engine",
    "engine_index": "engine",
    "engine_idx": "engine",
    "dp_rank": "engine",
}
