"""Conversations of the testbed model for attacks: a few facts, then a question about one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.testbed.tasks import KEYS, VALUES

Fact = tuple[str, str]
PUBLIC_FACTS = 53  # 160 tokens with <bos>


def draw_facts(rng: random.Random, count: int, first: Fact | None = None) -> list[Fact]:
    """`count` facts with different keys, `first` among them if given, in random order."""
    keys = rng.sample(KEYS, count)
    facts = [(key, rng.choice(VALUES)) for key in keys if first is None or key != first[0]]
    if first is not None:
        facts[count - 1 :] = []
        facts.insert(rng.randrange(count), first)
    return facts


def other_value(rng: random.Random, value: str) -> str:
    """A value that is not `value`."""
    return rng.choice([v for v in VALUES if v != value])


def told(facts: Sequence[Fact]) -> str:
    """The facts as a user tells them."""
    return "".join(f"{key}={value};" for key, value in facts)


def question(key: str) -> str:
    """Asks for what was told about `key`."""
    return f"?{key}>"


def public_text(rng: random.Random) -> tuple[str, str, str]:
    """A text of ten whole blocks with a question, its answer, and the same conversation one question later."""
    key, right = "ax", rng.choice(VALUES)
    facts = draw_facts(rng, PUBLIC_FACTS, (key, right))
    text = told(facts) + question(key)
    return text, right, next_turn(text, right, facts[-1][0])


def next_turn(prompt: str, answer: str, key: str) -> str:
    """The same conversation one question later."""
    return f"{prompt}{answer}<eos>{question(key)}"
