"""Flags and changes as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from probe.catalog.diff import ORDER, Change
from runbooks.flags import FlagFacts

_TITLES = {
    "renamed": "renamed or replaced",
    "default": "default changed",
    "choices": "values changed",
    "kind": "kind changed",
    "labels": "labels changed",
    "type": "type changed",
    "hidden": "hidden or shown again",
}
_SIGNS = {"added": "+", "removed": "-", "renamed": ">"}


def flag_table(flags: Sequence[FlagFacts]) -> str:
    """One flag a line: name, kind, default, since; then its choices and its meaning."""
    if not flags:
        return "no such flag"
    width = min(max(len(facts.name) for facts in flags), 44)
    lines = [f"{'flag':{width}}  {'kind':10}  {'default':16}  since"]
    for facts in flags:
        since = facts.since + (f", gone after {facts.until}" if facts.until else "")
        marks = "".join(f"  {mark}" for mark in _marks(facts))
        lines.append(f"{facts.name:{width}}  {facts.kind:10}  {value(facts.default):16}  {since}{marks}")
        lines += [f"    {line}" for line in _below(facts)]
    return "\n".join(lines)


def _marks(facts: FlagFacts) -> list[str]:
    marks = ["deprecated"] if facts.deprecated else []
    if facts.replaced_by:
        marks.append(f"use {facts.replaced_by}")
    return marks


def _below(facts: FlagFacts) -> list[str]:
    lines = [facts.meaning] if facts.meaning else []
    if facts.raising:
        on = facts.raising.removeprefix("on: ")
        lines.append(f"switched on: {on}" if on != facts.raising else f"effect: {on}")
    if facts.default_note:
        lines.append(f"default: {facts.default_note}")
    if facts.choices:
        lines.append(f"one of: {', '.join(map(str, facts.choices))}")
    if facts.aliases:
        lines.append(f"also: {', '.join(facts.aliases)}")
    return lines


def value(found: Any) -> str:
    """A default or another value, short."""
    if found is None:
        return "-"
    if isinstance(found, bool):
        return "on" if found else "off"
    text = found if isinstance(found, str) else json.dumps(found)
    return repr(text) if text == "" else text


def changes(found: Sequence[Change]) -> str:
    """All changes under a heading for each sort."""
    parts = []
    for subject in ("flag", "metric"):
        for what in ORDER:
            group = [change for change in found if (change.subject, change.what) == (subject, what)]
            if group:
                parts.append(f"{subject}s {_TITLES.get(what, what)}: {len(group)}")
                parts += [f"  {_SIGNS.get(what, '~')} {_line(change)}" for change in group]
    return "\n".join(parts) if parts else "nothing changed"


def _line(change: Change) -> str:
    note = f"  ({change.note})" if change.note else ""
    if change.what == "added":
        return change.name + (f" = {value(change.after)}" if change.after is not None else "") + note
    if change.what == "removed":
        return change.name + note
    if change.what == "renamed":
        return f"{change.name} -> {change.after}{note}"
    if change.what == "choices" and change.note:
        return f"{change.name}: {change.note}"
    return f"{change.name}: {value(change.before)} -> {value(change.after)}{note}"
