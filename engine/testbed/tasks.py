"""Conversations with answers that can be checked exactly: what the testbed model is trained and judged on.

One turn of text is `facts question > answer <eos>`; a conversation is its turns, one after another:

    ax=37;by=12;?ax>37<eos>25+48>73<eos>by=..;([{>}])<eos>?by>12<eos>

- facts `ax=37;` are told before the question, in any turn. A key (two letters) is told once a conversation.
- recall `?ax>` asks for a fact told in this turn or an earlier one; the turn it was told in is drawn uniformly,
  so distances spread over the whole conversation.
- add `25+48>` adds two two-digit numbers; brackets `([{>` closes what is open, innermost first.

Everything follows from a seed: the same arguments give the same text on every machine. Seeds in HELD_OUT_SEEDS
are never trained on. Pure Python, no torch; `count_tokens` knows the shipped tokenizer's lengths without it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase
from typing import Literal

Kind = Literal["recall", "add", "brackets"]

KINDS: tuple[Kind, ...] = ("recall", "add", "brackets")
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
VALUES: tuple[str, ...] = tuple(f"{n:02d}" for n in range(100))
KEYS: tuple[str, ...] = tuple(a + b for a, b in product(ascii_lowercase, repeat=2))
CLOSING: Mapping[str, str] = {"(": ")", "[": "]", "{": "}"}
MAX_DEPTH = 6
HELD_OUT_SEEDS = range(1_000_000)
EVEN_WEIGHTS: Mapping[Kind, float] = {"recall": 1.0, "add": 1.0, "brackets": 1.0}

_TOKEN = re.compile(r"<(?:bos|eos|pad)>|=[0-9]{2}|[a-z]{2}|.", re.DOTALL)
_FACT_TOKENS = 3  # key, "=" with both digits, ";"


@dataclass(frozen=True)
class Turn:
    """One exchange. `prompt` (ends with ">") is what the user says, `answer` the only right reply."""

    kind: Kind
    prompt: str
    answer: str
    facts: tuple[tuple[str, str], ...]
    """(key, value) told in this turn, before its question."""
    distance: int | None
    """Recall only: how many turns ago the fact was told (0 is this turn)."""


@dataclass(frozen=True)
class Conversation:
    """Turns in order. Turn numbers in methods count from 1, as in reports ("by turn 20")."""

    seed: int
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> str:
        """Plain prompt for /v1/completions: earlier turns with their right answers, then this turn's question.

        Without BOS: the tokenizer puts it in front. The right completion is `turns[turn - 1].answer`, then EOS.
        """
        self._check(turn)
        earlier = "".join(t.prompt + t.answer + EOS for t in self.turns[: turn - 1])
        return earlier + self.turns[turn - 1].prompt

    def messages(self, turn: int) -> list[dict[str, str]]:
        """The same prompt as chat messages; the shipped chat template renders it to the same token ids."""
        self._check(turn)
        messages: list[dict[str, str]] = []
        for t in self.turns[: turn - 1]:
            messages.append({"role": "user", "content": t.prompt})
            messages.append({"role": "assistant", "content": t.answer})
        messages.append({"role": "user", "content": self.turns[turn - 1].prompt})
        return messages

    def text(self) -> str:
        """All turns with answers, each closed by EOS (no BOS)."""
        return "".join(t.prompt + t.answer + EOS for t in self.turns)

    def _check(self, turn: int) -> None:
        if not 1 <= turn <= len(self.turns):
            raise ValueError(f"turn must be 1..{len(self.turns)}, not {turn}")


def count_tokens(text: str) -> int:
    """Length of a conversation's text in tokens of the shipped tokenizer, BOS not counted."""
    return len(split_tokens(text))


def split_tokens(text: str) -> list[str]:
    """A conversation's text cut where the shipped tokenizer cuts it (conversation texts only)."""
    return _TOKEN.findall(text)


def solve_brackets(opened: str) -> str:
    """The closing sequence of a string of opening brackets, innermost first."""
    return "".join(CLOSING[c] for c in reversed(opened))


def conversation(
    seed: int, turns: int = 20, max_tokens: int = 2048, weights: Mapping[Kind, float] = EVEN_WEIGHTS
) -> Conversation:
    """Make one conversation of `turns` turns that fills `max_tokens` tokens as far as facts can.

    max_tokens counts BOS, every prompt, every answer and every EOS, so a request for any turn fits a context of
    that length. Facts fill what questions leave, at most one per key (len(KEYS)); turn 1 tells at least one.
    weights: relative frequency of each kind. Raises ValueError if the turns do not fit.
    """
    rng = random.Random(f"kvoncall:{seed}:{turns}:{max_tokens}")
    kinds = rng.choices(KINDS, [weights[k] for k in KINDS], k=turns)
    questions = [_question(rng, kind) for kind in kinds]
    used = 1 + sum(count_tokens(q + a) + 1 for q, a in questions)
    total_facts = min((max_tokens - used) // _FACT_TOKENS, len(KEYS))
    if turns < 1 or total_facts < 1:
        raise ValueError(f"{turns} turns do not fit {max_tokens} tokens (questions alone take {used})")
    keys = rng.sample(KEYS, total_facts)
    told = _spread(rng, total_facts, turns)
    made: list[Turn] = []
    for number, (kind, (question, answer)) in enumerate(zip(kinds, questions, strict=True)):
        facts = tuple((keys.pop(), rng.choice(VALUES)) for _ in range(told[number]))
        distance = None
        if kind == "recall":
            telling = [(number, facts)] if facts else []
            telling += [(n, t.facts) for n, t in enumerate(made) if t.facts]
            when, choice = rng.choice(telling)
            key, answer = rng.choice(choice)
            question, distance = f"?{key}>", number - when
        prompt = "".join(f"{k}={v};" for k, v in facts) + question
        made.append(Turn(kind, prompt, answer, facts, distance))
    return Conversation(seed, tuple(made))


def _question(rng: random.Random, kind: Kind) -> tuple[str, str]:
    """A question with its answer; for recall a placeholder of the same length, filled when facts are known."""
    if kind == "add":
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        return f"{a}+{b}>", str(a + b)
    if kind == "brackets":
        opened = "".join(rng.choices(tuple(CLOSING), k=rng.randint(2, MAX_DEPTH)))
        return f"{opened}>", solve_brackets(opened)
    return "?aa>", "00"


def _spread(rng: random.Random, total: int, turns: int) -> list[int]:
    """Deal `total` facts to turns: as evenly as possible, then each turn gives a random part of its share on."""
    counts = [total // turns + (1 if n < total % turns else 0) for n in range(turns)]
    for n in range(turns - 1):
        moved = rng.randint(0, counts[n] // 2)
        counts[n] -= moved
        counts[rng.randrange(turns)] += moved
    if counts[0] == 0:
        donor = max(range(turns), key=counts.__getitem__)
        counts[donor] -= 1
        counts[0] = 1
    return counts
