"""Weights change under a running engine and the cache stays: the new model reads what the old one computed.

The engine starts with the testbed model's rewrite with outlier channels and is given the plain weights. Both give the
same answers, from KV that differs, so every right answer is known and only stale blocks can spoil it: plain queries
meet keys that are 16 times too large. As in fine-tuning loops that update weights in place (NovaSky-AI/SkyRL#2246).
"""

from __future__ import annotations

import random

import httpx

from engine.config import EngineConfig
from probe.isolation.client import IsolationClient, ProbeError
from probe.replay.attacks.attack import TRIES, Ask, Case, CaseAttack, Try, session
from probe.replay.attacks.facts import public_text

OLD, NEW = "testbed-outliers", ""


class StaleWeights(CaseAttack):
    """Variant `stale-weights`."""

    kind = "stale-weights"

    def __init__(self) -> None:
        self._updated = False

    def flags(self) -> list[str]:
        """A cache that knows nothing of an update."""
        return ["--model", OLD, "--prefix-cache-fault", "weights_key"]

    async def before(self, client: IsolationClient) -> None:
        """Back to the old weights, for another wave."""
        if self._updated:
            await self._update(client, OLD)

    async def between(self, client: IsolationClient) -> None:
        """The update, while blocks are cached."""
        await self._update(client, NEW)
        self._updated = True

    @staticmethod
    async def _update(client: IsolationClient, model: str) -> None:
        path = str(EngineConfig(model=model).model_dir)
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60.0, trust_env=False) as http:
            response = await http.post("/update_weights_from_disk", json={"model_path": path})
        if response.status_code != 200:
            raise ProbeError(f"the engine did not take new weights: HTTP {response.status_code}, {response.text[:200]}")

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """The same public text before and after the update, from two sessions."""
        made = []
        for number in range(count):
            text, right, later = public_text(rng)
            readers = [session(f"b{number}-{i}") for i in range(TRIES)]
            made.append(
                Case(
                    victim=Ask(text, text, session(f"a{number}")),
                    tries=tuple(Try(Ask(text, text, reader), right) for reader in readers),
                    # An attacker's own next turn: what was cached before the update is gone for good reason.
                    follow_up=Ask(later, later, readers[0]),
                )
            )
        return made

    def tell(self, _: Case, right: str, answer: str) -> str:
        """What the reader after the update got."""
        return (
            f"Session A read the text before the weights were updated. Session B read it afterwards and got "
            f"{answer!r} where {right} is right: it was answered from what the old weights had computed."
        )
