"""KV saturated: a pool for eight requests and two dozen clients. Nobody is preempted; they wait.

A block override of a test was left on the launch line and holds the pool far below what the device has room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import MIB
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario, measured

PROMPT, ANSWER, BLOCK = 480, 48, 16
ANSWERS = (48, 20, 36, 28, 44, 24, 40, 32)  # of several lengths, or all would end and begin in the same steps


@dataclass(frozen=True)
class KVSaturated(LoadScenario):
    """A prompt takes 30 blocks and its answer 3 more: `held` requests end in the pool, and a further one never enters
    it, as what is left is less than its prompt.
    """

    held: int = 8
    clients: int = 24
    requests: int = 120
    time_scale: float = 0.02
    scrape_interval_s: float = 0.25

    id = "kv-saturated"
    title = "KV saturated: the pool is full and requests wait"
    hypothesis = (
        "With a pool for eight requests and 24 clients, the pool stays above 90% and the queue never empties, though "
        "nobody is preempted and the device has room. With the pool that fits the device the queue is gone."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """No published case: it is what demand above capacity looks like."""
        return {"case": "demand above the pool", "computed": False}

    @property
    def blocks(self) -> int:
        """Usable blocks: exactly `held` requests at their full length."""
        return self.held * -(-(PROMPT + ANSWER) // BLOCK)

    def flags(self) -> list[str]:
        """The override, and steps large enough to take in all who fit at once."""
        return [
            "--device-memory", str(192 * MIB),
            "--num-gpu-blocks-override", str(self.blocks + 1),
            "--max-num-seqs", "64",
            "--max-num-batched-tokens", "4096",
        ]  # fmt: skip

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """`clients` who each send their next request when the last one is answered."""
        plan = synthetic(
            self.requests, prompt_tokens=PROMPT, max_tokens=ANSWER, vocab_size=endpoint.vocab_size, name="document"
        )
        plan = [replace(request, max_tokens=ANSWERS[n % len(ANSWERS)]) for n, request in enumerate(plan)]
        options = LoadOptions(concurrency=self.clients, model=endpoint.model, request_timeout_s=90, max_duration_s=90)
        return LoadPlan(
            tuple(plan), options,
            f"{self.requests} requests of {PROMPT} + up to {ANSWER} tokens from {self.clients} clients",
        )  # fmt: skip

    def shown(self, before: Observation) -> list[Check]:
        """A full pool, a queue, and no preemptions."""
        preemptions, waiting = measured(before, "preemptions"), measured(before, "waiting_peak")
        return [
            Check("requests waited", waiting > 1, waiting, "> 1 at the peak"),
            Check("nobody was preempted", preemptions == 0, preemptions, "0"),
        ]

    def mended(self, after: Observation) -> list[Check]:
        """The pool holds everybody."""
        usage = measured(after, "kv_usage_peak")
        return [Check("the pool has room", usage < 0.9, usage, "< 0.9 at the peak")]
