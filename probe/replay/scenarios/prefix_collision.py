"""Prefix collision: the prefix cache serves one session from what another one left in it.

The variants are the ways in which it happened in public: a hash that collides, a key that leaves out the adapter, the
picture or the weights, a block shared before it is full, and a shared cache that is merely fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import MIB
from probe.replay.attacks.adapter import MissingAdapterKey
from probe.replay.attacks.attack import Attack
from probe.replay.attacks.collision import Collision
from probe.replay.attacks.image import MissingImageKey
from probe.replay.attacks.partial_block import SharedPartialBlock
from probe.replay.attacks.stale_weights import StaleWeights
from probe.replay.attacks.timing import TimingSideChannel
from probe.replay.exercise import Bench
from probe.replay.isolation import IsolationExercise, IsolationPlan
from probe.replay.observation import Check, Observation, alert_fired, alert_resolved
from runbooks.collisions import collision_probability

LEAST_REQUESTS = 1000  # that prove a remedy: no breach among them bounds the rate at 0.3%, with 95% confidence
ATTACKS: Mapping[str, Callable[[], Attack]] = {
    "collision": Collision,
    "adapter": MissingAdapterKey,
    "image": MissingImageKey,
    "stale-weights": StaleWeights,
    "partial-block": SharedPartialBlock,
    "timing": TimingSideChannel,
}
CASES = {
    "collision": "CVE-2025-25183: vLLM before 0.7.2 named blocks by a hash that could be foretold",
    "adapter": "vllm-project/vllm#30931: adapters told apart by name; another one under the same name reads its blocks",
    "image": "CVE-2025-46722, LMCache/LMCache#4086: pictures told apart by too little; 302 of them collide in 16 bits",
    "stale-weights": "NovaSky-AI/SkyRL#2246: weights updated in place, the prefix cache kept",
    "partial-block": "a block shared before it is full, and written into without a copy",
    "timing": "CVE-2025-46570: vLLM before 0.9.0 had no salt; time to first token tells who asked what (AUC 0.99)",
}


SHORT_NAMES = ("collision", "image")


@dataclass(frozen=True)
class PrefixCollision:
    """Scenario `prefix-collision`; `variant` is a key of ATTACKS."""

    variant: str = "collision"
    before: int = 40
    after: int = LEAST_REQUESTS
    pool_bytes: int = 96 * MIB
    max_num_seqs: int = 32
    time_scale: float = 0.01
    scrape_interval_s: float = 0.5
    threads: int | None = 1  # short requests: a second one would only wait, on a core that the attackers need

    id = "prefix-collision"
    title = "Prefix collision: one session is answered from another session's text"
    rule = "prefix-isolation-breach"
    runbook = "prefix-isolation-breach"
    hypothesis = (
        "The prefix cache knows a block by its name alone. Where the name leaves something out, or collides, a request "
        "is answered from KV that is not its own, fluently and without an error. A name that says everything, and a "
        "scope no wider than trust, end it; sharing within the scope goes on."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """The public case behind this variant; where names are short, how soon two are alike by chance."""
        case: dict[str, Any] = {"case": CASES[self.variant], "computed": self.variant in SHORT_NAMES}
        if self.variant in SHORT_NAMES:
            case["chance_that_two_names_are_alike"] = {
                f"{names:,} names of {bits} bits": float(f"{collision_probability(bits, names):.2g}")
                for bits, names in ((16, 302), (64, 1_000_000), (256, 1_000_000))
            }
        return case

    def flags(self) -> list[str]:
        """An engine with the variant's fault, as nobody should run it."""
        wrong = ATTACKS[self.variant]().flags()
        return [
            *(["--allow-unsafe-replay", *wrong] if wrong else []),
            "--kv-cache-memory-bytes", str(self.pool_bytes),
            "--max-num-seqs", str(self.max_num_seqs),
        ]  # fmt: skip

    def exercise(self, bench: Bench) -> IsolationExercise:
        """The variant's attack."""
        return IsolationExercise(bench, IsolationPlan(self.variant, ATTACKS[self.variant], self.before, self.after))

    def reproduced(self, before: Observation) -> list[Check]:
        """Somebody was served what was another's, and the alert fired."""
        seen = before.isolation or {}
        measured = f"{seen['breaches']} of {seen['requests']}"
        return [
            Check("answered from another's KV", seen["breaches"] > 0, measured, "> 0 breaches"),
            alert_fired(before, self.rule),
        ]

    def verified(self, after: Observation) -> list[Check]:
        """The same attack finds nothing, sharing within the scope still hits, and the alert resolved."""
        seen = after.isolation or {}
        rate = seen["legit"]["rate"] or 0.0
        ttft = seen.get("ttft")
        clock = [] if ttft is None else [_silent_clock(ttft)]
        return [
            Check("no breach", seen["breaches"] == 0, f"{seen['breaches']} of {seen['requests']}", "0 breaches"),
            Check("enough requests to say so", seen["requests"] >= self.after, seen["requests"], f">= {self.after}"),
            *clock,
            Check("own prefixes still hit", rate > 0, f"{rate:.0%} of the tokens of next turns", "> 0%"),
            alert_resolved(after, self.rule),
        ]


def _silent_clock(ttft: Mapping[str, Any]) -> Check:
    """Whether the time to the first token still tells who asked what."""
    return Check("first tokens tell nothing", ttft["verdict"] != "leak shown", ttft["sentence"], "no leak shown")
