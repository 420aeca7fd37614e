"""What an incident scenario is, and the list of them.

A scenario is data and pure functions: flags of the drill engine, a load, and what counts as reproduced and as
verified. It acts on nothing; `probe.replay.runner` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from probe.replay.exercise import Bench, Exercise
from probe.replay.observation import Check, Observation
from probe.replay.scenarios.cache_thrash import CacheThrash
from probe.replay.scenarios.engine_faults import EngineStall, GPUMemoryCreep, KVBlockLeak
from probe.replay.scenarios.eviction_storm import EvictionStorm
from probe.replay.scenarios.head_of_line_block import HeadOfLineBlock
from probe.replay.scenarios.int4_degradation import MODELS, Int4Degradation
from probe.replay.scenarios.itl_slo_burn import ITLBurn
from probe.replay.scenarios.kv_saturated import KVSaturated
from probe.replay.scenarios.metrics_unknown import MetricsUnknown
from probe.replay.scenarios.oom import OutOfMemory
from probe.replay.scenarios.preemption_livelock import PreemptionLivelock
from probe.replay.scenarios.prefix_collision import ATTACKS, PrefixCollision
from probe.replay.scenarios.prefix_hit_collapse import PrefixHitCollapse
from probe.replay.scenarios.storm_on_server import StormOnServer
from probe.replay.scenarios.target_missing import TargetMissing
from probe.replay.scenarios.ttft_slo_burn import TTFTBurn


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
    @property
    def threads(self) -> int | None:
        """Cores the drill engine computes on; None: all."""

    def flags(self) -> list[str]:
        """Command line of the drill engine, as the operator of the incident had it."""

    def exercise(self, bench: Bench) -> Exercise:
        """What is done to the engine that started."""

    def reproduced(self, before: Observation) -> list[Check]:
        """Whether the incident happened, from what was measured."""

    def verified(self, after: Observation) -> list[Check]:
        """Whether the remedy holds, from what was measured under the same load."""


SCENARIOS: dict[str, Scenario] = {
    scenario.id: scenario
    for scenario in (
        CacheThrash(),
        EngineStall(),
        EvictionStorm(),
        GPUMemoryCreep(),
        HeadOfLineBlock(),
        Int4Degradation(),
        KVBlockLeak(),
        KVSaturated(),
        MetricsUnknown(),
        OutOfMemory(),
        PreemptionLivelock(),
        PrefixCollision(),
        PrefixHitCollapse(),
        TargetMissing(),
        TTFTBurn(),
        ITLBurn(),
    )
}
# Forms of one incident; the scenario itself is the first.
VARIANTS: dict[str, dict[str, Scenario]] = {
    Int4Degradation.id: {variant: Int4Degradation(variant) for variant in MODELS},
    PrefixCollision.id: {variant: PrefixCollision(variant) for variant in ATTACKS},
}
# Incidents that a load alone brings about, on a server that is not ours.
ON_SERVER: dict[str, Scenario] = {StormOnServer.id: StormOnServer()}


def list_scenarios() -> list[Scenario]:
    """All scenarios, by id."""
    return [SCENARIOS[scenario_id] for scenario_id in sorted(SCENARIOS)]


def get_scenario(scenario_id: str, variant: str | None = None) -> Scenario:
    """One scenario, in one of its variants; raises `ReplayError` naming those there are."""
    if scenario_id not in SCENARIOS:
        raise ReplayError(f"no replay named {scenario_id!r}; there are: {', '.join(sorted(SCENARIOS))}")
    if variant is None:
        return SCENARIOS[scenario_id]
    variants = VARIANTS.get(scenario_id, {})
    if variant not in variants:
        known = f"there are: {', '.join(variants)}" if variants else "it has none"
        raise ReplayError(f"replay {scenario_id} has no variant {variant!r}; {known}")
    return variants[variant]


def get_server_scenario(scenario_id: str) -> Scenario:
    """A scenario for a server that is not ours; raises `ReplayError` naming those there are."""
    if scenario_id not in ON_SERVER:
        get_scenario(scenario_id)
        raise ReplayError(
            f"replay {scenario_id} needs a drill engine of its own; against a server there are: {', '.join(ON_SERVER)}"
        )
    return ON_SERVER[scenario_id]
