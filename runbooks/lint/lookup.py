"""Flags as the linter asks for them: of engines with a catalog, and of the embedded engine's own parser."""

from __future__ import annotations

import argparse
import functools

from runbooks.embedded_facts import embedded_actions
from runbooks.flags import EMBEDDED, FlagFacts, all_flags, flag_facts, known_versions, nearest_version, version_key

_BY_ARGPARSE = ("vllm", "sglang")


def facts_of(engine: str, version: str | None, flag: str) -> FlagFacts | None:
    """A flag under any spelling in a version, abbreviations included; None where it is not there."""
    if engine == EMBEDDED:
        return _embedded().get(flag)
    return flag_facts(engine, version, flag) or _abbreviated(engine, version, flag)


def facts_ever(engine: str, version: str | None, flag: str) -> FlagFacts | None:
    """The same, else of the newest version that had it."""
    found = facts_of(engine, version, flag)
    if found is not None or engine == EMBEDDED:
        return found
    older = (flag_facts(engine, known, flag) for known in reversed(known_versions(engine)))
    return next((facts for facts in older if facts is not None), None)


def has_flags(engine: str) -> bool:
    """Whether the flags of an engine are known at all."""
    return engine == EMBEDDED or bool(known_versions(engine))


def names(engine: str, version: str | None) -> list[str]:
    """All flags of a version."""
    if engine == EMBEDDED:
        return sorted(_embedded())
    return [facts.name for facts in _all(engine, version)]


def version_of(engine: str, version: str | None) -> tuple[str, str | None]:
    """The version whose facts are used, and a sentence where it is a guess; "" for an engine without a catalog."""
    if engine == EMBEDDED or not known_versions(engine):
        return version or "", None
    nearest, note = nearest_version(engine, version)
    if version is None or not version_key(version):
        return nearest, note
    return version, note


def _abbreviated(engine: str, version: str | None, flag: str) -> FlagFacts | None:
    """The one flag that begins like this: argparse takes it for that one."""
    if engine not in _BY_ARGPARSE or len(flag) < 4 or not flag.startswith("--"):
        return None
    found = {f.name: f for f in _all(engine, version) if any(name.startswith(flag) for name in (f.name, *f.aliases))}
    return next(iter(found.values())) if len(found) == 1 else None


@functools.lru_cache(maxsize=8)
def _all(engine: str, version: str | None) -> tuple[FlagFacts, ...]:
    return tuple(all_flags(engine, version))


@functools.cache
def _embedded() -> dict[str, FlagFacts]:
    found: dict[str, FlagFacts] = {}
    for action in embedded_actions():
        spellings = [s for s in action.option_strings if s.startswith("--")]
        if not spellings:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            kind = "bool"
        elif action.nargs == 0:
            kind = "switch"
        elif action.nargs in ("*", "+"):
            kind = "list"
        else:
            kind = "int" if action.type is int else "float" if action.type is float else "value"
        choices = tuple(action.choices) if action.choices is not None else None
        facts = FlagFacts(spellings[0], kind, action.default, choices, "", None, True, "", "", False, None, True)
        found |= dict.fromkeys(spellings, facts)
    return found
