"""What each change of a flag would buy: every lever is planned anew, so its gain is exact, and its cost is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.memory.capacity import CapacityPlan
from engine.memory.deployment import Deployment


@dataclass(frozen=True)
class Lever:
    """One change. changes: the engine's flag -> value (None unsets). gained_tokens against the plan as it is.

    possible: False when the engine, its version or the hardware cannot do it; then why_not says why and plan is the
    plan as it would be if it could.
    """

    key: str
    what: str
    changes: dict[str, Any]
    plan: CapacityPlan
    gained_tokens: int
    cost: str
    possible: bool = True
    why_not: str = ""


def levers(deployment: Deployment) -> list[Lever]:
    """Every lever, the largest gain first, impossible ones last."""
    raise NotImplementedError
