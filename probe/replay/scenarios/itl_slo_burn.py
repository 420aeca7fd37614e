"""ITL burns its budget: prompts of a whole context come between the tokens of answers, many in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from probe.dialects import load_dialect
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.observation import Check, LoadPlan, Observation
from probe.replay.scenarios.load_scenario import LoadScenario

BOUND_S = load_dialect("kvoncall").slo["itl_seconds"]


@dataclass(frozen=True)
class ITLBurn(LoadScenario):
    """`clients` clients that send a prompt of most of the context and want a few tokens, again and again."""

    clients: int = 16
    requests: int = 96
    prompt: int = 1900
    answer: int = 12
    step: int = 32768
    time_scale: float = 0.008

    id = "itl-slo-burn"
    title = "ITL burns its budget: a step takes sixteen prompts between two tokens"
    hypothesis = (
        "With --max-num-batched-tokens 32768 a step computes every waiting prompt whole, and running answers wait for "
        "it. With a step that the measured gaps allow, prompts come in pieces and the answers keep their pace."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """Where the pattern is from."""
        return {
            "case": "chunked prefill trades time to first token for inter-token latency (Sarathi-Serve, OSDI 2024)",
            "computed": False,
        }

    def flags(self) -> list[str]:
        """A step for all prompts at once."""
        return [
            "--max-num-seqs", str(self.clients), "--max-num-batched-tokens", str(self.step),
            "--no-enable-prefix-caching", "--device-memory", "2GiB",
        ]  # fmt: skip

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """Long prompts with short answers of different lengths, so that prompts and answers meet in one step."""
        plan = synthetic(
            self.requests, prompt_tokens=min(self.prompt, endpoint.max_model_len - 2 * self.answer),
            max_tokens=self.answer, vocab_size=endpoint.vocab_size, name="reader",
        )  # fmt: skip
        mixed = tuple(replace(r, max_tokens=self.answer // 2 + i % self.answer) for i, r in enumerate(plan))
        options = LoadOptions(concurrency=self.clients, model=endpoint.model, request_timeout_s=120, max_duration_s=150)
        return LoadPlan(mixed, options, f"{self.requests} long prompts from {self.clients} clients at a time")

    def shown(self, before: Observation) -> list[Check]:
        """The slowest answers take longer for a token than the objective."""
        gap = slowest(before)
        return [Check("answers stand still", gap > BOUND_S, f"{gap:.2f} s a token", f"> {BOUND_S:g} s")]

    def mended(self, after: Observation) -> list[Check]:
        """They are within it."""
        gap = slowest(after)
        return [Check("answers keep their pace", gap < BOUND_S, f"{gap:.2f} s a token", f"< {BOUND_S:g} s")]


def slowest(observation: Observation) -> float:
    """Mean seconds between tokens of the slowest answer, as its client saw it."""
    records = observation.load.records if observation.load else ()
    return max((r.itl_mean_s for r in records if r.itl_mean_s is not None), default=0.0)
