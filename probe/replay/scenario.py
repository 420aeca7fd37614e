"""What an incident scenario is, and the list of them.

A scenario is data and pure functions: flags of the drill engine, a load, and what counts as reproduced and as
verified. It acts on nothing; `probe.replay.runner` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from probe.load.endpoint import Endpoint
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.eviction_storm import EvictionStorm
from probe.replay.scenarios.oom import OutOfMemory


class ReplayError(RuntimeError):
    """A replay that cannot be carried out; the message is one sentence for the user."""


class Scenario(Protocol):
    """One incident. `rule` is the alert that must fire, `runbook` the page that holds the remedy.

    `article_case` is the published case the drill is scaled from, with its true figures. `time_scale` shortens the
    rules' windows for this target.
    """

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def hypothesis(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def runbook(self) -> str: ...
    @property
    def article_case(self) -> Mapping[str, Any]: ...
    @property
    def time_scale(self) -> float: ...
    @property
    def scrape_interval_s(self) -> float: ...

    def flags(self) -> list[str]:
        """Command line of the drill engine, as the operator of the incident had it."""

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """The load, fitted to the engine that started."""

    def reproduced(self, before: Observation) -> list[Check]:
        """Whether the incident happened, from what was measured."""

    def verified(self, after: Observation) -> list[Check]:
        """Whether the remedy holds, from what was measured under the same load."""


SCENARIOS: dict[str, Scenario] = {scenario.id: scenario for scenario in (EvictionStorm(), OutOfMemory())}


def list_scenarios() -> list[Scenario]:
    """All scenarios, by id."""
    return [SCENARIOS[scenario_id] for scenario_id in sorted(SCENARIOS)]


def get_scenario(scenario_id: str) -> Scenario:
    """One scenario; raises `ReplayError` naming those there are."""
    if scenario_id not in SCENARIOS:
        raise ReplayError(f"no replay named {scenario_id!r}; there are: {', '.join(sorted(SCENARIOS))}")
    return SCENARIOS[scenario_id]
