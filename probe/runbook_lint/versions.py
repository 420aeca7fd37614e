"""Which versions a page speaks of, and whether a sentence says where a flag or metric begins or ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from probe.dialects import load_dialect
from probe.dialects.versions import MAIN
from runbooks.flags import known_versions
from runbooks.version_range import parse_range

_NAMED = re.compile(r"\d+(?:\.\d+)+(?:\.post\d+|rc\d+)?")


def flag_versions(meta: dict[str, Any], engine: str) -> list[str]:
    """Versions in the page's range whose flags were read."""
    return _in_range(meta, engine, known_versions(engine))


def metric_versions(meta: dict[str, Any], engine: str) -> list[str]:
    """Versions in the page's range whose metrics were read."""
    return _in_range(meta, engine, load_dialect(engine).known_versions)


def _in_range(meta: dict[str, Any], engine: str, known: Sequence[str]) -> list[str]:
    versions = parse_range(meta["engines"].get(engine))
    if versions is None:
        return []
    is_open = all(sign.startswith(">") for sign, _ in versions.parts)
    return [one for one in known if (is_open if one == MAIN else versions.contains(one))]


def names_version(sentence: str, *versions: str | None) -> bool:
    """Whether a sentence names one of these versions; 0.24 stands for 0.24.0."""
    named = {_padded(match) for match in _NAMED.findall(sentence)}
    return any(version is not None and (version == MAIN or _padded(version) in named) for version in versions)


def _padded(version: str) -> tuple[int, ...]:
    """Its numbers, three at least; what marks a pre- or post-release does not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    key = tuple(map(int, numbers[0].split("."))) if numbers else ()
    return key + (0,) * (3 - len(key))


def says_bounds(sentence: str, inside: Sequence[str], known: Sequence[str], asked: Sequence[str]) -> str:
    """What a sentence leaves unsaid, of a name that the versions `inside` have and of `asked` not all have: "" if
    nothing. `known` are all versions read, in order.
    """
    unsaid = []
    first, last = known.index(inside[0]), known.index(inside[-1])
    if known.index(asked[0]) < first and not names_version(sentence, inside[0], known[first - 1]):
        unsaid.append(f"since {inside[0]}")
    after = known[last + 1] if last + 1 < len(known) else None
    if known.index(asked[-1]) > last and not names_version(sentence, inside[-1], after):
        unsaid.append(f"up to {inside[-1]}")
    return " and ".join(unsaid)
