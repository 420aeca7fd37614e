"""English conversations with exact answers, for any model: recall, addition, closing brackets of code.

The form is few-shot, so base models can answer as well as tuned ones: every prompt shows worked examples, then the
earlier turns with their right answers, and ends with `A:`. Facts are told in notes that fill the context; a recall
question asks for one told in this turn or any earlier one, drawn evenly over the turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

CHARACTERS_A_TOKEN = 2.2  # no tokenizer of English needs more tokens for these texts (digits are single in many)
_EXAMPLES = (
    ("Note: the code of the old gate is 5173.\nQ: What is the code of the old gate?", "5173"),
    ("Q: What is 21 + 46?", "67"),
    ("Q: Which brackets close max([1, min(2, 3?", ")])"),
)
_COLOURS = ("amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")
_SIZES = ("big", "broad", "clean", "dark", "empty", "heavy", "light", "narrow", "new", "plain", "round", "small")
_THINGS = ("bag", "barn", "boat", "box", "cabinet", "cart", "chest", "door", "drawer", "house", "locker", "shed")
_CALLS = ("abs", "dict", "len", "list", "max", "min", "set", "sum")
_OPENING = {"(": ")", "[": "]", "{": "}"}
_INSTRUCTION = "Answer each question with the bare answer, nothing else."


@dataclass(frozen=True)
class PlainTurn:
    """`told`: lines of notes before the question; `form`: a pattern every answer of the task fits."""

    task: str
    told: tuple[str, ...]
    question: str
    answer: str
    form: str

    @property
    def text(self) -> str:
        return "\n".join((*self.told, f"Q: {self.question}"))


@dataclass(frozen=True)
class PlainConversation:
    """Turns in order, numbered from 1."""

    ANSWER_TOKENS: ClassVar[int] = 16
    turns: tuple[PlainTurn, ...]

    def prompt(self, turn: int) -> str:
        """For /v1/completions: examples, earlier turns with their answers, this turn's question, `A:`."""
        shots = "\n".join(f"{text}\nA: {answer}\n" for text, answer in _EXAMPLES)
        earlier = "".join(f"\n{t.text}\nA: {t.answer}\n" for t in self.turns[: turn - 1])
        return f"{_INSTRUCTION}\n\n{shots}{earlier}\n{self.turns[turn - 1].text}\nA:"

    def messages(self, turn: int) -> list[dict[str, str]]:
        """The same as chat messages."""
        pairs = [*_EXAMPLES, *((t.text, t.answer) for t in self.turns[: turn - 1])]
        messages = [{"role": "user", "content": f"{_INSTRUCTION}\n\n{pairs[0][0]}"}]
        for number, (text, answer) in enumerate(pairs):
            if number:
                messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": self.turns[turn - 1].text}]

    @classmethod
    def make(cls, seed: int, turns: int, context: int) -> PlainConversation:
        """One conversation that fits `context` tokens; raises ValueError if its questions do not."""
        rng = random.Random(f"kvoncall plain:{seed}:{turns}:{context}")
        tasks = [rng.choice(("recall", "add", "brackets")) for _ in range(turns)]
        told = _facts(rng, turns, context)
        made: list[PlainTurn] = []
        for number, task in enumerate(tasks):
            notes = tuple(f"Note: the code of the {name} is {code}." for name, code in told[number])
            if task == "recall":
                name, code = rng.choice(told[rng.randrange(number + 1)])
                made.append(PlainTurn(task, notes, f"What is the code of the {name}?", code, r"[0-9]{4}"))
            elif task == "add":
                a, b = rng.randrange(10, 100), rng.randrange(10, 100)
                made.append(PlainTurn(task, notes, f"What is {a} + {b}?", str(a + b), r"[0-9]{2,3}"))
            else:
                code, closing = _open_brackets(rng)
                made.append(PlainTurn(task, notes, f"Which brackets close {code}?", closing, r"[)\]}]+"))
        return cls(tuple(made))


def _facts(rng: random.Random, turns: int, context: int) -> list[list[tuple[str, str]]]:
    """(name, code) told in each turn, at least one each."""
    names = [f"{size} {colour} {thing}" for size in _SIZES for colour in _COLOURS for thing in _THINGS]
    note = len("Note: the code of the  is 0000.\n") + max(map(len, names))
    question = note + len("Q: \nA: 0000\n\n")
    examples = len(_INSTRUCTION) + sum(len(text) + len(answer) + 6 for text, answer in _EXAMPLES)
    room = context * CHARACTERS_A_TOKEN - PlainConversation.ANSWER_TOKENS * 4 - examples - turns * question
    count = min(int(room // note), len(names))
    if count < turns:
        raise ValueError(f"{turns} turns do not fit {context} tokens")
    chosen = [(name, f"{rng.randrange(10_000):04d}") for name in rng.sample(names, count)]
    return [chosen[turn::turns] for turn in range(turns)]


def _open_brackets(rng: random.Random) -> tuple[str, str]:
    """Code with 2 to 4 brackets open, and what closes them, innermost first."""
    opened = [rng.choice(tuple(_OPENING)) for _ in range(rng.randint(2, 4))]
    code = "".join(f"{rng.choice(_CALLS)}(" if mark == "(" else f"{mark}{rng.randrange(10)}, " for mark in opened)
    return f"{code}{rng.randrange(10)}", "".join(_OPENING[mark] for mark in reversed(opened))
