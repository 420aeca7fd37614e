"""What scenarios have in common whose incident is a load: it is sent twice, and every request of the second is served.

A drill's engine computes on one core, so that its steps take about as long on a machine with many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from probe.load.endpoint import Endpoint
from probe.replay.exercise import Bench, Exercise, LoadExercise
from probe.replay.observation import Check, LoadPlan, Observation, alert_fired, alert_resolved, all_completed


class LoadScenario(ABC):
    """One incident whose rule, runbook and id have one name."""

    id: ClassVar[str]
    threads: int | None = 1
    scrape_interval_s: float = 0.5

    @property
    def rule(self) -> str:
        """The alert that must fire."""
        return self.id

    @property
    def runbook(self) -> str:
        """The page with the remedy."""
        return self.id

    def exercise(self, bench: Bench) -> Exercise:
        """The load below, sent twice."""
        return LoadExercise(bench, self.load)

    @abstractmethod
    def load(self, endpoint: Endpoint) -> LoadPlan:
        """What is sent."""

    def reproduced(self, before: Observation) -> list[Check]:
        """What the load showed, and the alert fired."""
        return [*self.shown(before), alert_fired(before, self.rule)]

    def verified(self, after: Observation) -> list[Check]:
        """Every request is served, and the alert resolved and did not fire again."""
        return [all_completed(after), *self.mended(after), alert_resolved(after, self.rule)]

    @abstractmethod
    def shown(self, before: Observation) -> list[Check]:
        """What the first load must show beside the alert."""

    @abstractmethod
    def mended(self, after: Observation) -> list[Check]:
        """What the second load must show beside the alert."""


def measured(observation: Observation, name: str) -> float:
    """A figure of the window; 0 where nothing was sampled."""
    return observation.metrics.get(name) or 0.0
