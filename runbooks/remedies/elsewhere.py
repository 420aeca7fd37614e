"""What to do on engines whose flags are not vLLM's: computed where the values in force are known, else in words."""

from __future__ import annotations

from collections.abc import Callable

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM
from runbooks.remedies.sglang_levers import LEVERS as SGLANG_LEVERS
from runbooks.remedies.tensorrt_llm_levers import LEVERS as TENSORRT_LLM_LEVERS

_LEVERS: dict[str, dict[str, Callable[[Draft], None]]] = {
    SGLANG: SGLANG_LEVERS,
    TENSORRT_LLM: TENSORRT_LLM_LEVERS,
}

_SGLANG_POOL = (
    "Raise --mem-fraction-static while device memory is left: it sizes weights and KV pool together, unset it is "
    "computed at start"
)
_SGLANG_RETRACTION = (
    (
        "Raise --schedule-conservativeness above 1.0, its default: admission then reserves more room for answers and "
        "fewer requests are retracted"
    ),
    _SGLANG_POOL,
)
_TRTLLM_POOL = (
    "Raise kv_cache_config.free_gpu_memory_fraction in the YAML (default 0.9 of what the weights leave) while device "
    "memory is left; of it and kv_cache_config.max_tokens the smaller counts"
)
_TRTLLM_NO_EVICT = (
    (
        "Set scheduler_config.capacity_scheduler_policy to GUARANTEED_NO_EVICT, its default: a request is admitted "
        "only when it fits to its end, so that none is paused; MAX_UTILIZATION pauses"
    ),
    _TRTLLM_POOL,
)
_SGLANG_STEP = (
    "Lower --chunked-prefill-size: answers wait for the chunk of prompt that is computed in between; prompts then "
    "take more chunks"
)

_STEPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("eviction-storm", SGLANG): _SGLANG_RETRACTION,
    ("eviction-storm", TENSORRT_LLM): _TRTLLM_NO_EVICT,
    ("preemption-livelock", SGLANG): (
        "Set --context-length to sglang:max_total_num_tokens at most: what is longer can never be served",
        *_SGLANG_RETRACTION,
    ),
    ("preemption-livelock", TENSORRT_LLM): _TRTLLM_NO_EVICT,
    ("cache-thrash", SGLANG): (
        (
            "Keep dropped blocks in host memory: --enable-hierarchical-cache, with --hicache-ratio (host to device) "
            "or --hicache-size (GB on each rank)"
        ),
        _SGLANG_POOL,
    ),
    ("cache-thrash", TENSORRT_LLM): (
        "Keep dropped blocks in host memory: kv_cache_config.host_cache_size, in bytes",
        _TRTLLM_POOL,
    ),
    ("kv-saturated", SGLANG): ("Bound the queue with --max-queued-requests", _SGLANG_POOL),
    ("kv-saturated", TENSORRT_LLM): (_TRTLLM_POOL,),
    ("head-of-line-block", SGLANG): (
        (
            "Set --context-length to sglang:max_total_num_tokens at most, and raise --max-running-requests where "
            "sglang:num_running_reqs stands at it"
        ),
        (
            "Usage below 0.9 with a queue: admission is too careful. Lower --schedule-conservativeness, whose default "
            "is 1.0, and watch retractions"
        ),
    ),
    ("prefix-hit-collapse", SGLANG): ("See that --disable-radix-cache is not set",),
    ("prefix-hit-collapse", TENSORRT_LLM): ("See that kv_cache_config.enable_block_reuse is true, its default",),
    ("ttft-slo-burn", SGLANG): (
        (
            "Queue above zero: raise --max-running-requests if sglang:num_running_reqs stands at it, else add "
            "replicas; bound the wait with --max-queued-requests"
        ),
        "No queue: raise --chunked-prefill-size, so that a prompt takes fewer chunks; answers in flight then slow down",
    ),
    ("itl-slo-burn", SGLANG): (_SGLANG_STEP, "Lower --max-running-requests when the batch itself is too large"),
    ("gpu-memory-creep", SGLANG): (
        (
            "Lower --mem-fraction-static only by what another process on the device has taken; a leak inside grows "
            "into that room too"
        ),
    ),
}


def steps_elsewhere(draft: Draft) -> Recommendation:
    """Pulls what levers the target's engine has, adds what is known of it to the steps, and ends the draft."""
    engine = draft.facts.engine
    lever = _LEVERS.get(engine, {}).get(draft.runbook)
    if lever is not None:
        lever(draft)
    for step in _STEPS.get((draft.runbook, engine), ()):
        draft.step(step)
    if draft.changes:
        return draft.done(", ".join(_in_words(c.flag, c.to) for c in draft.changes) + "; then the steps")
    if draft.steps:
        return draft.done(f"No value can be computed for {engine}: do the steps")
    return draft.done(f"What {engine} offers against this is not known here: the page's diagnosis holds, flags do not")


def _in_words(flag: str, to: object) -> str:
    if to is None:
        return f"remove {flag}"
    return flag if to is True else f"{flag} {to}"
