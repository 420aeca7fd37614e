"""Divides the memory of a deployment's GPUs and says whether it fits. Pure arithmetic: nothing is measured."""

from __future__ import annotations

from engine.memory.capacity import ArticleEstimate, CapacityPlan, Part, Verdict
from engine.memory.deployment import Deployment

__all__ = ["ArticleEstimate", "CapacityPlan", "Part", "Verdict", "plan"]


def plan(deployment: Deployment) -> CapacityPlan:
    """The plan of one server. Raises `engine.errors.ConfigError`, one sentence, on impossible input."""
    raise NotImplementedError
