"""No wrong answer at all: who asks can tell from the answer's first token, or its bill, what others have asked.

A cache shared by everybody answers sooner what somebody has asked before, and says so in `cached_tokens`
(CVE-2025-46570). The attacker guesses a victim's prompt; the counts are exact, the times are judged by ranks.
"""

from __future__ import annotations

import random
from typing import Any

from engine.testbed.tasks import KEYS
from probe.isolation.client import Answer, IsolationClient
from probe.isolation.side_channel import SideChannelOptions, probe_ttft
from probe.replay.attacks.attack import WAVE, Ask, Tally, gather, send, session
from probe.replay.attacks.facts import draw_facts, next_turn, question, told

FACTS = 21  # 64 tokens: four whole blocks
TIMED = 60  # prefixes of each kind whose first token is timed


class TimingSideChannel:
    """Variant `timing`. A breach is a prompt of another session that the attacker finds in the cache."""

    kind = "timing"

    def flags(self) -> list[str]:
        """Nothing is broken: this is what sharing with everybody means."""
        return []

    async def run(self, client: IsolationClient, requests: int, rng: random.Random, tally: Tally) -> None:
        """Guesses that are right, each made by a session that never asked before; then the clock alone."""
        for start in range(0, requests, WAVE):
            numbers = range(start, min(start + WAVE, requests))
            texts = {number: told(draw_facts(rng, FACTS)) for number in numbers}
            victims = {
                n: Ask(f"{t}{question(t[:2])}", f"{t}{question(t[:2])}", session(f"a{n}")) for n, t in texts.items()
            }
            told_to = await gather([lambda ask=ask: send(client, ask) for ask in victims.values()])
            guesses = {n: Ask(ask.text, ask.prompt, session(f"b{n}")) for n, ask in victims.items()}
            answers = await gather([lambda ask=ask: send(client, ask) for ask in guesses.values()])
            for victim, guess, first, answer in zip(victims.values(), guesses.values(), told_to, answers, strict=True):
                self._judge(victim, guess, first, answer, tally)
            later = [
                Ask("", next_turn(ask.text, answer.text, rng.choice(KEYS)), ask.caller)
                for ask, answer in zip(victims.values(), told_to, strict=True)
            ]
            for answer in await gather([lambda ask=ask: send(client, ask) for ask in later]):
                tally.asked_tokens += answer.prompt_tokens or 0
                tally.hit_tokens += answer.cached_tokens or 0
        result = await probe_ttft(client, SideChannelOptions(pairs=TIMED), rng)
        tally.extra["ttft"] = result.to_dict()

    @staticmethod
    def _judge(victim: Ask, guess: Ask, first: Answer, answer: Answer, tally: Tally) -> None:
        tally.requests += 1
        if not answer.cached_tokens:
            return
        tally.breaches += 1
        if len(tally.examples) < 3:
            tally.examples.append(_example(victim, guess, first, answer))


def _example(victim: Ask, guess: Ask, first: Answer, answer: Answer) -> dict[str, Any]:
    def side(name: str, ask: Ask, text: str, marked: bool) -> dict[str, Any]:
        marks = [[0, len(ask.text)]] if marked else []
        messages = [
            {"role": "user", "text": ask.text, "marks": marks},
            {"role": "assistant", "text": text, "marks": []},
        ]
        return {"name": name, "owner": ask.caller.tenant or "", "messages": messages}

    return {
        "title": "Session B can tell what Session A asked",
        "sentence": f"Session B had never asked this, and {answer.cached_tokens} of its {answer.prompt_tokens} prompt "
        f"tokens came from the cache: somebody else had asked exactly that.",
        "sessions": [side("Session A", victim, first.text, True), side("Session B", guess, answer.text, True)],
        "leaked": guess.text,
        "cold_answer": f"{answer.text} with 0 cached tokens",
    }
