"""Preemption livelock: long answers, all admitted by their short prompts, preempt each other and none ends.

The engine serves the oldest request first and never preempts it for another, so some answer does end at last; in the
drill that is after longer than the rule's (scaled) window, as hours are after five minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario, measured

PROMPT, ANSWER, BLOCK = 64, 832, 16


@dataclass(frozen=True)
class PreemptionLivelock(LoadScenario):
    """`requests` long answers at once in a pool that holds `held` of them."""

    held: int = 4
    requests: int = 12
    time_scale: float = 0.03

    id = "preemption-livelock"
    title = "Preemption livelock: long answers throw each other out and none ends"
    hypothesis = (
        "Twelve requests are admitted by their short prompts into a pool that holds four of their answers. They grow, "
        "take each other's blocks, and within the window many are preempted and none finishes. With no more sequences "
        "than the pool holds, nobody is preempted and all finish."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """Where it was seen."""
        return {
            "case": "1,065 preemptions in 450 requests, 187 with a reserve of 0.05 (vllm-project/vllm#44594)",
            "computed": False,
        }

    def flags(self) -> list[str]:
        """A pool for `held` whole requests, and places for many more."""
        blocks = self.held * -(-(PROMPT + ANSWER) // BLOCK)
        return ["--num-gpu-blocks-override", str(blocks + 1), "--max-num-seqs", "32"]

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """All of them at once."""
        plan = synthetic(
            self.requests, prompt_tokens=PROMPT, max_tokens=ANSWER, vocab_size=endpoint.vocab_size, name="essay"
        )
        options = LoadOptions(
            concurrency=self.requests, model=endpoint.model, request_timeout_s=150, max_duration_s=150
        )
        return LoadPlan(tuple(plan), options, f"{self.requests} answers of {ANSWER} tokens at once")

    def shown(self, before: Observation) -> list[Check]:
        """Most of them were preempted."""
        preemptions = measured(before, "preemptions")
        return [Check("they preempt each other", preemptions > 3, preemptions, "> 3 preemptions")]

    def mended(self, after: Observation) -> list[Check]:
        """Nobody is preempted any more."""
        preemptions = after.metrics.get("preemptions")
        return [Check("nobody is preempted", preemptions == 0, preemptions, "0 preemptions")]
