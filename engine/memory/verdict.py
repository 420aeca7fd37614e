"""Fits, at risk or does not fit: what decides, by how much, and what to turn first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from engine.memory.capacity import Part, Verdict
from engine.memory.deployment import Deployment
from engine.memory.offload import OffloadPlan
from engine.memory.semantics import Semantics
from engine.memory.units import gib

_GIB = 1 << 30
RESERVE_WITH_GRAPHS_OUTSIDE = 3 * _GIB // 2  # graphs and spikes come from it: 0.79 GiB died, 1.57 GiB started
RESERVE_WITH_GRAPHS_INSIDE = _GIB // 2
THIN_MARGIN = 0.03
_REFUSES_TO_START = ("vllm", "kvoncall")


@dataclass(frozen=True)
class Need:
    """needed_bytes: KV of one request of full length. pool_bytes: KV memory with which it fits: with the block that is
    never handed out, and the states of other requests where those are kept for all."""

    needed_bytes: int
    pool_bytes: int
    fits: bool
    largest: int


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    needed_utilization: float | None


def judge(
    deployment: Deployment,
    semantics: Semantics,
    kv_bytes: int,
    parts: Sequence[Part],
    need: Need,
    tokens: int,
    concurrency: float,
    offload: OffloadPlan | None = None,
) -> Outcome:
    """The verdict of a resolved deployment's pool."""
    needed = _needed_utilization(deployment, semantics, kv_bytes, parts, need)
    warnings = _warnings(deployment, semantics, tokens, need.fits)
    crowded = _crowded(deployment, semantics)
    if crowded:
        return Outcome("does_not_fit", crowded, warnings, None)
    if offload is not None and offload.error:
        return Outcome("does_not_fit", tuple(reversed(offload.reasons)), warnings, needed)
    if kv_bytes <= 0:
        return Outcome("does_not_fit", _no_pool(deployment, semantics, kv_bytes, parts, need), warnings, needed)
    if not need.fits:
        return Outcome("does_not_fit", _too_short(deployment, semantics, kv_bytes, need, needed), warnings, needed)
    host = offload.reasons[-1:] if offload is not None and offload.verdict == "at_risk" else ()
    risks = (*_thin_reserve(deployment, semantics, parts), *_thin_margin(semantics, kv_bytes, need), *host)
    length = deployment.max_model_len or 0
    holds = f"{concurrency:,.2f} requests of {length:,} tokens fit at once ({tokens:,} KV tokens)"
    return Outcome("at_risk" if risks else "fits", (*risks, holds), warnings, needed)


def _needed_utilization(
    deployment: Deployment, semantics: Semantics, kv_bytes: int, parts: Sequence[Part], need: Need
) -> float | None:
    """The smallest utilization, to four places, with which one request of full length fits; None if there is none."""
    if deployment.gpu is None or deployment.gpu_memory_utilization is None or not parts:
        return None
    missing = need.pool_bytes - kv_bytes
    total = deployment.gpu.memory_bytes
    if semantics.engine == "tensorrt-llm":
        total = max(1, int(kv_bytes / deployment.gpu_memory_utilization))
    elif semantics.engine == "sglang":
        total -= deployment.other_processes_bytes
    needed = deployment.gpu_memory_utilization + missing / total
    rounded = ceil(needed * 1e4 + 1e-6) / 1e4
    return rounded if 0 < rounded <= 1 else None


def _crowded(deployment: Deployment, semantics: Semantics) -> tuple[str, ...]:
    """vLLM starts only where as much is free as its utilization asks for."""
    gpu, fraction, others = deployment.gpu, deployment.gpu_memory_utilization, deployment.other_processes_bytes
    if semantics.engine != "vllm" or gpu is None or fraction is None or not others or semantics.global_cap:
        return ()
    budget, free = int(gpu.memory_bytes * fraction), gpu.memory_bytes - others
    if free >= budget:
        return ()
    reason = (
        f"other processes leave {gib(free)} free, less than the {gib(budget)} that {semantics.utilization_flag} "
        f"{fraction:g} asks for: {gib(budget - free)} are missing"
    )
    return reason, f"first lever: {semantics.utilization_flag} {free / gpu.memory_bytes * 0.99:.2f}, or another GPU"


def _no_pool(
    deployment: Deployment, semantics: Semantics, kv_bytes: int, parts: Sequence[Part], need: Need
) -> tuple[str, ...]:
    """More utilization alone is never the first answer here: the memory is not there."""
    missing = need.pool_bytes - kv_bytes
    inside = [part for part in parts if part.inside_budget and part.name != "KV cache" and part.bytes]
    spent = ", ".join(f"{part.name} {gib(part.bytes)}" for part in sorted(inside, key=lambda part: -part.bytes))
    decides = (
        f"no memory is left for the KV cache: {spent} take {gib(-kv_bytes)} more than the budget, and one request of "
        f"{deployment.max_model_len:,} tokens needs {gib(need.needed_bytes)}: {gib(missing)} are missing"
    )
    return decides, first_lever(deployment, semantics, parts, missing)


