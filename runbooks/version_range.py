"""Version ranges as pages state them: `>=0.20,<0.34` and nothing fancier.

A version compares by its numbers (`0.8.5.post1` like `0.8.5`), as far as both sides have any, so that `<0.34` leaves
out 0.34.0 and `<=0.33` takes in 0.33.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from runbooks.flags import version_key

_PART = re.compile(r"(>=|>|<=|<|==)(\d+(?:\.\d+)*(?:\.post\d+|rc\d+)?)")


@dataclass(frozen=True)
class VersionRange:
    """`parts` are (operator, version); all must hold."""

    parts: tuple[tuple[str, str], ...]

    def contains(self, version: str) -> bool:
        return all(_holds(version_key(version), sign, version_key(bound)) for sign, bound in self.parts)

    def of(self, versions: Iterable[str]) -> list[str]:
        """Those of `versions` that are in the range."""
        return [version for version in versions if self.contains(version)]


def parse_range(text: object) -> VersionRange | None:
    """The range a text states, None when it states none."""
    if not isinstance(text, str):
        return None
    found = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    parts = tuple((match[1], match[2]) for match in found if match is not None)
    return VersionRange(parts) if len(parts) == len(found) else None


def _holds(version: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    short = version[: len(bound)] + (0,) * (len(bound) - len(version))
    if sign in ("<=", "=="):
        return short == bound or (sign == "<=" and short < bound)
    if sign == "<":
        return short < bound
    return short > bound or (sign == ">=" and short == bound)
