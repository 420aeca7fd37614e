"""What a replay does to its subject: bring the incident about, and the same again once the remedy is in.

`LoadExercise` sends a load. Others measure something else under the same two calls; the runner does not care.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions, run_load
from probe.load.report import LoadReport
from probe.load.traces import LoadRequest
from probe.replay import report
from probe.replay.evidence import token_pace, traffic, window_metrics
from probe.replay.observation import LoadPlan, Observation
from probe.replay.subject import Subject
from probe.store import Store

EXIT_SETTLES_S = 3.0  # from the load's first lost connection to the supervisor's verdict
EXIT_POLL_S = 0.1


class Note(Protocol):
    """Writes a line to the replay's journal."""

    def __call__(self, message: str, data: dict[str, Any] | None = None) -> None: ...


@dataclass
class Bench:
    """What an exercise works with: a running, watched server and the replay's journal.

    facts: the engine's own account of itself, as it last started.
    """

    store: Store
    drill: Subject
    endpoint: Endpoint
    scrape_interval_s: float
    log_dir: Path
    note: Note
    facts: dict[str, Any] = field(default_factory=dict)

    def restart(self, flags: list[str]) -> None:
        """The engine with other flags; raises `EngineStartError`."""
        self.drill.restart(flags)
        self.facts = self.drill.facts()


@dataclass(frozen=True)
class Repair:
    """What the runbook's steps come to in a drill, where no computed flag is the remedy.

    `flags` of the drill engine go with it; None takes one back to its default.
    """

    sentence: str
    flags: Mapping[str, Any] = field(default_factory=dict)


class Exercise(Protocol):
    """One incident's doing. Raises `EndpointError`, `EngineStartError` or `QualityError` when it cannot be done."""

    @property
    def description(self) -> str:
        """What is sent or measured, in a line."""

    def repair(self) -> Repair | None:
        """Mends what is not the engine's, and says what it was; None where flags alone are the remedy."""
        return None

    def incident(self) -> Observation:
        """Brings the incident about and measures it."""

    def again(self) -> Observation:
        """The same once more, on the engine as it runs now."""

    def facts(self) -> dict[str, Any]:
        """What the runbook needs to know of the incident beyond the engine's own facts."""

    def result(self) -> dict[str, Any]:
        """Keys that this exercise adds to the replay's report."""


class LoadExercise(Exercise):
    """Sends a scenario's load: smoke requests first, then everything."""

    def __init__(self, bench: Bench, make: Callable[[Endpoint], LoadPlan], *, repair: Repair | None = None) -> None:
        self._bench = bench
        self._plan = make(bench.endpoint)
        self._repair = repair
        self._incident: Observation | None = None

    @property
    def description(self) -> str:
        """The load in a line."""
        return self._plan.description

    def incident(self) -> Observation:
        """The load on the engine as the operator of the incident had it."""
        self._incident = self._run("the incident's load")
        return self._incident

    def repair(self) -> Repair | None:
        """The scenario's."""
        return self._repair

    def again(self) -> Observation:
        """The same load on the engine as it runs now."""
        return self._run("the same load")

    def facts(self) -> dict[str, Any]:
        """The measured traffic, and the size of an allocation that failed."""
        seen = self._incident
        if seen is None or seen.load is None:
            return {}
        return {
            "oom_allocation_bytes": (seen.engine_exit or {}).get("allocation_bytes"),
            "traffic": {
                **traffic(dict(seen.metrics), seen.load, self._plan.longest_request_tokens),
                **token_pace(self._bench.store, self._bench.drill.name, seen.started_at, seen.ended_at),
            },
        }

    def result(self) -> dict[str, Any]:
        """Nothing beyond the usual."""
        return {}

    def _run(self, what: str, *, quiet_s: float = 0.0) -> Observation:
        """Smoke requests, then the load, then quiet; measures the window in the store's samples."""
        bench, plan = self._bench, self._plan
        quiet_s = max(quiet_s, plan.quiet_s)
        started_at = time.time()
        smoke = None
        if plan.smoke:
            bench.note(f"smoke: {len(plan.smoke)} short request")
            smoke = self._send(plan.smoke, LoadOptions(concurrency=1, model=plan.options.model))
            bench.note(f"smoke: {smoke.completed} of {smoke.total} completed")
        bench.note(f"{what}: {plan.description}")
        load = self._send(plan.requests, plan.options)
        if quiet_s:
            bench.note(f"nothing is sent for {quiet_s:g} s")
            time.sleep(quiet_s)
        exit_ = self._engine_exit(started_at, wait=load.server_died or load.failed > 0)
        ended_at = settle(bench)
        metrics = window_metrics(bench.store, bench.drill.name, started_at, ended_at)
        observation = Observation(started_at, ended_at, smoke, load, exit_, metrics)
        bench.note(
            report.load_sentence(observation), {"load": load.to_dict(), "metrics": metrics, "engine_exit": exit_}
        )
        return observation

    def _send(self, requests: Sequence[LoadRequest], options: LoadOptions) -> LoadReport:
        drill = self._bench.drill
        return asyncio.run(run_load(drill.base_url, requests, replace(options, api_key=drill.api_key)))

    def _engine_exit(self, since: float, *, wait: bool) -> Mapping[str, Any] | None:
        deadline = time.monotonic() + (EXIT_SETTLES_S if wait else 0.0)
        while True:
            exits = self._bench.drill.exits_since(since)
            if exits or time.monotonic() >= deadline:
                return exits[-1] if exits else None
            time.sleep(EXIT_POLL_S)


def settle(bench: Bench) -> float:
    """Waits for one more scrape, so that the counters of the last requests are in the window; returns its end."""
    time.sleep(2 * bench.scrape_interval_s)
    return time.time()
