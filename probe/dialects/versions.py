"""Order of engine versions: `0.8.5.post1` comes after `0.8.5`, `1.3.0rc5` before `1.3.0`, and `main` after all.

Facts are known of the versions that were read. What lies between two of them is taken to be like the older one,
what is newer than all like the newest; `nearest` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from runbooks.versions import order_key

MAIN = "main"  # a development branch that was read without a release tag

VersionKey = tuple[int, ...]


def version_key(version: str) -> VersionKey | None:
    """What to compare versions by; None for a text that is no version. A local part (`+cu129`) does not count."""
    return (999_999,) if version == MAIN else order_key(version) or None


def nearest(engine: str, version: str, known: Sequence[str]) -> tuple[str, str | None]:
    """The version whose facts hold for `version`, and one sentence where that is a guess.

    `known` is in ascending order and not empty.
    """
    key = version_key(version)
    if key is None:
        return known[-1], f"{version!r} is not a version of {engine}: {known[-1]} is assumed."
    older = [v for v in known if (at := version_key(v)) is not None and at <= key]
    if not older:
        return known[0], f"{engine} {version} is older than what was read: {known[0]} is assumed."
    same = older[-1]
    if version_key(same) == key:
        return same, None
    if same == known[-1]:
        return same, f"{engine} {version} is newer than what was read: {same} is assumed."
    if known[-1] == MAIN and same == known[-2]:
        return MAIN, f"The metrics of {engine} {version} were not read: those of its main branch are assumed."
    return same, f"The metrics of {engine} {version} were not read: those of {same} are assumed."


def span(versions: str, known: Sequence[str]) -> tuple[int, int]:
    """First and last place in `known` of a span `A..B`, or of one version `A`."""
    first, _, last = versions.partition("..")
    return known.index(first), known.index(last or first)
