"""Several servers on one GPU: whether their budgets add up, and in which order they may start.

A server started after another sees what that one holds; whether its utilization pays for it depends on the version.
Servers that start together measure each other's loading as their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment
from engine.memory.plan import plan

Order = Literal["sequential", "simultaneous"]


@dataclass(frozen=True)
class SharedPlan:
    """plans: in the order of starting, each with what it sees of the others. fits: all of them do."""

    plans: tuple[CapacityPlan, ...]
    utilization: float
    fits: bool
    reasons: tuple[str, ...]


def held_bytes(planned: CapacityPlan) -> int:
    """What a running server holds of its GPU: all but the reserve and what others hold."""
    return sum(part.bytes for part in planned.parts if part.name not in ("reserve", "other processes"))


def plan_shared(deployments: Sequence[Deployment], order: Order = "sequential") -> SharedPlan:
    """Plans servers that share one GPU. Raises `ConfigError` where they name different ones, or none."""
    if len({deployment.gpu for deployment in deployments}) != 1 or not deployments[0].gpu:
        raise ConfigError("servers that share a GPU must all name the same one: add --gpu to each")
    alone = [plan(deployment) for deployment in deployments]
    plans: list[CapacityPlan] = []
    for index, deployment in enumerate(deployments):
        others = sum(held_bytes(other) for other in (plans if order == "sequential" else ()))
        changed = replace(deployment, other_processes_bytes=deployment.other_processes_bytes + others)
        if order == "simultaneous":
            loading = sum(other.part("weights") for position, other in enumerate(alone) if position != index)
            changed = replace(deployment, non_torch_bytes=alone[index].part("non-torch") + loading)
        plans.append(plan(changed))
    total = sum(planned.gpu_memory_utilization or 0 for planned in alone)
    fits = all(planned.fits for planned in plans)
    reasons = [f"together they ask for {total:.0%} of the GPU"]
    if order == "simultaneous":
        reasons.append("started together, each counts what the others load as its own: start one after the other")
    reasons += [
        f"{planned.deployment.shape.name or 'one'}: {planned.reasons[0]}" for planned in plans if not planned.fits
    ]
    return SharedPlan(tuple(plans), total, fits, tuple(reasons))
