"""Target missing: the engine's process stands still, its port open, and nothing answers.

A stopped process is what a hung host looks like from here: connections are taken by the kernel and never read. The
rule waits 30 s at any scale, as an engine may be slow for other reasons.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, LoadExercise, Repair
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario
from probe.replay.subject import Stoppable

SCRAPE_POLLS, POLL_S = 75, 0.2


@dataclass(frozen=True)
class TargetMissing(LoadScenario):
    """The process is stopped, then asked; clients and scrapes wait in vain."""

    requests: int = 4
    time_scale: float = 0.1
    silence_s: float = 45.0

    id = "target-missing"
    title = "Target missing: the process stands still and nothing answers"
    hypothesis = (
        "A process that stands still keeps its port: connections are accepted and never answered, for clients and for "
        "scrapes. No flag helps; once it is restarted where it can run, it answers."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """What it stands for."""
        return {"case": "a host that hangs, a container that is paused", "computed": False}

    def flags(self) -> list[str]:
        """A sound engine."""
        return ["--max-num-seqs", "16"]

    def exercise(self, bench: Bench) -> FrozenProcess:
        """The stop, and a load that nobody answers."""
        return FrozenProcess(bench, self)

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Short questions at once, and a silence in which the rule's time passes."""
        plan = synthetic(
            self.requests, prompt_tokens=32, max_tokens=16, vocab_size=endpoint.vocab_size, name="question"
        )
        options = LoadOptions(concurrency=self.requests, model=endpoint.model, request_timeout_s=8, max_duration_s=12)
        return LoadPlan(tuple(plan), options, f"{self.requests} short questions, clients wait 8 s")

    def shown(self, before: Observation) -> list[Check]:
        """Nobody was answered, and the process had not exited."""
        done = before.load.completed if before.load else 0
        return [
            Check("nobody is answered", done == 0, f"{done} answered", "0"),
            Check("the process is there", before.engine_exit is None, before.engine_exit or "no exit", "no exit"),
        ]

    def mended(self, after: Observation) -> list[Check]:
        """Scrapes are answered again."""
        finished = after.metrics.get("finished")
        return [Check("scrapes see it", finished is not None, f"counter of requests: {finished}", "a number")]


class FrozenProcess(LoadExercise):
    """Stops the engine's process before the load, until whatever stops it is mended."""

    def __init__(self, bench: Bench, scenario: TargetMissing) -> None:
        sentence = "restarted where it can run: nothing stops the process any more"
        super().__init__(bench, scenario.load, repair=Repair(sentence))
        self._silence_s = scenario.silence_s
        self._stops = True

    def repair(self) -> Repair | None:
        """The process is let run."""
        self._stops = False
        return super().repair()

    def _run(self, what: str, *, quiet_s: float = 0.0) -> Observation:
        if self._stops:
            self._await_scrape()  # an engine that never answered since its start is still excused
            self._bench.note("the process is stopped where it stands")
            assert isinstance(self._bench.drill, Stoppable)  # this scenario is not among those for servers
            self._bench.drill.freeze()
            quiet_s = self._silence_s
        return super()._run(what, quiet_s=quiet_s)

    def _await_scrape(self) -> None:
        since, bench = time.time(), self._bench
        for _ in range(SCRAPE_POLLS):
            if any(
                up.value == 1 and up.ts > since for up in bench.store.samples.latest(bench.drill.name).get("up", [])
            ):
                return
            time.sleep(POLL_S)
