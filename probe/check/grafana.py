"""Grafana's variables: what stands in their place so that an expression can be parsed.

Built-in durations become durations that break no rule; other variables become their current value where that fits
and a word otherwise. Inside quotes any value would do, so nothing is concluded from it (see `is_variable`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PLACEHOLDER = "grafana_variable"
ANY_NUMBER = "0.000000125"  # where a number must stand and none is known: too odd to be anybody's threshold

_VARIABLE = re.compile(
    r"\$\{(?P<braced>\w+)(?:\.[\w.]+)?(?::[^}]*)?\}|\[\[(?P<square>\w+)(?::[^\]]*)?\]\]|\$(?P<bare>[A-Za-z_]\w*)"
)
_BUILT_IN = {
    "__rate_interval": "5m",
    "__interval": "1m",
    "__interval_ms": "60000",
    "__range": "1h",
    "__range_s": "3600",
    "__range_ms": "3600000",
    "__from": "0",
    "__to": "3600000",
}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_DURATION = re.compile(r"(\d+(ms|[smhdwy]))+")
_WORDS = re.compile(r"[A-Za-z_:][\w:]*(\s*,\s*[A-Za-z_]\w*)*")


def is_variable(text: str) -> bool:
    """Whether a name or a label value came from a variable, so that nothing can be said about it."""
    return PLACEHOLDER in text


def variables_in(text: str) -> set[str]:
    """The names of the variables in an expression."""
    return {_name(match) for match in _VARIABLE.finditer(text)}


def current_values(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """The current value of each variable of a dashboard, where it has a single one."""
    templating = dashboard.get("templating")
    items = templating.get("list") if isinstance(templating, Mapping) else None
    values = {}
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            continue
        current = item.get("current")
        value = current.get("value") if isinstance(current, Mapping) else None
        if isinstance(value, str) and value and not value.startswith("$"):
            values[item["name"]] = value
    return values


def substitute(expression: str, values: Mapping[str, str]) -> str:
    """`expression` with every variable replaced."""

    def replace(match: re.Match[str]) -> str:
        name = _name(match)
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        before = expression[: match.start()]
        if _in_quotes(before):
            return PLACEHOLDER
        value = values.get(name, "")
        if _in_window(before):
            return value if _DURATION.fullmatch(value) else "5m"
        if _NUMBER.fullmatch(value) or _WORDS.fullmatch(value):
            return value
        return ANY_NUMBER if _takes_number(before) else PLACEHOLDER

    return _VARIABLE.sub(replace, expression)


def _name(match: re.Match[str]) -> str:
    return match["braced"] or match["square"] or match["bare"]


def _takes_number(before: str) -> bool:
    return bool(re.search(r"([<>]=?|[=!]=|[-+*/%^])\s*$|(quantile|topk|bottomk)\s*\(\s*$", before))


def _in_window(before: str) -> bool:
    opened = before.rfind("[")
    return (opened > before.rfind("]")) or bool(re.search(r"\boffset\s+-?$", before))


def _in_quotes(before: str) -> bool:
    quote = ""
    skip = False
    for character in before:
        if skip:
            skip = False
        elif character == "\\" and quote and quote != "`":
            skip = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "\"'`":
            quote = character
    return bool(quote)
