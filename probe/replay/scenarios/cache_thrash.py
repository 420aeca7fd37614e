"""Cache thrash: more conversations than the prefix cache holds, each coming back after the others had their turn.

Least recently used blocks go first, so with half a pool too many conversations each one finds nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import MIB
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import LoadRequest, synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario


@dataclass(frozen=True)
class CacheThrash(LoadScenario):
    """`conversations` whose histories take one and a half pools, `turns` turns each, in turn."""

    conversations: int = 20
    turns: int = 7
    history: int = 960  # tokens before the first turn
    turn: int = 16
    utilization: float = 0.2
    time_scale: float = 0.015

    id = "cache-thrash"
    title = "Cache thrash: conversations come back and find their history gone"
    hypothesis = (
        "When the histories of all conversations are half as much again as the pool, every turn evicts what the next "
        "ones will ask for: blocks are asked for again soon after they were dropped, and each turn computes its whole "
        "history. In the pool that fits the device all histories stay."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """No published case; the arithmetic of least recently used."""
        return {
            "case": "a cyclic working set larger than a cache that drops the least recently used",
            "computed": False,
        }

    def flags(self) -> list[str]:
        """A careful utilization, so a small pool."""
        return [
            "--device-memory", str(192 * MIB),
            "--gpu-memory-utilization", str(self.utilization),
            "--max-num-seqs", "16",
            "--max-num-batched-tokens", "1024",
        ]  # fmt: skip

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Two clients walk through all conversations, turn by turn; each turn sends the whole history."""
        longest = self.history + self.turn * self.turns
        texts = synthetic(
            self.conversations, prompt_tokens=longest, max_tokens=2, vocab_size=endpoint.vocab_size, name="conversation"
        )
        plan = [
            LoadRequest(f"{text.request_id}-{turn}", 0.0, text.prompt[:length], length, 2)
            for turn in range(self.turns)
            for length in [self.history + self.turn * turn]
            for text in texts
        ]
        options = LoadOptions(concurrency=2, model=endpoint.model, request_timeout_s=60, max_duration_s=120)
        return LoadPlan(
            tuple(plan), options,
            f"{self.turns} turns of {self.conversations} conversations of {self.history} tokens and more",
        )  # fmt: skip

    def shown(self, before: Observation) -> list[Check]:
        """Histories were computed again."""
        share = cached_share(before)
        return [Check("histories are computed again", share < 0.5, f"{share:.0%} of the prompts found", "< 50%")]

    def mended(self, after: Observation) -> list[Check]:
        """Histories are found."""
        share = cached_share(after)
        return [Check("histories are found", share > 0.5, f"{share:.0%} of the prompts found", "> 50%")]


def cached_share(observation: Observation) -> float:
    """Share of the prompt tokens of a load that came from the prefix cache."""
    load = observation.load.to_dict() if observation.load else {}
    return float(load.get("cached_tokens", 0) / load["prompt_tokens"]) if load.get("prompt_tokens") else 0.0
