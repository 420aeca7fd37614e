"""Checks of a server's configuration: model, KV memory, performance, operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.errors import ConfigError
from engine.memory.offload import host_tier, plan_offload
from runbooks.advisories import advisories_for
from runbooks.engine_names import flag_for
from runbooks.facts import COMPUTE_BOUND_USAGE
from runbooks.facts_deployment import deployment_of, planned
from runbooks.flags import EMBEDDED, default_of, known_versions, nearest_version, why_absent
from runbooks.hardware import nearest_working, why_not_on
from runbooks.isolation_flags import ALGO, STRONG_ALGOS, why_weaker
from runbooks.knowledge.attention import kind_of
from runbooks.knowledge.checklist_asked import (
    DONE,
    NO_MODEL,
    NO_PLAN,
    NO_TARGET,
    NO_TRAFFIC,
    NOT_HERE,
    OPEN,
    Answer,
    Asked,
    unknown,
)
from runbooks.knowledge.outcome import same
from runbooks.knowledge.text import Text, gib
from runbooks.kv_dtypes import FULL_PRECISION
from runbooks.remedies.pool import requests_held

Check = Callable[[Asked], Answer]
_LONGER = 4  # times the longest request seen: a limit that nobody uses
_WEIGHTS_SHARE, _KV_SHARE = 0.6, 0.2
_TIGHT, _FULL, _LITTLE = 0.8, 0.95, 0.6
_BY_DEFAULT = Text("by default", "默认")
_UNIT = 0.005  # two utilizations that print alike


def _attention(asked: Asked) -> Answer:
    group, shape = asked.kv_group(), asked.shape
    found = asked.facts.kv_bytes_per_token if asked.facts is not None else None
    if found is None and asked.plan is not None:
        found = asked.plan.kv_bytes_per_token
    if group is None or shape is None or not found:
        return NO_MODEL
    return Answer(DONE, "done", {"kind": kind_of(group, shape.num_q_heads or 0), "bytes": found})


def _heads_divide(asked: Asked) -> Answer:
    group, tp = asked.kv_group(), asked.tp
    if group is None:
        return NO_MODEL
    if tp == 1:
        return Answer(DONE, "one")
    if group.attention == "latent":
        return Answer(OPEN, "latent", {"tp": tp})
    heads = group.num_kv_heads
    if heads >= tp:
        return Answer(DONE, "done", {"heads": heads, "tp": tp, "each": heads // tp})
    return Answer(OPEN, "open", {"heads": heads, "tp": tp, "copies": tp // max(1, heads)})


def _context_limit(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    limit, seen = asked.facts.max_model_len, asked.facts.traffic.tokens_per_request_peak
    if limit is None:
        return unknown("the limit in force", "当前上限")
    if seen is None:
        return NO_TRAFFIC
    key = "open" if limit > _LONGER * seen else "done"
    return Answer(OPEN if key == "open" else DONE, key, {"limit": limit, "seen": seen, "times": limit / max(1, seen)})


def _weights_share(asked: Asked) -> Answer:
    found = asked.plan
    total = sum(part.bytes for part in found.parts) if found is not None else 0
    if found is None or not total:
        return NO_PLAN
    share, kv = found.part("weights") / total, max(0, found.kv_cache_bytes) / total
    tight = share > _WEIGHTS_SHARE and kv < _KV_SHARE
    return Answer(OPEN if tight else DONE, "open" if tight else "done", {"share": share, "kv": kv})


def _window_layers(asked: Asked) -> Answer:
    if asked.shape is None:
        return NO_MODEL
    groups = [group for group in asked.shape.layers if group.attention in ("sliding", "chunked") and group.window]
    if not groups:
        return Answer(NOT_HERE, "none")
    figures = {"count": sum(group.count for group in groups), "window": groups[0].window}
    off = asked.in_force("--disable-hybrid-kv-cache-manager").value
    if asked.plan is not None and not asked.plan.deployment.hybrid_kv_cache:
        off = True
    return Answer(OPEN if off else DONE, "open" if off else "done", figures)


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


def _continuous(asked: Asked) -> Answer:
    return Answer(DONE, "done", {"engine": asked.title}) if asked.engine else NO_TARGET


def _chunked(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if asked.engine == "sglang":
        size = asked.in_force("--chunked-prefill-size").value
        off = size is not None and int(size) < 0
        return Answer(
            OPEN if off else DONE, "open" if off else "done", {"how": same(str(size)) if size else _BY_DEFAULT}
        )
    flag = "--enable_chunked_prefill" if asked.engine == "tensorrt-llm" else "--enable-chunked-prefill"
    found = asked.in_force(flag)
    if found.value is None:
        return unknown(f"{flag} in force", f"{flag} 的当前值")
    how = Text("as it is set", "显式设置") if found.how == "set" else _BY_DEFAULT
    return Answer(DONE, "done", {"how": how}) if found.value else Answer(OPEN, "open")


def _step_size(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    traffic = asked.facts.traffic
    if traffic.itl_s_p99 is None or traffic.itl_bound_s is None:
        return NO_TRAFFIC
    late = traffic.itl_s_p99 > traffic.itl_bound_s
    budget = asked.facts.max_num_batched_tokens
    figures = {
        "p99": 1000 * traffic.itl_s_p99,
        "bound": 1000 * traffic.itl_bound_s,
        "budget": f"{budget:,}" if budget is not None else "?",
    }
    return Answer(OPEN if late else DONE, "open" if late else "done", figures)


def _graphs(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if asked.engine == EMBEDDED:
        return Answer(NOT_HERE, "cpu")
    eager = bool(asked.facts.flags.get("--enforce-eager") or asked.facts.flags.get("--disable-cuda-graph"))
    if not eager:
        return Answer(DONE, "done")
    deployment = deployment_of(asked.facts)
    found = planned(replace(deployment, enforce_eager=False)) if deployment is not None else None
    if found is None or isinstance(found, str) or not found.part("CUDA graphs"):
        return Answer(OPEN, "open_unplanned")
    return Answer(OPEN, "open", {"graphs": gib(found.part("CUDA graphs"))})


def _parallelism(asked: Asked) -> Answer:
    if asked.tp == 1:
        return Answer(NOT_HERE, "one") if asked.facts is not None or asked.plan is not None else NO_TARGET
    if asked.plan is None or asked.facts is None or not asked.plan.parts:
        return NO_PLAN
    traffic = asked.facts.traffic
    if traffic.peak_demand is None or traffic.tokens_per_request_peak is None:
        return NO_TRAFFIC
    half = asked.tp // 2
    deployment = asked.plan.deployment
    smaller = replace(
        deployment,
        tp=half,
        num_gpus=half * deployment.pp * deployment.dp,
        weights_bytes=None,
        activation_bytes=None,
        kv_cache_bytes=None,
        num_gpu_blocks_override=None,
    )
    found = planned(smaller)
    if isinstance(found, str) or not found.fits:
        return Answer(DONE, "not_fit", {"half": half})
    held = requests_held(found.kv_tokens, traffic.tokens_per_request_peak, found.block_size)
    enough = held >= traffic.peak_demand
    figures = {"half": half, "n": held, "wanted": traffic.peak_demand}
    return Answer(OPEN if enough else DONE, "open" if enough else "done", figures)


def _speculative(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    names = ("--speculative-config", "--speculative-model", "--speculative-algorithm", "--speculate")
    there = [name for name in names if why_absent(asked.engine, asked.version, name) is None]
    if not there:
        return Answer(NOT_HERE, "no_flag", {"engine": asked.title})
    given = next((name for name in there if asked.facts.flags.get(name)), None)
    if given is not None:
        return Answer(DONE, "done", {"flag": given})
    if asked.facts.traffic.peak_waiting:
        return Answer(NOT_HERE, "busy")
    return Answer(OPEN, "open", {"flag": there[0]})


def _compute_bound(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    traffic = asked.facts.traffic
    if traffic.peak_waiting is None or traffic.kv_usage_peak is None:
        return NO_TRAFFIC
    figures = {"waiting": traffic.peak_waiting, "peak": traffic.kv_usage_peak}
    bound = traffic.compute_bound and traffic.kv_usage_peak < COMPUTE_BOUND_USAGE
    return Answer(OPEN if bound else DONE, "open" if bound else "done", figures)


def _sequence_limit(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    seqs, pool = asked.in_force(flag_for(asked.engine, "--max-num-seqs")).value, asked.pool_tokens()
    length, _ = asked.facts.request_tokens
    if seqs is None or pool is None or length is None:
        return unknown("the limit, the pool or the length of requests", "并发上限、KV 池或请求长度")
    held = requests_held(pool, length, asked.block_size())
    key = "done" if int(seqs) <= max(1, held) else "open"
    return Answer(DONE if key == "done" else OPEN, key, {"seqs": int(seqs), "held": held, "length": length})


def _queue_limit(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    flag = {"sglang": "--max-queued-requests", "tgi": "--max-concurrent-requests"}.get(
        asked.engine, "--max-num-queued-reqs"
    )
    if why_absent(asked.engine, asked.version, flag) is not None:
        return Answer(OPEN, "no_flag", {"engine": asked.title, "version": asked.version or ""})
    value = asked.in_force(flag).value
    return Answer(DONE if value else OPEN, "done" if value else "open", {"flag": flag, "value": value})


def _advisories(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if asked.version is None:
        return unknown("the engine's version", "引擎版本")
    found = [one for one in advisories_for(asked.engine, asked.version, asked.facts.flags) if one.certain]
    if found:
        ids = ", ".join(f"{one.id} ({one.fixed})" if one.fixed else one.id for one in found)
        return Answer(OPEN, "open", {"ids": ids})
    return Answer(DONE, "done", {"engine": asked.title, "version": asked.version})


def _known_version(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    if asked.engine == EMBEDDED:
        return Answer(DONE, "done", {"engine": asked.title, "version": asked.version or ""})
    if asked.version is None:
        return Answer(OPEN, what=unknown("the engine's version", "引擎版本").what)
    if not known_versions(asked.engine):
        return unknown(f"a catalog of {asked.engine}", f"{asked.engine} 的参数目录")
    near, note = nearest_version(asked.engine, asked.version)
    figures = {"engine": asked.title, "version": asked.version, "near": near, "note": note or ""}
    return Answer(DONE, "near" if note else "done", figures)


def _host_memory(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    deployment = deployment_of(asked.facts)
    if deployment is None:
        return Answer(NOT_HERE, "none") if not asked.facts.flags.get("--kv-offloading-size") else NO_MODEL
    try:
        tier = host_tier(deployment)
    except ConfigError:
        return unknown(f"how {asked.title} keeps KV in host memory", f"{asked.title} 的主机内存 KV 层")
    if tier is None:
        return Answer(NOT_HERE, "none")
    host = asked.facts.host_memory_bytes
    if host is None:
        return unknown("the memory of the host", "主机内存")
    base = asked.facts.host_other_bytes or 0
    found = plan_offload([tier], deployment.tp * deployment.pp, host, base_bytes=base)
    figures = {
        "total": gib(found.total_bytes + found.base_bytes),
        "host": gib(host),
        "reason": " ".join(found.reasons[-1:]),
    }
    fits = found.verdict == "fits"
    return Answer(DONE if fits else OPEN, "done" if fits else "open", figures)


def _own_card(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    others = asked.facts.other_processes_bytes
    if others is None:
        return unknown("what other processes hold", "其他进程的占用")
    return Answer(OPEN, "open", {"others": gib(others)}) if others else Answer(DONE, "done")


CHECKS: Mapping[str, Check] = {
    "attention-kind": _attention,
    "heads-divide": _heads_divide,
    "context-limit": _context_limit,
    "weights-share": _weights_share,
    "window-layers": _window_layers,
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
    "continuous-batching": _continuous,
    "chunked-prefill": _chunked,
    "step-size": _step_size,
    "cuda-graphs": _graphs,
    "parallelism": _parallelism,
    "speculative": _speculative,
    "compute-bound": _compute_bound,
    "sequence-limit": _sequence_limit,
    "queue-limit": _queue_limit,
    "advisories": _advisories,
    "known-version": _known_version,
    "host-memory": _host_memory,
    "own-card": _own_card,
}
