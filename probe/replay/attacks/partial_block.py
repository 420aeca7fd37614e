"""Choices of one request share a block that is not full, and none of them copies it before writing into it.

Each choice is drawn with a seed of its own, so what it would say alone is known. Without copy-on-write the choices
write their tokens over each other's and go on from what another one said. The temperature is high, so that they part
at once and what they say next depends on what they read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from probe.isolation.client import Caller, IsolationClient
from probe.replay.attacks.attack import Attack, Tally, each, nobody, session, spans
from probe.replay.attacks.facts import draw_facts, next_turn, told

CHOICES = 5
FACTS = 8  # 26 tokens with <bos> and "?": a full block and ten tokens of the next
MOST_TOKENS = 8
TEMPERATURE = 2.0
ROUNDS = 10  # requests at a time: each is asked alone as well


@dataclass(frozen=True)
class _Asked:
    prompt: str
    seed: int
    caller: Caller


class SharedPartialBlock(Attack):
    """Variant `partial-block`. A cross-session request here is a choice beside others of its request."""

    kind = "partial-block"

    def flags(self) -> list[str]:
        """Forks that write where they share."""
        return ["--prefix-cache-fault", "copy_on_write"]

    async def run(self, client: IsolationClient, requests: int, rng: random.Random, tally: Tally) -> None:
        """Requests of CHOICES choices; every choice but the first is compared with itself alone."""
        count = -(-requests // (CHOICES - 1))
        prompts = [told(draw_facts(rng, FACTS)) + "?" for _ in range(count)]
        asked = [_Asked(text, rng.randrange(2**31), session(f"p{n}")) for n, text in enumerate(prompts)]
        for start in range(0, len(asked), ROUNDS):
            await each(asked[start : start + ROUNDS], lambda one: self._compare(client, one, tally))

    async def _compare(self, client: IsolationClient, asked: _Asked, tally: Tally) -> None:
        prompt, seed, caller = asked.prompt, asked.seed, asked.caller
        together = await self._ask(client, prompt, caller, seed, CHOICES)
        for index in range(1, CHOICES):
            tally.requests += 1
            (alone,) = await self._ask(client, prompt, nobody(), seed + index, 1)
            if together[index] == alone:
                continue
            # Told apart from a rounding difference by asking again: one of those comes and goes.
            (repeated,) = await self._ask(client, prompt, nobody(), seed + index, 1)
            if repeated != alone:
                tally.model_errors += 1
                continue
            tally.breaches += 1
            if len(tally.examples) < 3:
                tally.examples.append(_example(prompt, together, index, alone, caller))
        later = next_turn(prompt, together[0], prompt[:2])
        tally.count_own(await client.ask(later, caller, max_tokens=1))

    @staticmethod
    async def _ask(client: IsolationClient, prompt: str, caller: Caller, seed: int, n: int) -> tuple[str, ...]:
        answer = await client.ask(prompt, caller, max_tokens=MOST_TOKENS, n=n, seed=seed, temperature=TEMPERATURE)
        return answer.choices


def _example(prompt: str, together: tuple[str, ...], index: int, alone: str, caller: Caller) -> dict[str, Any]:
    def side(name: str, text: str, marks: list[list[int]]) -> dict[str, Any]:
        messages = [{"role": "user", "text": prompt, "marks": []}, {"role": "assistant", "text": text, "marks": marks}]
        return {"name": name, "owner": caller.tenant or "", "messages": messages}

    strayed = together[index]
    same = next((i for i, (a, b) in enumerate(zip(strayed, alone, strict=False)) if a != b), len(alone))
    return {
        "title": "One choice went on from what another had said",
        "sentence": f"Alone, choice {index + 1} says {alone!r}. Beside the others it says {strayed!r}: they wrote into "
        f"one block.",
        "sessions": [
            side("Choice 1", together[0], []),
            side(f"Choice {index + 1}", strayed, spans(strayed, strayed[same:])),
        ],
        "leaked": None,
        "cold_answer": alone,
    }
