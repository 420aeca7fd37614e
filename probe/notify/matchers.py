"""Alertmanager's label matchers: `name="value"`, `!=`, `=~`, `!~`; expressions match the whole value.

A label that is missing has the value "". Labels of an alert here are those of `LABELS`. Expressions are Python's, less
what RE2 lacks (back references, look-around) and what Python may take for ever on: they are tried in the watch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

LABELS = ("rule", "target", "severity", "model", "engine")
MAX_MATCHERS = 20
MAX_VALUE = 500
MAX_REPEATS = 3

Operator = Literal["=", "!=", "=~", "!~"]

_PART = re.compile(
    r"""\s*(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*(?P<op>=~|!~|!=|=)\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^",{}]*))\s*"""
)

_NOT_RE2 = re.compile(r"\\[1-9]|\(\?(=|!|<=|<!|>|P=|\()|[*+?}]\+")


class MatcherError(ValueError):
    """A matcher that cannot be read or can never match; the message is one sentence."""


@dataclass(frozen=True)
class Matcher:
    """One condition on one label."""

    name: str
    op: Operator
    value: str

    def __str__(self) -> str:
        value = self.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'{self.name}{self.op}"{value}"'

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels meet the condition."""
        found = labels.get(self.name, "")
        is_equal = found == self.value if self.op in ("=", "!=") else re.fullmatch(self.value, found) is not None
        return is_equal if self.op in ("=", "=~") else not is_equal


def matches(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Whether the labels meet every condition; true when there is none."""
    return all(matcher.matches(labels) for matcher in matchers)


def matcher(name: str, op: str, value: str) -> Matcher:
    """A checked matcher; raises `MatcherError`."""
    if name not in LABELS:
        raise MatcherError(f"alerts have no label {name!r}: use {', '.join(LABELS)}")
    if op not in ("=", "!=", "=~", "!~"):
        raise MatcherError(f"{op!r} compares nothing: use =, !=, =~ or !~")
    if len(value) > MAX_VALUE:
        raise MatcherError(f"the value for {name} is longer than {MAX_VALUE} characters")
    if op in ("=~", "!~"):
        _check_expression(value)
    return Matcher(name, cast("Operator", op), value)


def parse_matchers(text: str) -> tuple[Matcher, ...]:
    """Reads `rule="oom", target=~"prod-.*"` (braces and quotes optional); raises `MatcherError`."""
    rest = text.strip()
    if rest.startswith("{") and rest.endswith("}"):
        rest = rest[1:-1].strip()
    found: list[Matcher] = []
    while rest:
        part = _PART.match(rest)
        if part is None:
            raise MatcherError(f'{rest!r} is not a matcher: write rule="oom", target=~"prod-.*"')
        bare, quoted = part["bare"], part["quoted"]
        value = bare.strip() if quoted is None else _unquoted(quoted)
        found.append(matcher(part["name"], part["op"], value))
        rest = rest[part.end() :]
        if rest and not rest.startswith(","):
            raise MatcherError(f'{rest!r} is not a matcher: separate matchers by commas, as in rule="oom", target="a"')
        rest = rest[1:].strip()
    if len(found) > MAX_MATCHERS:
        raise MatcherError(f"there are more than {MAX_MATCHERS} matchers")
    return tuple(found)


def narrowing(matchers: Iterable[Matcher]) -> bool:
    """Whether at least one condition needs a label to be there: without one, a silence would mute everything."""
    return any(not matcher.matches({}) for matcher in matchers)


def _check_expression(text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise MatcherError(f"{text!r} is not a regular expression: {error}") from None
    unescaped = re.sub(r"\\[^1-9]", "c", text)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "c", unescaped)  # every sign that is left means something
    if _NOT_RE2.search(bare):
        raise MatcherError(f"{text!r} looks back, around or ahead, which Alertmanager's expressions cannot")
    if _repeats_a_repeat(bare) or len(re.findall(r"[*+]|,\}", bare)) > MAX_REPEATS:
        raise MatcherError(
            f"{text!r} could take too long: use {MAX_REPEATS} of * and + at most, and none after a group that has "
            "one or branches"
        )


def _repeats_a_repeat(bare: str) -> bool:
    """Whether a group that repeats or branches inside, at any depth, is repeated itself; escapes are gone by now."""
    while group := re.search(r"\(([^()]*)\)([*+{]?)", bare):
        is_open = re.search(r"[*+|\0]|,\}", group[1]) is not None
        if is_open and group[2]:
            return True
        bare = f"{bare[: group.start()]}{chr(0) if is_open else 'c'}{bare[group.end(1) + 1 :]}"
    return False


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text)
