"""KV in host memory: tiers that are sized per rank or for all ranks together, against the memory of the host.

vLLM's --kv-offloading-size is a total over ranks. LMCache's LMCACHE_MAX_LOCAL_CPU_SIZE and SGLang's --hicache-size
are taken by every rank: one figure times tensor- and pipeline-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from engine.memory.engines import engine_name
from engine.memory.units import gib

HARD_LIMIT = 0.9  # of the host's memory: beyond it start-up fails or the node evicts
SAFE_LIMIT = 0.8
OffloadVerdict = Literal["fits", "at_risk", "does_not_fit", "unknown"]


@dataclass(frozen=True)
class HostTier:
    """A tier as its flag states it. per_rank: the flag's size is taken by every rank (LMCache, SGLang hicache)."""

    name: str
    stated_bytes: int
    per_rank: bool
    flag: str


@dataclass(frozen=True)
class OffloadPlan:
    """Tiers against one host. tokens: KV tokens the tiers hold, all ranks together; 0 when the shape is unknown.

    error: more than 90% of the host is taken, which a command must refuse; does_not_fit: more than there is.
    """

    ranks: int
    total_bytes: int
    base_bytes: int
    host_bytes: int | None
    share: float | None
    verdict: OffloadVerdict
    reasons: tuple[str, ...]
    tokens: int
    error: bool


def plan_offload(
    tiers: Sequence[HostTier],
    ranks: int,
    host_bytes: int | None,
    *,
    base_bytes: int = 0,
    kv_bytes_per_token: int | None = None,
) -> OffloadPlan:
    """Ranks x size against the host (memory, or a disk). More than 90% of it is an error, more than all cannot fit.

    base_bytes: what is there already. kv_bytes_per_token: per rank; the tokens are those of the rank's own share,
    since every rank keeps its part of the same tokens.
    """
    if ranks < 1:
        raise ConfigError(f"a server has at least one rank, got {ranks}")
    if host_bytes is not None and host_bytes <= 0:
        raise ConfigError("the host's memory must be more than zero")
    for tier in tiers:
        if tier.stated_bytes < 0:
            raise ConfigError(f"{tier.flag} must not be negative")
    sizes = [tier.stated_bytes * (ranks if tier.per_rank else 1) for tier in tiers]
    total = sum(sizes)
    per_rank = sum(size // ranks for size in sizes)
    tokens = per_rank // kv_bytes_per_token if kv_bytes_per_token else 0
    share = None if host_bytes is None else (total + base_bytes) / host_bytes
    verdict, reasons = _judge(tiers, sizes, ranks, host_bytes, base_bytes, share)
    error = share is not None and share > HARD_LIMIT
    return OffloadPlan(ranks, total, base_bytes, host_bytes, share, verdict, reasons, tokens, error)


def _judge(
    tiers: Sequence[HostTier],
    sizes: Sequence[int],
    ranks: int,
    host_bytes: int | None,
    base_bytes: int,
    share: float | None,
) -> tuple[OffloadVerdict, tuple[str, ...]]:
    reasons = [
        f"{tier.flag} {gib(tier.stated_bytes)} is taken by each of {ranks} ranks: {gib(size)}"
        if tier.per_rank and ranks > 1
        else f"{tier.flag}: {gib(size)} in all"
        for tier, size in zip(tiers, sizes, strict=True)
    ]
    if share is None or host_bytes is None:
        return "unknown", (*reasons, "the host's memory was not given: nothing to compare with")
    taken = sum(sizes) + base_bytes
    reasons.append(f"{gib(taken)} of {gib(host_bytes)} on the host, {share:.0%}")
    if share <= SAFE_LIMIT:
        return "fits", tuple(reasons)
    room = max(0, int(host_bytes * SAFE_LIMIT) - base_bytes)
    per_rank = [tier for tier in tiers if tier.per_rank]
    if per_rank:
        reasons.append(f"set {per_rank[0].flag} to at most {gib(room // ranks)} (80% of the host over {ranks} ranks)")
    elif tiers:
        reasons.append(f"set {tiers[0].flag} to at most {gib(room)} (80% of the host)")
    if share > HARD_LIMIT:
        reasons.append("more than 90% of the host: start-up fails, or the node evicts the server")
    return ("does_not_fit" if share > 1 else "at_risk"), tuple(reasons)


def host_tier(deployment: Deployment) -> HostTier | None:
    """The tier of a deployment's own flags: vLLM's --kv-offloading-size is a total over ranks."""
    if not deployment.kv_offloading_bytes:
        return None
    engine = engine_name(deployment.engine)
    if engine == "sglang":
        return HostTier("hicache", deployment.kv_offloading_bytes, True, "--hicache-size")
    if engine == "tensorrt-llm":
        return HostTier("host cache", deployment.kv_offloading_bytes, True, "host_cache_size")
    if deployment.kv_offloading_per_rank:
        return HostTier("LMCache", deployment.kv_offloading_bytes, True, "LMCACHE_MAX_LOCAL_CPU_SIZE")
    return HostTier("offloading", deployment.kv_offloading_bytes, False, "--kv-offloading-size")
