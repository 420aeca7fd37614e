"""Which engine suits: points from facts with sources, for the questions that were answered and no others.

A fact counts for or against its own engine only, so an answer never moves another engine's points, and one that
speaks for an engine never lowers it. Facts about flags are looked up in the catalog of the newest version each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from runbooks.flags import why_absent, why_value_absent
from runbooks.knowledge.engine_flags import newest
from runbooks.knowledge.text import Text, data, in_both, text_of

ENGINES = ("vllm", "sglang", "tensorrt-llm", "tgi", "triton")
_TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "tgi": "Text Generation Inference",
    "triton": "Triton Inference Server",
}


@dataclass(frozen=True)
class Option:
    """One answer."""

    id: str
    label: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {"id": self.id, **in_both(label=self.label)}


@dataclass(frozen=True)
class Question:
    """One question with its answers; several may be given where that makes sense."""

    id: str
    question: Text
    options: tuple[Option, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {"id": self.id, "options": [one.to_dict() for one in self.options], **in_both(question=self.question)}


@dataclass(frozen=True)
class Reason:
    """One fact that counted. blocks: the engine cannot do what was asked. source: version, date or address."""

    question: str
    option: str
    points: int
    blocks: bool
    text: Text
    source: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        plain = {name: getattr(self, name) for name in ("question", "option", "points", "blocks")}
        return {**plain, **in_both(text=self.text, source=self.source)}


@dataclass(frozen=True)
class Ranking:
    """One engine's place. blocked: something that was asked for is impossible there; then it comes last."""

    engine: str
    title: str
    points: int
    blocked: bool
    reasons_for: tuple[Reason, ...]
    reasons_against: tuple[Reason, ...]
    version: str | None
    notice: Text | None = None  # what anyone who takes the engine should know

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        return {
            **(in_both(notice=self.notice) if self.notice is not None else {}),
            "engine": self.engine,
            "title": self.title,
            "points": self.points,
            "blocked": self.blocked,
            "version": self.version,
            "for": [reason.to_dict() for reason in self.reasons_for],
            "against": [reason.to_dict() for reason in self.reasons_against],
        }


def questions() -> list[Question]:
    """All questions, in the order in which they are asked."""
    return [
        Question(
            entry["id"],
            text_of(entry["question"]),
            tuple(Option(option["id"], text_of(option["label"])) for option in entry["options"]),
        )
        for entry in data("chooser")["questions"]
    ]


def choose(answers: Mapping[str, str | Sequence[str] | None]) -> list[Ranking]:
    """Engines, best first. answers: question id -> option id, or several; a question left out or None does not count.

    Raises `ConfigError` for a question or an option that does not exist.
    """
    counted = [(question, option, fact) for question, option in _answered(answers) for fact in option["facts"]]
    return sorted(
        (_ranking(engine, counted) for engine in ENGINES),
        key=lambda one: (one.blocked, -one.points, ENGINES.index(one.engine)),
    )


def fact_holds(fact: Mapping[str, Any]) -> bool:
    """Whether what a fact says of a flag is so in the newest version read; True where it says nothing of one."""
    if "flag" not in fact:
        return True
    engine, version = fact["engine"], newest(fact["engine"])
    absent = why_absent(engine, version, fact["flag"])
    if absent is None and "value" in fact:
        absent = why_value_absent(engine, version, fact["flag"], fact["value"])
    expected: bool = fact.get("has", True)
    return (absent is None) == expected


def _answered(answers: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    known = {entry["id"]: entry for entry in data("chooser")["questions"]}
    found: list[tuple[str, dict[str, Any]]] = []
    for question, answer in answers.items():
        if question not in known:
            raise ConfigError(f"there is no question {question!r}; there are {', '.join(known)}")
        options = {option["id"]: option for option in known[question]["options"]}
        chosen = [answer] if isinstance(answer, str) else list(answer or ())
        for one in dict.fromkeys(chosen):
            if one not in options:
                raise ConfigError(f"question {question!r} has no answer {one!r}; it has {', '.join(options)}")
            found.append((question, options[one]))
    return found


def _ranking(engine: str, counted: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> Ranking:
    reasons = [
        Reason(
            question,
            option["id"],
            fact["points"],
            fact.get("blocks", False),
            text_of(fact),
            _source(fact),
        )
        for question, option, fact in counted
        if fact["engine"] == engine and fact_holds(fact)
    ]
    notices = data("chooser")["notices"]
    return Ranking(
        engine,
        _TITLES[engine],
        sum(reason.points for reason in reasons),
        any(reason.blocks for reason in reasons),
        tuple(reason for reason in reasons if reason.points > 0),
        tuple(reason for reason in reasons if reason.points < 0),
        newest(engine),
        text_of(notices[engine]) if engine in notices else None,
    )


def _source(fact: Mapping[str, Any]) -> Text:
    """The fact's own source, and otherwise the release of the engine that was read, with the flag looked up in it."""
    if "source" in fact:
        return Text(fact["source"], fact["source"])
    release = text_of(data("chooser")["sources"][fact["engine"]])
    if "flag" not in fact:
        return release
    flag = f"{fact['flag']} {fact.get('value', '')}".strip()
    return Text(f"{release.en}: {flag}", f"{release.zh}：{flag}")
