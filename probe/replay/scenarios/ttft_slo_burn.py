"""TTFT burns its budget: two places and four dozen clients. Requests wait; once they run, they are quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.dialects import load_dialect
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario

BOUND_S = load_dialect("kvoncall").slo["ttft_seconds"]


@dataclass(frozen=True)
class TTFTBurn(LoadScenario):
    """`clients` clients and two sequences at a time."""

    clients: int = 48
    requests: int = 120
    answer: int = 32
    time_scale: float = 0.008

    id = "ttft-slo-burn"
    title = "TTFT burns its budget: requests wait for one of two places"
    hypothesis = (
        "With --max-num-seqs 2 and 48 clients most first tokens come later than 2.5 s, and the time goes in the queue: "
        "the pool is nearly empty. With as many places as the pool holds, they come in time."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """The objective, and where the pattern is from."""
        return {
            "case": "multiwindow burn rates of the Google SRE workbook, chapter 5: 99% of first tokens within 2.5 s",
            "computed": False,
        }

    def flags(self) -> list[str]:
        """Two places, in a pool for 64 such questions."""
        return ["--max-num-seqs", "2", "--num-gpu-blocks-override", "257"]

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Short questions, each client sending its next one when the last is answered."""
        plan = synthetic(
            self.requests, prompt_tokens=32, max_tokens=self.answer, vocab_size=endpoint.vocab_size, name="question"
        )
        options = LoadOptions(concurrency=self.clients, model=endpoint.model, request_timeout_s=120, max_duration_s=120)
        return LoadPlan(tuple(plan), options, f"{self.requests} short questions from {self.clients} clients at a time")

    def shown(self, before: Observation) -> list[Check]:
        """More than a seventh of the first tokens came late: 14.4 times what 99% allows."""
        share = late_share(before)
        return [Check("first tokens come late", share > 0.144, f"{share:.0%} after {BOUND_S:g} s", "> 14.4%")]

    def mended(self, after: Observation) -> list[Check]:
        """They come in time."""
        share = late_share(after)
        return [Check("first tokens come in time", share < 0.06, f"{share:.0%} after {BOUND_S:g} s", "< 6%")]


def late_share(observation: Observation) -> float:
    """Share of first tokens that came after the bound, as the clients saw it."""
    records = observation.load.records if observation.load else ()
    times = [r.ttft_s for r in records if r.ttft_s is not None]
    return sum(t > BOUND_S for t in times) / len(times) if times else 0.0
