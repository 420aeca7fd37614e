"""Metric names: dead, hidden, misspelt, without `_total`, of a histogram without its part."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser as promql

from probe.check.expression import Use, operator, uses
from probe.check.finding import ERROR, INFO, WARNING, Finding
from probe.check.replacements import REPLACED
from probe.check.subject import Subject
from probe.check.vocabulary import Engine, Resolution

_DEFECTS = ("hidden", "gone", "future", "unknown", "missing-total", "bare-histogram", "prefix")
_NOT_NOW = ("gated", "not-shown", "stranger")


def check_names(subject: Subject) -> Iterator[Finding]:
    """One finding for each name, with the whole expression corrected as far as all its names can be."""
    found: dict[str, Resolution] = {}
    for use in subject.uses:
        meaning = subject.meaning(use)
        if meaning.status in (*_DEFECTS, *_NOT_NOW) and not _is_fallback(subject, use):
            found.setdefault(use.name, meaning)
    renames = {name: _renamed(meaning) for name, meaning in found.items() if _renamed(meaning)}
    corrected = subject.rename(renames) if renames else None
    for name, meaning in found.items():
        yield _finding(subject, meaning, corrected if name in renames else None)
    yield from _patterns(subject)


def _renamed(meaning: Resolution) -> str:
    """The name to put in place, where the rest of the expression can stay as it is."""
    if not meaning.instead or (meaning.status == "unknown" and meaning.name not in REPLACED):
        return ""
    engine = meaning.engine
    if engine is None or _type(engine, meaning.instead) != (_type(engine, meaning.base) or _type_of(meaning)):
        return ""
    return meaning.instead


def _type(engine: Engine, name: str) -> str:
    for base in (name, name.removesuffix("_bucket"), name.removesuffix("_sum"), name.removesuffix("_count")):
        eras = engine.metrics.get(base.replace("sglang_", "sglang:"))
        if eras:
            return eras[-1].type
    return ""


def _type_of(meaning: Resolution) -> str:
    """For a name that never was, its successor's type: nothing contradicts it."""
    return _type(meaning.engine, meaning.instead) if meaning.engine and not meaning.base else ""


def _is_fallback(subject: Subject, use: Use) -> bool:
    """Whether a name of another version stands beside a live one in `new or old`, as it should."""
    if subject.meaning(use).status not in ("gone", "future", "hidden", "prefix"):
        return False
    for index, node in enumerate(use.path):
        if operator(node) != "or" or not isinstance(node, promql.BinaryExpr):
            continue
        inside = use.path[index + 1] if index + 1 < len(use.path) else use.selector
        other = node.rhs if inside.prettify() == node.lhs.prettify() else node.lhs
        if any(subject.meaning(one).status in ("live", "gated") for one in uses(other)):
            return True
    return False


def _finding(subject: Subject, meaning: Resolution, corrected: str | None) -> Finding:
    engine = meaning.engine
    assert engine is not None
    name, here = meaning.name, f"{engine.name} {engine.version}"
    code, severity, why = "unknown-metric", "", ""
    write = _advice(meaning)
    if meaning.status == "missing-total":
        code = "missing-total"
        why = f"{name} is a counter and is exposed as {meaning.instead}: {subject.effect}"
    elif meaning.status == "prefix":
        code = "wrong-prefix"
        why = f"{engine.name} exposes no name that begins like {name!r}: {subject.effect}"
        if subject.vocabulary.page is not None and meaning.instead in subject.vocabulary.page.labels:
            why = f"the server at hand exposes {meaning.instead}, not {name}: {subject.effect}"
        elif name.partition("_")[0] == engine.name:
            why += " (unless something on the way turns colons into underscores)"
    elif meaning.status == "bare-histogram":
        why = f"{name} is a histogram: it is exposed as {name}_bucket, {name}_sum and {name}_count; {subject.effect}"
        write = f"{name}_bucket inside histogram_quantile, or rate({name}_sum[5m]) / rate({name}_count[5m])"
    elif meaning.status == "hidden":
        why = f"{name} is deprecated and hidden in {here}: {subject.effect}"
        write = (write + "; or " if write else "") + f"start the server with {engine.hidden_flag}"
    elif meaning.status == "gated":
        severity, why = INFO, f"{name} is exposed by {here} only with {_gate(meaning)}"
        write = "make sure that the server has it, or the expression stays empty"
        if subject.vocabulary.page is not None and engine.name in subject.vocabulary.chosen:
            severity, why = WARNING, f"{why}, and the server at hand does not expose it"
    elif meaning.status == "not-shown":
        severity, why = INFO, f"{name} is known in {here}, but the server at hand does not show it now"
        write = "nothing if it shows up with the first event"
    elif meaning.status == "gone":
        why = f"{name} is gone from {here}: last in {_last(meaning)}; {subject.effect}"
    elif meaning.status == "future":
        why = f"{name} is not yet in {here}: first in {_first(meaning)}; {subject.effect}"
    elif meaning.status == "stranger":
        severity, why = WARNING, f"no version of {engine.name} exposes {name}: {subject.effect}"
        write = "keep it only if another program of yours exposes it"
    else:
        severity, why = ERROR, f"no version of {engine.name} exposes {name}: {subject.effect}"
    reason = _reason(meaning)
    return subject.finding(
        code, f"{why}; {reason}." if reason else f"{why}.", write or "remove it", at=name, corrected=corrected,
        severity=severity,
    )  # fmt: skip


def _colon(name: str) -> str:
    return name.replace("vllm_", "vllm:", 1) if name.startswith("vllm_") else name


def _reason(meaning: Resolution) -> str:
    entry = REPLACED.get(meaning.base) or REPLACED.get(_colon(meaning.name))
    return entry.why if entry else ""


def _advice(meaning: Resolution) -> str:
    if meaning.instead:
        return meaning.instead
    entry = REPLACED.get(meaning.base) or REPLACED.get(_colon(meaning.name))
    return entry.expr if entry else ""


def _gate(meaning: Resolution) -> str:
    return meaning.era.gate if meaning.era else ""


def _last(meaning: Resolution) -> str:
    assert meaning.engine is not None
    return meaning.engine.versions[max(era.last for era in meaning.engine.metrics[meaning.base])]


def _first(meaning: Resolution) -> str:
    assert meaning.engine is not None
    return meaning.engine.versions[min(era.first for era in meaning.engine.metrics[meaning.base])]


def _patterns(subject: Subject) -> Iterator[Finding]:
    """`{__name__=~"..."}` that matches no live name although it can only mean an engine's."""
    for use in subject.uses:
        pattern = _name_pattern(use)
        engine = subject.vocabulary.engine_of_pattern(pattern) if pattern and not use.name else None
        if engine is not None and not subject.vocabulary.matches_live(pattern, engine):
            yield subject.finding(
                "unknown-metric",
                f"the pattern {pattern!r} matches no metric of {engine.name} {engine.version}: {subject.effect}.",
                "the names that are exposed",
            )


def _name_pattern(use: Use) -> str:
    for matcher in use.selector.matchers.matchers:
        if matcher.name == "__name__" and matcher.op == promql.MatchOp.Re:
            return str(matcher.value)
    return ""
