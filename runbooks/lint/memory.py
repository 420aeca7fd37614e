"""Lint of memory: what is left outside the budget, several servers on one GPU, host tiers that every rank takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.memory.deployment import Gpu
from engine.memory.offload import HARD_LIMIT, HostTier, plan_offload
from runbooks.flags import version_key
from runbooks.lint.rules import LintFinding, Subject

GIB = 2**30
LEAST_RESERVE_GIB, GOOD_RESERVE_GIB = 1.0, 1.5
GRAPHS_INSIDE_SINCE = "0.21.0"
# Versions that charged an instance for what others already used, so that utilization was a cap on the whole card.
_GLOBAL_CAP = (("0.6.4", "0.6.4"), ("0.8.0", "0.8.5"))


def reserve(subject: Subject) -> Iterator[LintFinding]:
    """Memory outside the budget, which graphs (before vLLM 0.21) and passing peaks need."""
    utilization = subject.number("--gpu-memory-utilization")
    if subject.engine != "vllm" or subject.gpu is None or not utilization or not 0 < utilization <= 1:
        return
    if subject.value("--kv-cache-memory-bytes") is not None:
        return
    gib = (1 - utilization) * subject.gpu.memory_bytes / GIB
    graphs = not subject.is_on("--enforce-eager") and subject.older_than(GRAPHS_INSIDE_SINCE)
    if gib >= (GOOD_RESERVE_GIB if graphs else LEAST_RESERVE_GIB):
        return
    what = "CUDA graphs and passing peaks" if graphs else "passing peaks and the driver"
    share = max(0.0, 1 - GOOD_RESERVE_GIB * GIB / subject.gpu.memory_bytes)
    severity: Literal["warn", "info"] = "warn" if graphs and gib < LEAST_RESERVE_GIB else "info"
    yield LintFinding(
        "small-reserve",
        severity,
        "--gpu-memory-utilization",
        f"{utilization:g} of {subject.gpu.memory_bytes / GIB:.2f} GiB leaves {gib:.2f} GiB for {what}, "
        "which are outside the budget: at risk of running out of memory after the start",
        f"--gpu-memory-utilization {share:.2f}" + (", or --enforce-eager" if graphs else ""),
        "vllm#11251",
        "oom",
    )


def takes_the_rest(subject: Subject) -> Iterator[LintFinding]:
    """TensorRT-LLM's pool takes most of what weights leave, whatever is needed."""
    if subject.engine != "tensorrt-llm" or not subject.given:
        return
    limits = (
        "--kv_cache_free_gpu_memory_fraction",
        "kv_cache_config.free_gpu_memory_fraction",
        "kv_cache_config.max_tokens",
        "kv_cache_config.max_gpu_total_bytes",
        "--extra_llm_api_options",  # a file that was not read may hold any of them
    )
    if subject.find(*limits) is None:
        yield LintFinding(
            "takes-the-rest",
            "info",
            "--kv_cache_free_gpu_memory_fraction",
            "the KV cache takes 90% of the memory that weights leave, whatever batch and length need: nothing else "
            "fits on the card",
            "--kv_cache_free_gpu_memory_fraction, or kv_cache_config.max_tokens = batch x length",
            "TensorRT-LLM#1400",
            "shared-gpu-memory",
        )


def host_tier(subject: Subject) -> Iterator[LintFinding]:
    """Tiers of KV in host memory and on disk against what the host has."""
    for tier, limit, base in _tiers(subject):
        plan = plan_offload([tier], subject.ranks, limit, base_bytes=base)
        disk = tier.name.startswith("disk")
        each = f"{tier.stated_bytes / GIB:,.0f} GiB for each of {subject.ranks} ranks" if tier.per_rank else "in total"
        total = f"{tier.flag} takes {plan.total_bytes / GIB:,.0f} GiB ({each})"
        if base:
            total += f", {(plan.total_bytes + base) / GIB:,.0f} GiB with what is there already"
        if plan.share is None or limit is None:
            if tier.per_rank and subject.ranks > 1:
                yield LintFinding(
                    "per-rank-tier",
                    "info",
                    tier.flag,
                    f"{total}: the flag counts for each rank",
                    "size = host budget / ranks",
                    "LMCache#2901",
                    "offload-host-memory",
                )
            continue
        if plan.share <= HARD_LIMIT:
            continue
        room = (limit * HARD_LIMIT - base) / (subject.ranks if tier.per_rank else 1) / GIB
        what = "the disk" if disk else "host memory"
        at_risk = disk and plan.share <= 1
        yield LintFinding(
            "host-tier-at-risk" if at_risk else "host-tier-too-large",
            "warn" if at_risk else "error",
            tier.flag,
            f"{total}, {plan.share:.0%} of the {limit / GIB:,.0f} GiB of {what}: "
            + ("the node may evict the pod" if disk else "the kernel kills the server, or it does not start"),
            f"{tier.flag} of {max(0.0, room):,.0f} GiB or less",
            "LMCache#2901",
            "offload-host-memory",
        )


