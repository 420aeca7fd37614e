"""No wrong answer at all: who asks can tell from the answer's first token, or its bill, what others have asked.

A cache shared by everybody answers sooner what somebody has asked before, and says so in `cached_tokens`
(CVE-2025-46570). The attacker guesses a victim's prompt; the counts are exact, the times are judged by ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

from probe.isolation.client import Answer, IsolationClient
from probe.isolation.side_channel import SideChannelOptions, probe_ttft
from probe.replay.attacks.attack import WAVE, Ask, Attack, Tally, each, send, session
from probe.replay.attacks.facts import draw_facts, next_turn, question, told

FACTS = 21  # 64 tokens: four whole blocks
TIMED = 60  # prefixes of each kind whose first token is timed


class TimingSideChannel(Attack):
    """Variant `timing`. A breach is a prompt of another session that the attacker finds in the cache."""

    kind = "timing"
    check = "side-channel-tokens"

    def flags(self) -> list[str]:
        """Nothing is broken: this is what sharing with everybody means."""
        return []

    async def run(self, client: IsolationClient, requests: int, rng: random.Random, tally: Tally) -> None:
        """Guesses that are right, each made by a session that never asked before."""
        for start in range(0, requests, WAVE):
            texts = [told(draw_facts(rng, FACTS)) for _ in range(min(WAVE, requests - start))]
            asked = [text + question(text[:2]) for text in texts]
            victims = [Ask(text, text, session(f"a{start + i}")) for i, text in enumerate(asked)]
            guesses = [Ask(text, text, session(f"b{start + i}")) for i, text in enumerate(asked)]
            first = await each(victims, partial(send, client))
            answers = await each(guesses, partial(send, client))
            for case in zip(victims, guesses, first, answers, strict=True):
                self._judge(*case, tally)
            later = [
                replace(v, prompt=next_turn(v.text, a.text, v.text[:2])) for v, a in zip(victims, first, strict=True)
            ]
            for answer in await each(later, partial(send, client)):
                tally.count_own(answer)

    async def besides(self, client: IsolationClient) -> dict[str, Any]:
        """What the clock alone tells."""
        return {"ttft": (await probe_ttft(client, SideChannelOptions(pairs=TIMED))).to_dict()}

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
