"""Incidents that only a fault of the engine brings about: a stall, lost blocks, and memory that creeps up.

The faults are real ones, switched on by --engine-fault on a drill engine. Their remedy is a restart, which in a drill
goes without the fault, as a replica comes back after an upgrade or on another device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, Exercise, LoadExercise, Repair
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario

FAULT = "--engine-fault"


class FaultScenario(LoadScenario):
    """A scenario whose cause is a fault of the engine."""

    fault: ClassVar[str]

    def flags(self) -> list[str]:
        """An engine with the fault."""
        return ["--allow-unsafe-replay", FAULT, self.fault, "--max-num-seqs", "16", *self.more_flags()]

    @abstractmethod
    def more_flags(self) -> list[str]:
        """Flags beside the fault."""

    def exercise(self, bench: Bench) -> Exercise:
        """The load, and the restart without the fault."""
        sentence = "restarted without the fault, as the runbook's restart on a sound device or version"
        return LoadExercise(bench, self.load, repair=Repair(sentence, {FAULT: None, "--allow-unsafe-replay": None}))


class ServingFault(FaultScenario):
    """A fault that nobody notices at first: everybody is answered."""

    requests: int

    def shown(self, before: Observation) -> list[Check]:
        """Everybody was answered."""
        done = before.load.completed if before.load else 0
        return [Check("requests are answered", done == self.requests, done, str(self.requests))]

    def mended(self, after: Observation) -> list[Check]:
        """They still are."""
        return self.shown(after)


@dataclass(frozen=True)
class EngineStall(FaultScenario):
    """A step hangs while requests run; /metrics goes on answering."""

    requests: int = 8
    time_scale: float = 0.03

    id = "engine-stall"
    fault = "stall"
    title = "Engine stall: requests are held and no token comes"
    hypothesis = (
        "A step that never returns leaves its requests running for ever: the process lives, /metrics answers, and no "
        "token is made. Nothing but a restart ends it."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """What such a step usually is."""
        return {"case": "one rank of a collective waits for another that is gone", "computed": False}

    def more_flags(self) -> list[str]:
        """Nothing else is wrong."""
        return []

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Answers of more steps than the engine makes before it hangs; clients give up in the end."""
        plan = synthetic(
            self.requests, prompt_tokens=32, max_tokens=64, vocab_size=endpoint.vocab_size, name="question"
        )
        options = LoadOptions(concurrency=self.requests, model=endpoint.model, request_timeout_s=15, max_duration_s=40)
        return LoadPlan(tuple(plan), options, f"{self.requests} questions at once, clients wait 15 s for a token")

    def shown(self, before: Observation) -> list[Check]:
        """Nobody was answered, and the process lived."""
        done = before.load.completed if before.load else 0
        return [
            Check("nobody is answered", done == 0, f"{done} answered", "0"),
            Check("the process lives", before.engine_exit is None, before.engine_exit or "running", "running"),
        ]

    def mended(self, after: Observation) -> list[Check]:
        """The engine stays up."""
        return [Check("the process lives", after.engine_exit is None, after.engine_exit or "running", "running")]


@dataclass(frozen=True)
class KVBlockLeak(ServingFault):
    """Each ended request keeps a block."""

    requests: int = 40
    blocks: int = 512
    time_scale: float = 0.02

    id = "kv-block-leak"
    fault = "block_leak"
    title = "KV block leak: blocks stay in use after every request is gone"
    hypothesis = (
        "An engine that forgets one block of each ended request serves well and loses its pool. With nothing running "
        "and nothing waiting its usage is not zero. A restart gives the blocks back."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """Where such leaks come from."""
        return {"case": "cancelled requests and KV connectors that keep blocks", "computed": False}

    def more_flags(self) -> list[str]:
        """A pool in which a block weighs something."""
        return ["--num-gpu-blocks-override", str(self.blocks + 1)]

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Short requests, then none: the leak shows when the engine should be empty."""
        plan = synthetic(self.requests, prompt_tokens=32, max_tokens=8, vocab_size=endpoint.vocab_size, name="question")
        options = LoadOptions(concurrency=8, model=endpoint.model, request_timeout_s=60, max_duration_s=60)
        return LoadPlan(tuple(plan), options, f"{self.requests} short questions, then nothing", quiet_s=10.0)


@dataclass(frozen=True)
class GPUMemoryCreep(ServingFault):
    """Each step keeps 16 KiB. On a CPU the device's memory is the process's own, under its limit."""

    requests: int = 120
    rate: float = 4.0
    time_scale: float = 0.004

    id = "gpu-memory-creep"
    fault = "memory_creep"
    title = "Device memory creeps up: every step keeps a little"
    hypothesis = (
        "An engine whose steps keep memory serves well until the device is full. Its use grows all the time, where a "
        "sound engine's is flat once it has started. A restart takes it back to where it began."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """What creeps in practice."""
        return {"case": "fragmentation, caches of compiled graphs, and leaks outside the KV pool", "computed": False}

    def more_flags(self) -> list[str]:
        """Room to creep into."""
        return ["--gpu-memory-utilization", "0.5"]

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Steady light traffic."""
        plan = synthetic(
            self.requests, prompt_tokens=32, max_tokens=16, vocab_size=endpoint.vocab_size, name="question"
        )
        plan = [replace(request, arrival_s=n / self.rate) for n, request in enumerate(plan)]
        options = LoadOptions(timed=True, model=endpoint.model, request_timeout_s=60, max_duration_s=90)
        return LoadPlan(tuple(plan), options, f"{self.requests} short questions, {self.rate:g} a second")
