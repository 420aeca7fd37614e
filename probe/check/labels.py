"""Labels: ones a metric does not have, `le` spelt otherwise than exposed, `le` paired with series that have none.

Only labels that an engine is known to use somewhere, or that people write for one of them, are judged: any other may
come from the user's own scrape configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

from probe.check.expression import (
    COMPARISONS,
    carries_le,
    constant,
    function,
    grouping,
    matches_on_le,
    operator,
    uses,
    walk,
)
from probe.check.finding import ERROR, WARNING, Finding
from probe.check.grafana import is_variable
from probe.check.replacements import LABEL_MEANT
from probe.check.subject import Subject, text_of
from probe.check.vocabulary import Resolution

_NUMBER = re.compile(r"\+?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|Inf)")
_POSITIVE = (promql.MatchOp.Equal, promql.MatchOp.Re)


def check_labels(subject: Subject) -> Iterator[Finding]:
    yield from _matchers(subject)
    yield from _groupings(subject)
    yield from _le_spelling(subject)
    yield from _le_pairs(subject)


def _matchers(subject: Subject) -> Iterator[Finding]:
    told: set[tuple[str, str]] = set()
    for use in subject.uses:
        meaning = subject.meaning(use)
        for matcher in use.selector.matchers.matchers:
            label = str(matcher.name)
            wrong = _wrong(subject, meaning, label)
            if wrong is None or (use.name, label) in told or not str(matcher.value):
                continue
            told.add((use.name, label))
            positive = matcher.op in _POSITIVE and not _matches_empty(matcher)
            effect = f"the selector matches nothing: {subject.effect}" if positive else "the matcher does nothing"
            yield subject.finding(
                "wrong-label",
                f"{use.name} has no label {label!r} (it has {_listed(subject, meaning)}): {effect}.",
                _label_advice(wrong, label),
                at=use.name,
                corrected=_relabelled(subject, label, wrong),
                severity=ERROR if positive else WARNING,
            )


def _matches_empty(matcher: Any) -> bool:
    if matcher.op != promql.MatchOp.Re:
        return False
    try:
        return re.fullmatch(str(matcher.value), "") is not None
    except re.error:
        return True


def _groupings(subject: Subject) -> Iterator[Finding]:
    """`by`, `without` and `on` with labels that no series inside has."""
    if any(function(node) in ("label_replace", "label_join") or operator(node) == "count_values"
           for node, _ in walk(subject.tree)):  # fmt: skip
        return
    told: set[str] = set()
    for node, _ in walk(subject.tree):
        for word, label in _grouped_labels(node):
            meanings = [subject.meaning(use) for use in uses(node)]
            wrongs = [_wrong(subject, meaning, label) for meaning in meanings]
            if label in told or not wrongs or any(wrong is None for wrong in wrongs):
                continue
            told.add(label)
            wrong = wrongs[0] or ""
            name = meanings[0].name
            yield subject.finding(
                "wrong-label",
                f"{name} has no label {label!r} (it has {_listed(subject, meanings[0])}): `{word} ({label})` puts all "
                "series together, unless your scrape configuration adds that label.",
                _label_advice(wrong, label),
                at=name,
                corrected=_relabelled(subject, label, wrong),
                severity=WARNING,
            )


def _grouped_labels(node: Any) -> list[tuple[str, str]]:
    if isinstance(node, promql.AggregateExpr):
        word, labels = grouping(node)
        return [(word, label) for label in labels if label != "le" and not is_variable(label)]
    if isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
        matching = node.modifier.matching
        word = "on" if matching.type == promql.LabelModifierType.Include else "ignoring"
        return [(word, str(label)) for label in matching.labels if label != "le"] if word == "on" else []
    return []


def _wrong(subject: Subject, meaning: Resolution, label: str) -> str | None:
    """None if nothing is wrong with the label; else the label that is meant, or "" if none is known."""
    if label == "__name__" or is_variable(label) or meaning.engine is None or meaning.status in ("gone", "future"):
        return None
    labels = subject.vocabulary.labels_of(meaning)
    if labels is None or label in labels | meaning.engine.common_labels:
        return None
    meant = LABEL_MEANT.get(label, "")
    if meant in labels:
        return meant
    if label in subject.vocabulary.domain_labels(meaning.engine):
        undetermined = meaning.engine.name == "sglang" and labels == {"model_name"}  # see exposed/sglang.json
        return None if undetermined else ""
    return next((other for other in sorted(labels) if _is_slip(label, other)), None)


def _is_slip(label: str, other: str) -> bool:
    """Whether two labels differ by one letter left out, added or changed, or by underscores."""
    if len(other) < 5 or label == other:
        return False
    if label.replace("_", "").lower() == other.replace("_", ""):
        return True
    if abs(len(label) - len(other)) > 1:
        return False
    short, long = sorted((label, other), key=len)
    if len(short) == len(long):
        return sum(a != b for a, b in zip(short, long, strict=True)) == 1
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def _listed(subject: Subject, meaning: Resolution) -> str:
    labels = subject.vocabulary.labels_of(meaning) or frozenset()
    return ", ".join(sorted(labels)) or "none"


def _label_advice(meant: str, label: str) -> str:
    return meant or f"leave {label} out, or take a metric that has it"


def _relabelled(subject: Subject, label: str, meant: str) -> str | None:
    if not meant:
        return None
    return re.sub(rf"(?<![\w:$\"']){re.escape(label)}(?=\s*(=|!=|[,)]))", meant, subject.query.text)


def _le_spelling(subject: Subject) -> Iterator[Finding]:
    for use in subject.uses:
        meaning = subject.meaning(use)
        if meaning.part != "_bucket" or meaning.engine is None:
            continue
        for matcher in use.selector.matchers.matchers:
            value = str(matcher.value)
            if matcher.name != "le" or not all(_NUMBER.fullmatch(part) for part in value.split("|")):
                continue
            spelt = "|".join(_spelling(part) for part in value.split("|"))
            if spelt != value and meaning.engine.name in _PYTHON_CLIENT:
                text = str(subject.query.text)
                yield subject.finding(
                    "le-spelling",
                    f'le="{value}" matches nothing, the bucket is exposed as le="{spelt}": {subject.effect}.',
                    f'le="{spelt}"',
                    at=use.name,
                    corrected=text.replace(f'"{value}"', f'"{spelt}"').replace(f"'{value}'", f"'{spelt}'"),
                )
            yield from _no_such_bound(subject, use.name, value)


def _no_such_bound(subject: Subject, name: str, value: str) -> Iterator[Finding]:
    """Bounds that a live server does not have; without one they are not known."""
    bounds = subject.vocabulary.page.bounds.get(name) if subject.vocabulary.page is not None else None
    missing = [part for part in value.split("|") if bounds and float(part) not in bounds]
    if bounds and missing:
        near = min(bounds, key=lambda bound: abs(bound - float(missing[0])))
        yield subject.finding(
            "le-spelling",
            f"{name} has no bucket le={missing[0]}; near it there is {_spelling(repr(near))}: {subject.effect}.",
            f'le="{_spelling(repr(near))}", or another of {", ".join(_spelling(repr(one)) for one in sorted(bounds))}',
            at=name,
        )


_PYTHON_CLIENT = ("vllm", "sglang", "tensorrt-llm", "kvoncall")  # these write bounds as Python's client does


def _spelling(number: str) -> str:
    """A bucket's bound as the Python client writes it: always with a decimal point, from a million on as a power."""
    if not math.isfinite(float(number)):
        return "+Inf"
    written = repr(float(number))
    whole = written.find(".")
    if whole > 6:
        mantissa = f"{written[0]}.{written[1:whole]}{written[whole + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{whole - 1}"
    return written


