"""KV in host memory: tiers that are sized per rank or for all ranks together, against the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.memory.deployment import Deployment


@dataclass(frozen=True)
class HostTier:
    """A tier as its flag states it. per_rank: the flag's size is taken by every rank (LMCache, SGLang hicache)."""

    name: str
    stated_bytes: int
    per_rank: bool
    flag: str


@dataclass(frozen=True)
class OffloadPlan:
    """Tiers against one host. tokens: KV tokens the tiers hold, all ranks together; 0 when the shape is unknown."""

    ranks: int
    total_bytes: int
    base_bytes: int
    host_bytes: int | None
    share: float | None
    verdict: Literal["fits", "at_risk", "does_not_fit", "unknown"]
    reasons: tuple[str, ...]
    tokens: int


def plan_offload(
    tiers: Sequence[HostTier],
    ranks: int,
    host_bytes: int | None,
    *,
    base_bytes: int = 0,
    kv_bytes_per_token: int | None = None,
) -> OffloadPlan:
    """Ranks x size against the host. More than 90% of it is an error. kv_bytes_per_token: per rank."""
    raise NotImplementedError


def host_tier(deployment: Deployment) -> HostTier | None:
    """The tier of a deployment's own flags: vLLM's --kv-offloading-size is a total over ranks."""
    raise NotImplementedError
