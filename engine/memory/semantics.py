"""What engines and their versions mean by the same words: utilization, block size, defaults, what is inside the budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.deployment import Deployment


@dataclass(frozen=True)
class Semantics:
    """What decides memory in one engine version. notes: sentences for the plan's warnings (version assumed, ...)."""

    engine: str
    version: tuple[int, ...]
    utilization_flag: str
    default_utilization: float | None
    graphs_inside_budget: bool
    global_cap: bool  # utilization also counts what other processes hold
    null_block: bool
    hybrid_manager: bool
    notes: tuple[str, ...] = ()


def semantics_of(engine: str, version: str | None) -> Semantics:
    """Raises `ConfigError` for an engine that is not known; an unknown version becomes the nearest known."""
    raise NotImplementedError


def resolve(deployment: Deployment) -> Deployment:
    """The deployment with every default of its engine and version filled in."""
    raise NotImplementedError
