"""Which flags exist for which engine and version, and what their defaults are.

The embedded engine's flags are those of its parser; those of the others come from `catalog/`, read from their
releases, and from what the user added to it. Everything here answers for the version it is asked about: a flag that
only one of two neighbouring versions has counts as absent between them.
"""

from __future__ import annotations

import functools
from typing import Any

from runbooks.catalog_data import CatalogData, CatalogError, load, notes
from runbooks.embedded_facts import EMBEDDED, embedded_actions, embedded_defaults, embedded_flags
from runbooks.flag_facts import (
    FlagFacts,
    all_flags,
    effective_default,
    flag_facts,
    known_versions,
    names_of,
    nearest_version,
    never_existed,
    presence,
    resolve,
    values,
)
from runbooks.versions import order_key, version_key

__all__ = [
    "EMBEDDED",
    "CatalogError",
    "FlagFacts",
    "all_flags",
    "catalog",
    "default_of",
    "embedded_flags",
    "flag_facts",
    "known_versions",
    "nearest_version",
    "needs_version_check",
    "never_existed",
    "version_key",
    "why_absent",
    "why_value_absent",
]


def catalog(engine: str) -> dict[str, Any]:
    """All flags an engine ever had, with `since` and `until` (None: the newest read has it); none if unknown."""
    data = load(engine)
    return {"flags": {}} if data is None else _catalog(data)


@functools.lru_cache(maxsize=16)
def _catalog(data: CatalogData) -> dict[str, Any]:
    flags = {}
    for name in data.flags:
        since, until = presence(data, name)
        flags[name] = {"since": since, "until": until, **notes(data.engine)["flags"].get(name, {})}
    return {
        "engine": data.engine,
        "read": data.read,
        "oldest": data.versions[0],
        "newest": data.versions[-1],
        "versions": data.versions,
        "flags": flags,
    }


def why_absent(engine: str, version: str | None, flag: str) -> str | None:
    """None when the flag exists for this engine and version, else the reason why it does not.

    With an unknown version a flag counts as existing unless it is gone from the newest release read.
    """
    if engine == EMBEDDED:
        return None if flag in embedded_flags() else f"{flag} is not a flag of the embedded engine"
    data = load(engine)
    if data is None:
        return f"{flag} is not in the flag catalog: there is none of {engine}; check `--help` of your build"
    if flag in notes(engine).get("env", {}):
        return _why_env_absent(engine, version, flag)
    if resolve(data, version, flag) is not None:
        return None
    names = names_of(data, flag)
    if not names:
        return _unknown(data, flag)
    return _why_not_then(data, version, flag, names[0])


def _unknown(data: CatalogData, flag: str) -> str:
    read = f"{data.versions[0]} to {data.versions[-1]}" if len(data.versions) > 1 else data.versions[0]
    instead = never_existed(data.engine).get(flag)
    hint = f"instead: {instead}" if instead else "check `--help` of your build"
    return f"{flag} is not in the flag catalog of {data.engine} (releases read: {read}); {hint}"


def _why_not_then(data: CatalogData, version: str | None, flag: str, name: str) -> str:
    engine = data.engine
    since, until = presence(data, name)
    replaced = notes(engine)["flags"].get(name, {}).get("replaced_by")
    instead = f"; use {replaced}" if replaced else ""
    if version is None:
        gone = f"{flag} is gone since {engine} {until}" if until else f"{engine} has {name}, not the spelling {flag}"
        return gone + instead
    here = order_key(version)
    if here < order_key(since):
        first = "was not read before" if since == data.versions[0] else "exists since"
        return f"{flag} {first} {engine} {since}; this target runs {version}"
    if until is not None and here > order_key(until):
        return f"{flag} was last seen in {engine} {until}; this target runs {version}{instead}"
    if resolve(data, version, name) is not None:
        return f"{engine} {version} has {name}, not the spelling {flag}"
    return f"{flag} is not known to be in {engine} {version}: of the releases read before and after, one lacks it"


def _why_env_absent(engine: str, version: str | None, name: str) -> str | None:
    note = notes(engine)["env"][name]
    since, until = note.get("since"), note.get("until")
    if until is not None and (version is None or order_key(version) > order_key(until)):
        return f"{name} was last read by {engine} {until}" + (f"; this target runs {version}" if version else "")
    if since is not None and version is not None and order_key(version) < order_key(since):
        return f"{name} is not known before {engine} {since}; this target runs {version}"
    return None


def why_value_absent(engine: str, version: str | None, flag: str, value: Any) -> str | None:
    """None when the flag takes this value in this engine and version, or takes any; else the reason why not.

    With an unknown version a value counts as existing if any release read has it.
    """
    if engine == EMBEDDED:
        choices = next((a.choices for a in embedded_actions() if flag in a.option_strings), None)
        if choices is None or value in choices:
            return None
        return f"{flag} of the embedded engine takes no {value}; it takes {', '.join(map(str, choices))}"
    data = load(engine)
    if data is None:
        return None
    found = resolve(data, version, flag)
    names = [found[0]] if found else names_of(data, flag)
    if not names:
        return None
    forms = [s.form for s in data.flags[names[0]]] if found is None or version is None else [found[1]]
    if any(form.choices is None or _among(value, form.choices) for form in forms):
        return None
    return _why_not_among(data, version, flag, names[0], value)


def _among(value: Any, choices: tuple[Any, ...]) -> bool:
    return value in choices or str(value) in {str(choice) for choice in choices}


def _why_not_among(data: CatalogData, version: str | None, flag: str, name: str, value: Any) -> str | None:
    """Why a version that restricts the flag's values does not take this one."""
    span = next((s for known, s in values(data, name).items() if str(known) == str(value)), None)
    if span is None or version is None:
        return f"{flag} {value} is in no release of {data.engine} up to {data.versions[-1]}"
    first, last = span
    if order_key(version) < order_key(first):
        return f"{flag} {value} exists since {data.engine} {first}; this target runs {version}"
    if last is not None and order_key(version) > order_key(last):
        return f"{flag} {value} was last taken by {data.engine} {last}; this target runs {version}"
    return f"{flag} {value} is not known to be taken by {data.engine} {version}"


def needs_version_check(engine: str, version: str | None, flag: str, value: Any = None) -> str | None:
    """A caution when existence could not be checked: since which version the flag, or its value, exists."""
    if engine == EMBEDDED or version is not None:
        return None
    data = load(engine)
    names = [] if data is None else names_of(data, flag)
    if data is None or not names:
        return None
    since, what = presence(data, names[0])[0], "the flag"
    taken = {str(known): span[0] for known, span in values(data, names[0]).items()}
    if value is not None and str(value) in taken:
        since, what = taken[str(value)], f"the value {value}"
    return f"version unknown: {what} exists since {engine} {since}" if since != data.versions[0] else None


def default_of(engine: str, version: str | None, flag: str) -> Any:
    """The effective default (None: unset, not known, or decided by hardware or model: see `flag_facts`).

    An unknown version reads the newest release; one that was not read, the nearest before it.
    """
    if engine == EMBEDDED:
        return embedded_defaults().get(flag)
    data = load(engine)
    if data is None:
        return None
    at = nearest_version(engine, version)[0]
    found = resolve(data, at, flag)
    return None if found is None else effective_default(engine, at, *found)[0]