def _tiers(subject: Subject) -> Iterator[tuple[HostTier, int | None, int]]:
    """(tier, what there is of its memory, what of that is used already)."""
    host, base = subject.host_memory_bytes, subject.host_base_bytes
    lmcache = subject.offload_bytes_per_rank or _gib(subject.env.get("LMCACHE_MAX_LOCAL_CPU_SIZE"))
    if lmcache:
        yield HostTier("LMCache", lmcache, True, "LMCACHE_MAX_LOCAL_CPU_SIZE"), host, base
    disk = subject.offload_disk_bytes_per_rank or _gib(subject.env.get("LMCACHE_MAX_LOCAL_DISK_SIZE"))
    if disk:
        yield HostTier("disk of LMCache", disk, True, "LMCACHE_MAX_LOCAL_DISK_SIZE"), subject.disk_bytes, base
    if subject.engine in ("vllm", "kvoncall") and (total := subject.number("--kv-offloading-size", written=True)):
        yield HostTier("KV offloading", int(total * GIB), False, "--kv-offloading-size"), host, base
    if subject.engine == "sglang" and (each := subject.number("--hicache-size", written=True)):
        yield HostTier("HiCache", int(each * 10**9), True, "--hicache-size"), host, base


def _gib(text: str | None) -> int | None:
    try:
        return int(float(text) * GIB) if text else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Instance:
    """One of several servers on a GPU."""

    name: str
    utilization: float
    version: str | None = None


def beside_others(subject: Subject) -> Iterator[LintFinding]:
    """A server on a GPU that others use too."""
    mine = subject.number("--gpu-memory-utilization")
    if subject.beside and mine is not None:
        others = [Instance(f"server {n}", share, subject.at) for n, share in enumerate(subject.beside, 1)]
        yield from lint_shared_gpu(subject.gpu, [*others, Instance("this one", mine, subject.at)])


def lint_shared_gpu(
    gpu: Gpu | None, instances: Sequence[Instance], *, simultaneous: bool = False, global_cap: bool | None = None
) -> list[LintFinding]:
    """Servers on one GPU, in the order in which they start.

    global_cap: utilization is a cap on the whole card, None: as each instance's version has it.
    """
    total = sum(one.utilization for one in instances)
    flag, source, runbook = "--gpu-memory-utilization", "vllm#10533", "shared-gpu-memory"
    names = " and ".join(one.name for one in instances)
    if total > 1:
        instead = ", ".join(f"{one.name} {one.utilization / total * 0.95:.2f}" for one in instances)
        message = f"{names} take {total:.2f} of one GPU together"
        return [LintFinding("sum-above-one", "error", flag, message, instead, source, runbook)]
    found = []
    used = 0.0
    for place, one in enumerate(instances):
        capped = _is_global_cap(one.version) if global_cap is None else global_cap
        if capped and place and one.utilization <= used:
            found.append(
                LintFinding(
                    "global-cap",
                    "error",
                    flag,
                    f"{one.name} may use {_of_card(one.utilization, gpu)} and {_of_card(used, gpu)} are in use: "
                    "this version charges an instance for what others hold",
                    f"{one.name} {used + one.utilization:.2f} (the cumulative share), or a later version",
                    source,
                    runbook,
                )
            )
        elif simultaneous and place:
            found.append(
                LintFinding(
                    "started-together",
                    "warn",
                    flag,
                    f"{one.name} measures free memory while {instances[0].name} still loads, and is charged for it: "
                    "its pool comes out too small, or negative",
                    "start one after the other, each when the one before is ready",
                    source,
                    runbook,
                )
            )
        used += one.utilization
    return found


def _is_global_cap(version: str | None) -> bool:
    if version is None:
        return False
    return any(version_key(a) <= version_key(version) <= (*version_key(b), 99) for a, b in _GLOBAL_CAP)


def _of_card(share: float, gpu: Gpu | None) -> str:
    return f"{share:.0%}" if gpu is None else f"{share * gpu.memory_bytes / GIB:.1f} GiB"
