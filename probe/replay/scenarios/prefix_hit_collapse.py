"""Prefix hit collapse: a gateway begins to put the request's id in front of the system prompt all requests share.

The engine is well and no flag of it brings the hits back; what the runbook's comparison finds, two rendered prompts
that differ in their first line, is mended where prompts are made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.prompts import token_ids
from probe.load.traces import FIRST_TOKEN_ID, LoadRequest
from probe.replay.exercise import Bench, LoadExercise, Repair
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.cache_thrash import cached_share
from probe.replay.scenarios.load_scenario import LoadScenario

SYSTEM, QUESTION, ID_LINE = 480, 32, 16  # tokens


@dataclass(frozen=True)
class PrefixHitCollapse(LoadScenario):
    """A while of good prompts, which is the rule's day before; then the line in front.

    window_s: the rule's window at `time_scale`, which the day before ends ahead of.
    """

    rate: float = 5.0
    good: int = 40
    bad: int = 75
    time_scale: float = 0.01
    window_s: float = 6.0

    id = "prefix-hit-collapse"
    title = "Prefix hit collapse: prompts begin with a line that is new every time"
    hypothesis = (
        "Blocks are found from the front of a prompt on. With a request id in front of a system prompt that all share, "
        "nothing is found and every prompt is computed in full; with the id behind it the hit rate is back."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """No published figures; the published habit."""
        return {"case": "a date or an id at the top of a shared system prompt", "computed": False}

    def flags(self) -> list[str]:
        """A sound engine."""
        return ["--max-num-seqs", "32"]

    def exercise(self, bench: Bench) -> PromptChange:
        """The good prompts, then the bad ones; once mended, good ones."""
        return PromptChange(
            bench,
            baseline=self._load(bench.endpoint, self.good, in_front=False),
            changed=self.load(bench.endpoint),
            mended=self._load(bench.endpoint, self.bad, in_front=False),
            pause_s=self.window_s,
        )

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """The prompts of the incident."""
        return self._load(endpoint, self.bad, in_front=True)

    def _load(self, endpoint: Endpoint, count: int, *, in_front: bool) -> LoadPlan:
        vocab = endpoint.vocab_size or 1000
        requests = []
        for n in range(count):
            own, shared = [(f"id{n}", ID_LINE)], [("system", SYSTEM)]
            parts = [*(own + shared if in_front else shared + own), (f"question{n}", QUESTION)]
            total = SYSTEM + QUESTION + ID_LINE
            prompt = token_ids(parts, total, FIRST_TOKEN_ID, vocab)
            requests.append(LoadRequest(f"q{n}", n / self.rate, prompt, total, 2))
        where = "in front of" if in_front else "behind"
        options = LoadOptions(timed=True, model=endpoint.model, request_timeout_s=60, max_duration_s=90)
        return LoadPlan(
            tuple(requests), options, f"{count} requests, {self.rate:g} a second, their id {where} the system prompt"
        )

    def shown(self, before: Observation) -> list[Check]:
        """Nothing is found."""
        share = cached_share(before)
        return [Check("prompts are computed in full", share < 0.1, f"{share:.0%} of the prompts found", "< 10%")]

    def mended(self, after: Observation) -> list[Check]:
        """The system prompt is found."""
        share = cached_share(after)
        return [Check("the system prompt is found", share > 0.5, f"{share:.0%} of the prompts found", "> 50%")]


class PromptChange(LoadExercise):
    """Sends `baseline`, waits until the rule counts it as the time before, then sends `changed`."""

    def __init__(
        self, bench: Bench, *, baseline: LoadPlan, changed: LoadPlan, mended: LoadPlan, pause_s: float
    ) -> None:
        sentence = (
            "two prompts differ in their first line: the id goes behind the system prompt, in the gateway's template"
        )
        super().__init__(bench, lambda _: changed, repair=Repair(sentence))
        self._baseline, self._mended, self._pause_s = baseline, mended, pause_s

    def incident(self) -> Observation:
        """The good prompts, then the bad ones; measured are the bad ones."""
        note = self._bench.note
        note(f"the time before: {self._baseline.description}")
        load = self._send(self._baseline.requests, self._baseline.options)
        note(f"{load.completed} of {load.total} completed", {"load": load.to_dict()})
        time.sleep(self._pause_s)
        return super().incident()

    def repair(self) -> Repair | None:
        """The good prompts again."""
        self._plan = self._mended
        return super().repair()
