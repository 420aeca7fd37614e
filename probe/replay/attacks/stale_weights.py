"""Weights change under a running engine and the cache stays: the new model reads what the old one computed.

The two sets of weights are the testbed model and its rewrite with outlier channels. Both give the same answers, from
KV that differs, so every right answer is known and only stale blocks can spoil it. As in fine-tuning loops that
update weights in place (NovaSky-AI/SkyRL#2246).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

import httpx

from engine.config import EngineConfig
from engine.testbed.tasks import VALUES
from probe.isolation.client import IsolationClient, ProbeError
from probe.replay.attacks.attack import Ask, Case, CaseAttack, session
from probe.replay.attacks.facts import draw_facts, next_turn, question, told

FACTS = 53  # 160 tokens: ten whole blocks


class StaleWeights(CaseAttack):
    """Variant `stale-weights`."""

    kind = "stale-weights"

    def __init__(self) -> None:
        plain, outliers = (str(EngineConfig(model=name).model_dir) for name in ("", "testbed-outliers"))
        self._next = cycle([outliers, plain])  # the engine starts with the plain ones

    def flags(self) -> list[str]:
        """A cache that knows nothing of an update."""
        return ["--prefix-cache-fault", "weights_key"]

    async def between(self, client: IsolationClient) -> None:
        """The update, while blocks are cached."""
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60.0, trust_env=False) as http:
            response = await http.post("/update_weights_from_disk", json={"model_path": next(self._next)})
        if response.status_code != 200:
            raise ProbeError(f"the engine did not take new weights: HTTP {response.status_code}, {response.text[:200]}")

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """The same public text before and after the update, from two sessions."""
        made = []
        for number in range(count):
            facts = draw_facts(rng, FACTS, (key := "ax", rng.choice(VALUES)))
            right = dict(facts)[key]
            text = told(facts) + question(key)
            reader = session(f"b{number}")
            later = next_turn(text, right, facts[-1][0])
            made.append(
                Case(
                    victim=Ask(text, text, session(f"a{number}")),
                    attacker=Ask(text, text, reader),
                    right=right,
                    # The attacker's own next turn: the one before the update is gone for good reason.
                    follow_up=Ask(later, later, reader),
                )
            )
        return made

    def tell(self, case: Case, answers: Sequence[str]) -> str:
        """What the reader after the update got."""
        return (
            f"Session A read the text before the weights were updated. Session B read it afterwards and got "
            f"{answers[1]!r} where {case.right} is right: it was answered from what the old weights had computed."
        )
