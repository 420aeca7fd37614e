"""What is asked: conversations whose answers can be checked exactly, and windows of text to judge.

Two kinds of suite. "testbed" speaks the testbed model's language (`engine.testbed.tasks`); "plain" asks any model in
English (`probe.quality.plain`). Both ask turn by turn with the earlier turns' right answers in the prompt, so an
answer depends on what the cache holds and not on earlier mistakes. The same spec gives the same questions anywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.testbed.tasks import EOS, HELD_OUT_SEEDS, KINDS, conversation, count_tokens
from probe.quality.likelihood import TEXT
from probe.quality.plain import PlainConversation

KINDS_OF_SUITE = ("testbed", "plain")
DEFAULT_CONTEXT = 2048
DEFAULT_TEXT = Path(__file__).with_name("text.txt")
_VERSION = 1  # of the questions: raise it when the same spec gives other ones
_FORMS = {"recall": r"[0-9]{2}", "add": r"[0-9]{2,3}", "brackets": r"[)\]}]+"}
_SPARE_TOKENS = 2  # beyond the right answer: EOS, and one more that shows an answer which does not end


class QualityError(Exception):
    """A quality run cannot be carried out; the message is one sentence. `run_id` names a run that can be resumed."""

    def __init__(self, message: str, run_id: str | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id


@dataclass(frozen=True)
class SuiteSpec:
    """How much of which questions.

    kind: "testbed", "plain" or "auto" (by what the server says of its model). turns: questions a conversation.
    conversations, first_seed: seeds first_seed, first_seed + 1, ... (held out from the testbed's training).
    context: tokens a conversation is filled up to; None: DEFAULT_CONTEXT or the server's limit, whichever is less.
    tasks: some of recall, add, brackets; none asks nothing.
    text_windows: windows for likelihoods (0: none; fewer where the text ends before); of testbed they are the first
    conversations themselves, else `window_tokens` tokens each of a text.
    chat: ask through /v1/chat/completions. text_digest: of the user's text, "" for the suite's own.
    """

    kind: str = "auto"
    turns: int = 20
    conversations: int = 16
    first_seed: int = 2000
    context: int | None = None
    tasks: tuple[str, ...] = KINDS
    text_windows: int = 4
    window_tokens: int = 768
    chat: bool = False
    text_digest: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS_OF_SUITE, "auto"):
            raise QualityError(f"a suite is of kind {', '.join(KINDS_OF_SUITE)} or auto, not {self.kind!r}")
        wrong = [task for task in self.tasks if task not in KINDS]
        if wrong:
            raise QualityError(f"there is no task {wrong[0]!r}; choose from {', '.join(KINDS)}, or none")
        if self.turns < 1 or self.conversations < 1 or self.text_windows < 0 or self.window_tokens < 2:
            raise QualityError("turns and conversations must be at least 1, windows 0 or more of at least 2 tokens")
        if not (self.first_seed >= 0 and self.first_seed + self.conversations <= HELD_OUT_SEEDS.stop):
            raise QualityError(f"seeds of conversations must lie in 0..{HELD_OUT_SEEDS.stop - 1}")

    def fitted(self, kind: str, max_model_len: int | None) -> SuiteSpec:
        """This spec with `auto` and the context settled."""
        limit = max_model_len or DEFAULT_CONTEXT
        if self.context is not None and self.context > limit:
            raise QualityError(f"conversations of {self.context} tokens do not fit the server's context of {limit}")
        return replace(
            self, kind=kind if self.kind == "auto" else self.kind, context=self.context or min(DEFAULT_CONTEXT, limit)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "tasks": list(self.tasks)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SuiteSpec:
        """Back from `to_dict`."""
        return cls(**{**values, "tasks": tuple(values["tasks"])})

    @property
    def key(self) -> str:
        """The same for specs whose items mean the same, however many of them are asked."""
        parts = {"version": _VERSION, "kind": self.kind, "turns": self.turns, "context": self.context}
        parts |= {"chat": self.chat, "window_tokens": self.window_tokens}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Question:
    """One item to ask: a prompt (text, or chat messages), and the only right answer."""

    key: str
    task: str
    turn: int
    prompt: str
    messages: tuple[dict[str, str], ...] | None
    expected: str
    max_tokens: int
    form: str
    stop: tuple[str, ...] = ()

    def judge(self, answer: str) -> tuple[bool, bool]:
        """(right, valid): the exact answer, up to white space; an answer of the form that was asked for."""
        told = "".join(answer.split())
        return told == "".join(self.expected.split()), re.fullmatch(self.form, told) is not None


@dataclass(frozen=True)
class Window:
    """One text to judge. `spans`: (turn, first, end) token places to judge; None: every token after the first.

    `part`: (index, tokens) of this window within the tokens of `text`; None: all of it.
    """

    key: str
    text: str
    spans: tuple[tuple[int, int, int], ...] | None = None
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Suite:
    """Conversations (each asked in order) and windows."""

    spec: SuiteSpec
    conversations: tuple[tuple[Question, ...], ...]
    windows: tuple[Window, ...]

    def keys(self) -> list[str]:
        """Keys of all items."""
        return [q.key for questions in self.conversations for q in questions] + [w.key for w in self.windows]


def build_suite(spec: SuiteSpec, text: str | None = None) -> Suite:
    """The questions and windows of a fitted spec; `text` replaces the shipped one (plain suites).

    Raises `QualityError` when the turns do not fit the context.
    """
    if spec.kind == "auto" or spec.context is None:
        raise ValueError("build_suite needs a fitted spec")
    seeds = range(spec.first_seed, spec.first_seed + spec.conversations)
    make = _testbed_questions if spec.kind == "testbed" else _plain_questions
    try:
        asked = [make(spec, seed) for seed in seeds] if spec.tasks else []
        if spec.kind == "testbed" and text is None:
            windows = [_testbed_window(spec, seed) for seed in seeds[: spec.text_windows]]
        else:
            windows = _text_windows(spec, text) if spec.text_windows else []
    except ValueError as error:
        raise QualityError(f"the suite cannot be made: {error}") from None
    if not asked and not windows:
        raise QualityError("nothing is left to measure: name a task or ask for windows of text")
    return Suite(spec, tuple(asked), tuple(windows))


def _testbed_questions(spec: SuiteSpec, seed: int) -> tuple[Question, ...]:
    context = spec.context or DEFAULT_CONTEXT
    talk = conversation(seed, spec.turns, context)
    questions = []
    for number, turn in enumerate(talk.turns, start=1):
        if turn.kind not in spec.tasks:
            continue
        prompt = talk.prompt(number)
        room = context - 1 - count_tokens(prompt)
        questions.append(
            Question(
                key=f"{turn.kind}/{seed}/{number}",
                task=turn.kind,
                turn=number,
                prompt=prompt,
                messages=tuple(talk.messages(number)) if spec.chat else None,
                expected=turn.answer,
                max_tokens=max(1, min(count_tokens(turn.answer) + _SPARE_TOKENS, room)),
                form=_FORMS[turn.kind],
            )
        )
    return tuple(questions)


def _testbed_window(spec: SuiteSpec, seed: int) -> Window:
    """A conversation judged on its answers: facts are drawn at random, so nothing can be said of their likelihood."""
    talk = conversation(seed, spec.turns, spec.context or DEFAULT_CONTEXT)
    spans: list[tuple[int, int, int]] = []
    place = 1  # after BOS
    for number, turn in enumerate(talk.turns, start=1):
        first = place + count_tokens(turn.prompt)
        place = first + count_tokens(turn.answer + EOS)
        spans.append((number, first, place))
    # The last EOS goes: a prompt must leave room for one token of output.
    spans[-1] = (*spans[-1][:2], place - 1)
    return Window(f"{TEXT}/{seed}", talk.text().removesuffix(EOS), tuple(spans))


def _plain_questions(spec: SuiteSpec, seed: int) -> tuple[Question, ...]:
    talk = PlainConversation.make(seed, spec.turns, spec.context or DEFAULT_CONTEXT)
    return tuple(
        Question(
            key=f"{turn.task}/{seed}/{number}",
            task=turn.task,
            turn=number,
            prompt=talk.prompt(number),
            messages=tuple(talk.messages(number)) if spec.chat else None,
            expected=turn.answer,
            max_tokens=talk.ANSWER_TOKENS,
            form=turn.form,
            stop=("\n",),
        )
        for number, turn in enumerate(talk.turns, start=1)
        if turn.task in spec.tasks
    )


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _text_windows(spec: SuiteSpec, text: str | None) -> list[Window]:
    if text is None:
        text = DEFAULT_TEXT.read_text(encoding="utf-8")
    name = digest(text)
    return [Window(f"{TEXT}/{name}/{n}", text, part=(n, spec.window_tokens)) for n in range(spec.text_windows)]
