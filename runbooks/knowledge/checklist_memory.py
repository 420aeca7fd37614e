"""Checks of KV memory: the pool against its demand, formats, the prefix cache, tiers."""

from __future__ import annotations

from collections.abc import Mapping

from runbooks.engine_names import flag_for
from runbooks.flags import default_of, why_absent
from runbooks.hardware import nearest_working, why_not_on
from runbooks.isolation_flags import ALGO, STRONG_ALGOS, why_weaker
from runbooks.knowledge.checklist_asked import (
    DONE,
    NO_PLAN,
    NO_TARGET,
    NO_TRAFFIC,
    NOT_HERE,
    OPEN,
    Answer,
    Asked,
    Check,
    unknown,
)
from runbooks.knowledge.text import Text, gib
from runbooks.kv_dtypes import FULL_PRECISION
from runbooks.remedies.pool import requests_held

_TIGHT, _FULL, _LITTLE = 0.8, 0.95, 0.6
_UNIT = 0.005  # two utilizations that print alike


def _plan_fits(asked: Asked) -> Answer:
    if asked.plan is None:
        return NO_PLAN
    figures = {
        "n": asked.plan.max_concurrency,
        "length": asked.plan.max_model_len,
        "verdict": asked.plan.verdict.replace("_", " "),
    }
    fits = asked.plan.verdict == "fits"
    return Answer(DONE if fits else OPEN, "done" if fits else "open", figures)


