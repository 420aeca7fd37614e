"""Twin prompts: the same shape, one differing fact, and different known answers.

One tenant's prompt tells one value of the fact, the other's another; all else is equal token for token, so that a
cache which confuses them serves the wrong one's KV and the model answers with the other tenant's value. The place of
the fact walks from the start of the prompt to its end with the seed. All text is made up here, by the seed alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from engine.testbed.tasks import KEYS, VALUES

Kind = Literal["testbed", "plain"]
Verdict = Literal["own", "leak", "other"]

FACTS = {"testbed": 48, "plain": 8}  # told in a prompt of 150 to 200 tokens; small models answer so many rightly
ANSWER_TOKENS = {"testbed": 4, "plain": 24}
_SHOTS = 2
_PLACES = 4
_INSTRUCTION = "Answer with the bare number, nothing else."
_THINGS = ("archive", "barn", "boat", "cabinet", "cart", "chest", "door", "drawer", "house", "locker", "shed", "wagon")


@dataclass(frozen=True)
class Twin:
    """`prompt_a` is answered by `answer_a`, `prompt_b` by `answer_b`; neither prompt names the other's answer.

    control_b: as `prompt_b`, but different from its first token on, so that no cache can know it.
    place: where the differing fact stands, 0 (start) .. 1 (end). max_tokens: enough for an answer.
    """

    kind: Kind
    prompt_a: str
    prompt_b: str
    control_b: str
    answer_a: str
    answer_b: str
    place: float
    max_tokens: int


def make_twins(kind: Kind, seed: int | str, facts: int | None = None) -> Twin:
    """Twins in the testbed model's language, or in English for any model; the same arguments give the same twins.

    facts: told in a prompt, at least 4 (None: FACTS).
    """
    facts = facts or FACTS[kind]
    rng = random.Random(f"kvoncall twins:{kind}:{seed}")
    place = rng.randrange(_PLACES) / (_PLACES - 1)
    asked = round(place * (facts - 1))
    return (_testbed if kind == "testbed" else _plain)(rng, facts, asked, place)


def classify(text: str, twin: Twin, asker: Literal["a", "b"] = "b") -> Verdict:
    """What an answer to the asker's prompt is: its own value, the other tenant's, or neither.

    An answer that names both is a leak: the other's value stands nowhere in the asker's prompt.
    """
    own, foreign = (twin.answer_b, twin.answer_a) if asker == "b" else (twin.answer_a, twin.answer_b)
    numbers = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text))  # 74,236 is 74236
    if foreign in numbers:
        return "leak"
    return "own" if own in numbers else "other"


def _testbed(rng: random.Random, facts: int, asked: int, place: float) -> Twin:
    *keys, spare = rng.sample(KEYS, facts + 1)
    answer_a, answer_b, *others = rng.sample(VALUES, len(VALUES))
    values = [rng.choice(others) for _ in keys]

    def prompt(answer: str) -> str:
        told = [*values[:asked], answer, *values[asked + 1 :]]
        return "".join(f"{key}={value};" for key, value in zip(keys, told, strict=True)) + f"?{keys[asked]}>"

    control = f"{spare}={rng.choice(others)};{prompt(answer_b)}"
    return Twin(
        "testbed", prompt(answer_a), prompt(answer_b), control, answer_a, answer_b, place, ANSWER_TOKENS["testbed"]
    )


def _plain(rng: random.Random, facts: int, asked: int, place: float) -> Twin:
    """Questions about two other facts come first, with their answers: base models then answer as tuned ones do."""
    names = rng.sample([f"{thing} {number}" for thing in _THINGS for number in range(10, 100)], facts)
    answer_a, answer_b, *values = [str(n) for n in rng.sample(range(10_000, 100_000), facts + 2)]
    shots = rng.sample([index for index in range(facts) if index != asked], _SHOTS)
    sheet, other_sheet = (f"Sheet {rng.choice('ABCDEFGH')}-{number}." for number in rng.sample(range(100, 1000), 2))

    def prompt(answer: str, sheet: str = sheet) -> str:
        told = [*values[:asked], answer, *values[asked + 1 : facts]]
        notes = "\n".join(f"The code of {name} is {value}." for name, value in zip(names, told, strict=True))
        solved = "\n\n".join(f"Q: What is the code of {names[shot]}?\nA: {told[shot]}" for shot in shots)
        return f"{sheet} {_INSTRUCTION}\n\n{notes}\n\n{solved}\n\nQ: What is the code of {names[asked]}?\nA:"

    control = prompt(answer_b, other_sheet)
    return Twin("plain", prompt(answer_a), prompt(answer_b), control, answer_a, answer_b, place, ANSWER_TOKENS["plain"])