def _le_pairs(subject: Subject) -> Iterator[Finding]:
    for node, _ in walk(subject.tree):
        op = operator(node)
        if not isinstance(node, promql.BinaryExpr) or op == "or" or not matches_on_le(node):
            continue
        if constant(node.lhs) is not None or constant(node.rhs) is not None:
            continue
        left, right = carries_le(node.lhs), carries_le(node.rhs)
        if {left, right} != {True, False}:
            continue
        with_le, without = (node.lhs, node.rhs) if left else (node.rhs, node.lhs)
        comparison = "compared" if op in COMPARISONS else "matched"
        yield subject.finding(
            "le-compared-with-none",
            f"`{_short(with_le)}` has the label le and `{_short(without)}` has not, so no pair of series is "
            f"{comparison} by {op!r}: {'nothing is ever taken away' if op == 'unless' else subject.effect}.",
            f"{op} ignoring (le)",
            at=next((use.name for use in uses(with_le)), ""),
            corrected=_ignoring_le(subject, node, op),
        )


def _ignoring_le(subject: Subject, node: Any, op: str) -> str | None:
    if node.modifier is not None and node.modifier.matching is not None:
        return None
    word = f"{op} bool" if node.modifier is not None and node.modifier.return_bool else op
    return subject.rewrite(node, f"{text_of(node.lhs)} {word} ignoring (le) {_operand(node.rhs)}")


def _operand(node: Any) -> str:
    inner = text_of(node)
    return f"({inner})" if isinstance(node, promql.ParenExpr | promql.BinaryExpr) else inner


def _short(node: Any) -> str:
    written = text_of(node)
    return written if len(written) <= 70 else written[:67] + "..."
