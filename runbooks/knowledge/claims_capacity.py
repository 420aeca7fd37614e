"""Claims about how many requests fit and what decides it: asked of the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import ConfigError
from runbooks.flags import default_of, known_versions
from runbooks.hardware import why_not_block_size
from runbooks.knowledge.articles_models import (
    A100,
    LLAMA_8B,
    LLAMA_70B,
    QWEN2_72B,
    VERSION,
    per_token,
    planned,
    shape,
)
from runbooks.knowledge.outcome import Outcome, same
from runbooks.knowledge.text import Text, gib
from runbooks.remedies.pool import requests_held

_BLOCK, _TYPICAL, _SHARED = 16, 1_100, 400
_PLANNER = Text("engine.memory.plan", "engine.memory.plan（容量规划）")


def _qwen_on_eight() -> Outcome:
    found = planned(QWEN2_72B, A100, tp=8, max_model_len=4096)
    requests = requests_held(found.kv_tokens, 4096, found.block_size)
    return Outcome(
        (f"pool {gib(found.kv_cache_bytes)} a GPU = {found.kv_tokens:,} tokens / 4,096 = {requests:,} requests",),
        verdict="right" if requests < 16 else "wrong",
        figures={"version": VERSION, "tokens": found.kv_tokens, "requests": requests},
        shown=Text(f"{requests:,} requests", f"{requests:,} 个请求"),
        source=_PLANNER,
    )


def _llama_on_eight() -> Outcome:
    found = planned(LLAMA_70B, A100, tp=8, max_model_len=131072)
    return Outcome(
        (f"{gib(found.kv_cache_bytes)} a GPU = {found.kv_tokens:,} tokens / 131,072 = {found.max_concurrency:.1f}",),
        verdict="right" if found.max_concurrency < 4 else "wrong",
        figures={"version": VERSION, "tokens": found.kv_tokens, "concurrency": found.max_concurrency},
        shown=Text(f"{found.max_concurrency:.1f} requests", f"{found.max_concurrency:.1f} 个请求"),
        source=_PLANNER,
    )


def _prefix_tokens() -> Outcome:
    prompt, requests = 500, 10
    full = prompt // _BLOCK
    rest = prompt - full * _BLOCK
    computed = prompt + (requests - 1) * rest
    return Outcome(
        (f"{prompt} + {requests - 1} x ({prompt} - {full} x {_BLOCK}) = {computed}",),
        computed,
        "half",
        {"computed": computed, "full": full, "block": _BLOCK, "shared": full * _BLOCK, "rest": rest},
    )


def _prefix_memory() -> Outcome:
    requests, shared = 100, _SHARED // _BLOCK * _BLOCK
    alone, together = requests * _TYPICAL, shared + requests * (_TYPICAL - shared)
    saving = 100 * (1 - together / alone)
    return Outcome(
        (f"1 - ({shared} + {requests} x ({_TYPICAL:,} - {shared})) / ({requests} x {_TYPICAL:,}) = {saving:.1f}%",),
        saving,
        "half",
        {"n": requests, "saving": saving},
    )


def _capacity_formula() -> Outcome:
    found = planned(LLAMA_8B, A100, max_model_len=8192)
    rule = found.articles
    return Outcome(
        found.lines,
        verdict="half",
        figures={
            "loose": rule.concurrent_safety_1_3,
            "strict": rule.concurrent_safety_1_5,
            "exact": found.max_concurrency,
        },
        shown=same(f"{found.max_concurrency:.1f}"),
        source=_PLANNER,
    )


def _share(name: str, tp: int) -> float:
    found = planned(name, A100, tp=tp, max_model_len=8192)
    return 100 * found.kv_cache_bytes / sum(part.bytes for part in found.parts)


def _kv_share() -> Outcome:
    small, large = _share(LLAMA_8B, 1), _share(LLAMA_70B, 4)
    inside = all(60 <= share <= 80 for share in (small, large))
    return Outcome(
        (f"{LLAMA_8B} on one: {small:.1f}%", f"{LLAMA_70B} on four: {large:.1f}%"),
        verdict="right" if inside else "half",
        figures={"small": small, "large": large},
        shown=same(f"{small:.0f}%, {large:.0f}%"),
        source=_PLANNER,
    )


def _utilization() -> Outcome:
    found = planned(LLAMA_8B, A100, max_model_len=8192)
    share, util = _share(LLAMA_8B, 1), found.gpu_memory_utilization or 0.0
    return Outcome(
        (f"budget {util:g}, KV {share / 100:.2f} of the device",),
        verdict="right" if abs(share / 100 - util) < 0.01 else "wrong",
        figures={"util": util, "kv": share},
        shown=same(f"{share:.0f}%"),
        source=_PLANNER,
    )


def _reduce_tp() -> Outcome:
    four, eight = (planned(LLAMA_70B, A100, tp=tp, max_model_len=8192) for tp in (4, 8))
    weights = [one.part("weights") for one in (four, eight)]
    return Outcome(
        (
            f"TP 4: weights {gib(weights[0])}, pool {gib(four.kv_cache_bytes)}",
            f"TP 8: {gib(weights[1])}, {gib(eight.kv_cache_bytes)}",
        ),
        verdict="wrong" if eight.kv_cache_bytes > four.kv_cache_bytes else "right",
        figures={
            "w4": gib(weights[0]),
            "w8": gib(weights[1]),
            "k4": four.kv_bytes_per_token,
            "k8": eight.kv_bytes_per_token,
        },
        shown=Text(
            f"pool {gib(four.kv_cache_bytes)} -> {gib(eight.kv_cache_bytes)}",
            f"KV 池 {gib(four.kv_cache_bytes)} → {gib(eight.kv_cache_bytes)}",
        ),
        source=_PLANNER,
    )


def _seqs_times_len() -> Outcome:
    found = planned(LLAMA_8B, A100, max_model_len=8192)
    worst = requests_held(found.kv_tokens, 8192, found.block_size)
    typical = requests_held(found.kv_tokens, _TYPICAL, found.block_size)
    return Outcome(
        (f"{found.kv_tokens:,} tokens: {worst} x 8,192 or {typical} x {_TYPICAL:,}",),
        verdict="right" if worst == typical else "half",
        figures={"worst": worst, "typical": typical},
        shown=same(f"{worst} / {typical}"),
        source=_PLANNER,
    )


def _three_cards() -> Outcome:
    weights_fp8 = (shape(LLAMA_70B).weights_bytes or 0) // 2
    plans = {
        "two": planned(LLAMA_70B, A100, tp=2, max_model_len=32768),
        "four": planned(LLAMA_70B, A100, tp=4, max_model_len=32768),
        "fp8": planned(LLAMA_70B, A100, tp=2, max_model_len=32768, weights_bytes=weights_fp8 // 2),
    }
    fits = {key: _fits(one.fits, one.max_concurrency) for key, one in plans.items()}
    try:
        planned(LLAMA_70B, A100, tp=3, max_model_len=32768)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return Outcome(
        (f"TP 3: {refused}", *(f"{key}: {text.en}" for key, text in fits.items())),
        verdict="wrong" if refused else "right",
        figures={"q_heads": shape(LLAMA_70B).num_q_heads, **fits},
        shown=Text("TP 2 or 4", "TP=2 或 4"),
        source=_PLANNER,
    )


def _fits(fits: bool, concurrency: float) -> Text:
    if fits:
        return Text(f"holds {concurrency:.1f} requests", f"可容纳 {concurrency:.1f} 个请求")
    return Text("does not fit", "放不下")


def _long_context() -> Outcome:
    found = planned(LLAMA_8B, A100, max_model_len=32768)
    return Outcome(
        (f"{found.kv_tokens:,} tokens / 32,768 = {found.max_concurrency:.1f}",),
        verdict="wrong" if found.max_concurrency >= 1 else "right",
        figures={"n": found.max_concurrency},
        shown=Text(f"{found.max_concurrency:.1f} requests", f"{found.max_concurrency:.1f} 个请求"),
        source=_PLANNER,
    )


def _eviction() -> Outcome:
    prompt, generated = 1_000, 2_500
    return Outcome(
        (f"recompute {prompt:,} + {generated:,} = {prompt + generated:,} tokens; the answer goes on after that",),
        verdict="wrong",
        figures={"again": prompt + generated},
        shown=Text("preempted and computed again", "被抢占并重新计算"),
        source=Text(
            "vllm/v1/core/sched/scheduler.py: _preempt_request", "vllm/v1/core/sched/scheduler.py：_preempt_request"
        ),
    )


def _chunked() -> Outcome:
    budget, prompt = 2048, 8192
    on = next(version for version in known_versions("vllm") if default_of("vllm", version, "--enable-chunked-prefill"))
    return Outcome(
        (f"{prompt:,} / {budget:,} = {-(-prompt // budget)} steps",),
        verdict="wrong",
        figures={"steps": -(-prompt // budget), "budget": budget, "since": on},
        shown=Text("later for the prompt itself", "该请求自身更晚"),
        source=Text(
            "vllm/v1/core/sched/scheduler.py: token budget of a step",
            "vllm/v1/core/sched/scheduler.py：每步 token 预算",
        ),
    )


def _block_size() -> Outcome:
    each = per_token(LLAMA_8B)
    waste, request = each * _BLOCK // 2, each * _TYPICAL
    problem = why_not_block_size(8, attention_backend="FLASH_ATTN")
    return Outcome(
        (f"{_BLOCK} / 2 x {each:,} B = {waste:,} B of {request:,} B", problem or ""),
        verdict="wrong" if problem else "half",
        figures={"w16": f"{waste:,}", "request": request, "share": 100 * waste / request},
        shown=same(f"{100 * waste / request:.2f}%"),
    )


COMPUTED: Mapping[str, Callable[[], Outcome]] = {
    "qwen2-72b-16-requests": _qwen_on_eight,
    "llama3-70b-128k-eight-a100": _llama_on_eight,
    "prefix-saves": _prefix_tokens,
    "prefix-saves-memory": _prefix_memory,
    "capacity-formula": _capacity_formula,
    "kv-share-60-80": _kv_share,
    "utilization-is-kv-share": _utilization,
    "reduce-tp-against-oom": _reduce_tp,
    "seqs-times-model-len": _seqs_times_len,
    "llama-70b-three-a100": _three_cards,
    "long-context-needs-quantized-kv": _long_context,
    "eviction-truncates": _eviction,
    "chunked-prefill-ttft": _chunked,
    "block-size-8-32": _block_size,
}