def first_lever(deployment: Deployment, semantics: Semantics, parts: Sequence[Part], missing: int) -> str:
    """The change that frees most of what is missing, by the largest part that a flag can shrink."""
    size = {part.name: part.bytes for part in parts}
    sampling, forward = size.get("logits and sampler", 0), size.get("activation peak", 0)
    choices = []
    if deployment.max_num_seqs and deployment.max_num_seqs > 1 and sampling:
        target = max(1, deployment.max_num_seqs // 4)
        choices.append(
            (sampling * 3 // 4, f"first lever: {semantics.seqs_flag} {target} (from {deployment.max_num_seqs})")
        )
    if deployment.max_num_batched_tokens and deployment.max_num_batched_tokens > 2048 and forward:
        share = 1 - 2048 / deployment.max_num_batched_tokens
        text = f"first lever: {semantics.batch_flag} 2048 (from {deployment.max_num_batched_tokens})"
        choices.append((int(forward * share), text))
    if semantics.graphs_inside_budget and size.get("CUDA graphs"):
        choices.append((size["CUDA graphs"], "first lever: fewer CUDA graph sizes, or --enforce-eager"))
    saved, text = max(choices, default=(0, ""))
    if saved * 2 >= missing and text:
        return f"{text}, which frees about {gib(saved)}"
    weights = size.get("weights", 0)
    tp = f"first lever: {semantics.tp_flag} {deployment.tp * 2}, which halves the {gib(weights)} of weights on each GPU"
    return f"{tp}; {text.removeprefix('first lever: ')} alone frees only {gib(saved)}" if text else tp


def _too_short(
    deployment: Deployment, semantics: Semantics, kv_bytes: int, need: Need, needed: float | None
) -> tuple[str, ...]:
    missing = need.pool_bytes - kv_bytes
    length = f"{deployment.max_model_len:,}"
    refused = "the server refuses to start" if semantics.engine in _REFUSES_TO_START else "longer requests are refused"
    first = (
        f"one request of {length} tokens needs {gib(need.needed_bytes)} of KV cache, the pool has {gib(kv_bytes)}: "
        f"it needs {gib(missing)} more, and {refused}"
    )
    lever = f"first lever: {semantics.length_flag} {need.largest}, the longest that fits"
    if need.largest <= 0:
        lever = f"first lever: {semantics.tp_flag} {deployment.tp * 2}; not even a short request fits"
    if needed is not None:
        lever += f"; for all {length} tokens {semantics.utilization_flag} {needed:g}"
    return first, lever


def _thin_reserve(deployment: Deployment, semantics: Semantics, parts: Sequence[Part]) -> tuple[str, ...]:
    size = {part.name: part.bytes for part in parts}
    if deployment.gpu is None or "reserve" not in size or deployment.kv_cache_bytes is not None:
        return ()
    if semantics.engine in ("vllm", "kvoncall"):
        graphs = 0 if semantics.graphs_inside_budget else size.get("CUDA graphs", 0)
        reserve = size["reserve"] + graphs
        outside = graphs > 0
        limit = RESERVE_WITH_GRAPHS_OUTSIDE if outside else RESERVE_WITH_GRAPHS_INSIDE
        if semantics.engine == "kvoncall" or reserve >= limit:
            return ()
        what = "CUDA graphs and run-time spikes" if outside else "run-time spikes"
        return (
            f"only {gib(reserve)} lie outside the budget for {what}, where {gib(limit)} are safe: lower "
            f"{semantics.utilization_flag} from {deployment.gpu_memory_utilization:g}"
            + (" or add --enforce-eager" if outside else ""),
        )
    if semantics.engine == "sglang" and size["reserve"] < 0:
        flag = semantics.batch_flag
        risk = (
            f"activations and graphs need {gib(-size['reserve'])} more than {semantics.utilization_flag} "
            f"{deployment.gpu_memory_utilization:g} leaves: out of memory at run time; lower it or {flag}"
        )
        return (risk,)
    if size["reserve"] < 0:
        return (f"CUDA graphs need {gib(-size['reserve'])} more than is left free: lower {semantics.utilization_flag}",)
    return ()


def _thin_margin(semantics: Semantics, kv_bytes: int, need: Need) -> tuple[str, ...]:
    spare = kv_bytes - need.pool_bytes
    if not need.needed_bytes or spare >= THIN_MARGIN * need.needed_bytes:
        return ()
    risk = (
        f"one request of full length leaves {gib(spare)} of the pool ({spare / need.needed_bytes:.1%}): another driver "
        f"or version may not start; lower {semantics.length_flag} a little"
    )
    return (risk,)


def _warnings(deployment: Deployment, semantics: Semantics, tokens: int, fits: bool) -> tuple[str, ...]:
    warnings = []
    length = deployment.max_model_len or 0
    windowed = any(group.attention in ("sliding", "chunked", "recurrent") for group in deployment.shape.layers)
    if windowed and fits and tokens < length:
        warnings.append(
            f"the log's {tokens:,} KV tokens are fewer than {length:,}: the engine starts, since windows cap what a "
            f"request holds, but a version that admits by that figure never schedules a longer request"
        )
    if windowed and semantics.tokens_from_concurrency:
        warnings.append(
            "the log's KV tokens are concurrency x max_model_len for this model: do not divide bytes by them, nor "
            "compare them across lengths"
        )
    in_flight = (deployment.max_num_seqs or 0) * (deployment.tokens_per_request or length)
    if in_flight and tokens > 2 * in_flight:
        warnings.append(
            f"at most {in_flight:,} tokens can be in flight ({semantics.seqs_flag} {deployment.max_num_seqs} x "
            f"{deployment.tokens_per_request or length:,}), the pool holds {tokens:,}: cap it and leave others the rest"
        )
    if semantics.global_cap and semantics.engine == "vllm":
        warnings.append(
            "in this version utilization caps what all processes on the GPU hold: a second server needs the sum of "
            "both fractions"
        )
    if deployment.dp > 1:
        share = (
            "share the GPUs, and each has" if deployment.enable_dp_attention else "are servers of their own, each with"
        )
        warnings.append(f"the {deployment.dp} data-parallel ranks {share} a pool of this size: the figures are of one")
    if deployment.other_processes_bytes and not semantics.global_cap:
        warnings.append("start servers that share a GPU one after the other: each measures what the others hold")
    return tuple(warnings)
