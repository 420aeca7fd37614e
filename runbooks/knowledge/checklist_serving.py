"""Checks of how a server runs: steps, graphs, parallelism, limits, its version and its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.errors import ConfigError
from engine.memory.offload import host_tier, plan_offload
from runbooks.advisories import advisories_for
from runbooks.engine_names import flag_for
from runbooks.facts import COMPUTE_BOUND_USAGE
from runbooks.facts_deployment import deployment_of, planned
from runbooks.flags import EMBEDDED, known_versions, nearest_version, why_absent
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
    Check,
    unknown,
)
from runbooks.knowledge.outcome import same
from runbooks.knowledge.text import Text, gib
from runbooks.remedies.pool import requests_held

_BY_DEFAULT = Text("by default", "默认")


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
