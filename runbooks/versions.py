"""Order of engine versions, and which of the versions that were read speaks for another.

`0.8.5.post1` comes after `0.8.5`, `0.29.1rc1` before `0.29.1`, `0.18` is `0.18.0`; a local part (`+cu129`) does not
count. What lies between two versions that were read is taken to be like the older one.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence

VersionKey = tuple[int, ...]

_VERSION = re.compile(r"v?(\d{1,9}(?:\.\d{1,9})*)(?:[.-]?(dev|a|b|rc|post)\.?(\d{1,9})?)?")
_BEFORE = {"dev": 0, "a": 1, "b": 2, "rc": 3}
_LAST = 1_000_000  # above any number in a version


@functools.lru_cache(maxsize=4096)
def version_key(version: str) -> VersionKey:
    """The numbers to compare versions by: `0.10.1.1` -> (0, 10, 1, 1). Empty, and below all, for what is no version.

    A post-release adds numbers to its release's; a pre-release takes the last place before it. A short one stays
    short, so that callers can compare as far as it goes; `order_key` reads `0.18` as `0.18.0`.
    """
    return _key(version, 0)


@functools.lru_cache(maxsize=4096)
def order_key(version: str) -> VersionKey:
    """Like `version_key`, of three numbers at least."""
    return _key(version, 3)


def _key(version: str, width: int) -> VersionKey:
    found = _VERSION.match(version.strip())
    if found is None:
        return ()
    numbers = [int(part) for part in found[1].split(".")]
    numbers += [0] * (width - len(numbers))
    phase, count = found[2], int(found[3] or 0)
    if phase is None:
        return tuple(numbers)
    if phase == "post":
        return (*numbers, 0, count)
    return (*numbers[:-1], numbers[-1] - 1, _LAST, _BEFORE[phase], count)


def place(version: str, known: Sequence[str]) -> int:
    """Where a version stands among those read, ascending: index of the newest that is not newer; -1 before all."""
    return bisect.bisect_right(known, order_key(version), key=order_key) - 1


def nearest(engine: str, version: str | None, known: Sequence[str]) -> tuple[str, str | None]:
    """The version read whose facts hold for `version`, and one sentence where that is a guess."""
    if version is None:
        return known[-1], f"The version is not known: {engine} {known[-1]}, the newest that was read, is assumed."
    key = order_key(version)
    if not key:
        return known[-1], f"{version!r} is not a version of {engine}: {known[-1]}, the newest read, is assumed."
    at = place(version, known)
    if at < 0:
        return known[0], f"{engine} {version} is older than all that was read: {known[0]} is assumed."
    if order_key(known[at]) == key:
        return known[at], None
    if at == len(known) - 1:
        return known[at], f"{engine} {version} is newer than all that was read: {known[at]} is assumed."
    return known[at], f"{engine} {version} was not read: {known[at]}, the nearest before it, is assumed."