def _utilization(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    flag = flag_for(asked.engine, "--gpu-memory-utilization")
    value, default = asked.in_force(flag).value, default_of(asked.engine, asked.version, flag)
    device = asked.facts.device_memory_bytes or (asked.facts.gpu.memory_bytes if asked.facts.gpu is not None else None)
    if value is None or default is None:
        return unknown(f"{flag} in force", f"{flag} 的当前值")
    value, default = float(value), float(default)
    figures = {"value": value, "default": default}
    if abs(value - default) < _UNIT:
        return Answer(DONE, "done", figures)
    if value < default and asked.facts.other_processes_bytes:
        return Answer(DONE, "shared", figures)
    if device is None:
        return unknown("the memory of the device", "显存大小")
    if value < default:
        return Answer(OPEN, "low", {**figures, "lost": gib((default - value) * device)})
    return Answer(OPEN, "high", {**figures, "left": gib((1 - value) * device)})


def _pool_holds(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    length, wanted = asked.facts.traffic.tokens_per_request_peak, asked.facts.traffic.peak_demand
    pool, block = asked.pool_tokens(), asked.block_size()
    if length is None or wanted is None:
        return NO_TRAFFIC
    if pool is None:
        return unknown("the size of the pool", "KV 池大小")
    held = requests_held(pool, length, block)
    key = "done" if held >= wanted else "open"
    return Answer(DONE if key == "done" else OPEN, key, {"held": held, "length": length, "wanted": wanted})


def _kv_usage(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    traffic = asked.facts.traffic
    if traffic.kv_usage_peak is None:
        return NO_TRAFFIC
    figures = {"peak": traffic.kv_usage_peak, "waiting": traffic.peak_waiting or 0}
    if traffic.kv_usage_peak > _FULL:
        return Answer(OPEN, "high", figures)
    if traffic.kv_usage_peak >= _LITTLE:
        return Answer(DONE, "done", figures)
    if traffic.peak_waiting:
        return Answer(OPEN, "low_waiting", figures)
    return Answer(DONE, "low", figures)


def _kv_eight_bit(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    value = asked.in_force(flag_for(asked.engine, "--kv-cache-dtype")).value
    if value is None:
        return unknown("the KV format in force", "当前 KV 格式")
    if value not in FULL_PRECISION:
        return Answer(DONE, "done", {"value": value})
    peak, preempted = asked.facts.traffic.kv_usage_peak, asked.facts.traffic.preemptions
    if peak is None:
        return NO_TRAFFIC
    if peak < _TIGHT and not preempted:
        return Answer(NOT_HERE, "not_needed", {"peak": peak})
    sm = asked.facts.compute_capability
    if sm is None:
        return unknown("the compute capability of the GPU", "GPU 计算能力")
    checkpoint, backend = asked.facts.checkpoint_quantization, asked.facts.attention_backend
    values = ("fp8", "fp8_e5m2") if asked.engine == "vllm" else ("fp8_e4m3", "fp8_e5m2")
    found = nearest_working(
        sm,
        values,
        checkpoint_quantization=checkpoint,
        attention_backend=backend,
        engine=asked.engine,
        version=asked.version,
    )
    if found is not None:
        return Answer(OPEN, "possible", {"value": found, "sm": f"{sm[0]}.{sm[1]}", "peak": peak})
    why = why_not_on(sm, values[0], checkpoint_quantization=checkpoint, attention_backend=backend, engine=asked.engine)
    return Answer(NOT_HERE, "impossible", {"why": why or ""})


def _kv_quality(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    value = asked.in_force(flag_for(asked.engine, "--kv-cache-dtype")).value
    if value is None:
        return unknown("the KV format in force", "当前 KV 格式")
    if value in FULL_PRECISION:
        return Answer(NOT_HERE, "exact")
    measured = len(asked.facts.quality_candidates)
    return Answer(DONE if measured else OPEN, "done" if measured else "open", {"value": value, "count": measured})


def _paged(asked: Asked) -> Answer:
    if not asked.engine:
        return NO_TARGET
    block = asked.block_size()
    if block is None:
        return Answer(DONE, "done_unsized", {"engine": asked.title})
    return Answer(DONE, "done", {"engine": asked.title, "block": block})


def _prefix_caching(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if asked.engine == "sglang":
        off = bool(asked.in_force("--disable-radix-cache").value)
        flag = "--disable-radix-cache"
        return Answer(
            OPEN if off else DONE, "open" if off else "done", {"flag": flag, "how": Text("not set", "未设置")}
        )
    flag = "kv_cache_config.enable_block_reuse" if asked.engine == "tensorrt-llm" else "--enable-prefix-caching"
    found = asked.in_force(flag)
    if found.value is None:
        return unknown(f"{flag} in force", f"{flag} 的当前值")
    how = Text("on", "已开启") if found.how == "set" else Text("on by default", "默认开启")
    figures = {"flag": flag, "how": how}
    return Answer(DONE, "done", figures) if found.value else Answer(OPEN, "open", figures)


def _hash(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if why_absent(asked.engine, asked.version, ALGO) is not None:
        return Answer(NOT_HERE, "no_flag", {"engine": asked.title})
    value = asked.in_force(ALGO).value
    if value is None:
        return unknown(f"{ALGO} in force", f"{ALGO} 的当前值")
    if value in STRONG_ALGOS:
        return Answer(DONE, "done", {"value": value})
    why = (why_weaker(ALGO, STRONG_ALGOS[0], value) or "").partition(f"{value} is ")[2] or "no cryptographic hash"
    return Answer(OPEN, "open", {"value": value, "why": why})


def _offload(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    flag = {"sglang": "--enable-hierarchical-cache", "tensorrt-llm": "kv_cache_config.host_cache_size"}.get(
        asked.engine, "--kv-offloading-size"
    )
    if why_absent(asked.engine, asked.version, flag) is not None:
        return Answer(NOT_HERE, "no_flag", {"engine": asked.title, "version": asked.version or ""})
    value = asked.facts.flags.get(flag)
    return Answer(DONE if value else OPEN, "done" if value else "open", {"flag": flag, "value": value})


def _no_override(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    value = asked.facts.flags.get("--num-gpu-blocks-override")
    return Answer(OPEN, "open", {"value": int(value)}) if value is not None else Answer(DONE, "done")


CHECKS: Mapping[str, Check] = {
    "plan-fits": _plan_fits,
    "utilization": _utilization,
    "pool-holds-demand": _pool_holds,
    "kv-usage": _kv_usage,
    "kv-eight-bit": _kv_eight_bit,
    "kv-quality": _kv_quality,
    "paged": _paged,
    "prefix-caching": _prefix_caching,
    "hash-algorithm": _hash,
    "offload-tier": _offload,
    "no-override": _no_override,
}
