"""Which flags exist for which engine and version, and what their defaults are.

The embedded engine's flags are those of its parser; those of vLLM and SGLang come from `catalog/`, read from their
releases.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, build_parser, flag_of

EMBEDDED = "kvoncall"


def embedded_flags() -> frozenset[str]:
    """Every flag the embedded engine's parser takes, its `--no-` forms included."""
    return frozenset(s for action in build_parser()._actions for s in action.option_strings if s.startswith("--"))


@functools.cache
def catalog(engine: str) -> dict[str, Any]:
    """The flag catalog of an engine; empty when there is none."""
    file = Path(__file__).parent / "catalog" / f"{engine}.json"
    if not file.is_file():
        return {"flags": {}}
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def version_key(version: str) -> tuple[int, ...]:
    """`0.10.1.1` -> (0, 10, 1, 1); suffixes such as `rc1` or `+cpu` are dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def why_absent(engine: str, version: str | None, flag: str) -> str | None:
    """None when the flag exists for this engine and version, else the reason why it does not.

    With an unknown version a flag counts as existing unless it is gone from the newest release read.
    """
    if engine == EMBEDDED:
        return None if flag in embedded_flags() else f"{flag} is not a flag of the embedded engine"
    data = catalog(engine)
    entry = data["flags"].get(flag)
    if entry is None:
        return f"{flag} is not in the flag catalog of {engine}; check `--help` of your build"
    if version is None:
        return None if entry["until"] is None else f"{flag} is gone since {engine} {entry['until']}"
    here = version_key(version)
    if here < version_key(entry["since"]):
        return f"{flag} exists since {engine} {entry['since']}; this target runs {version}"
    if entry["until"] is not None and here > version_key(entry["until"]):
        return f"{flag} was last seen in {engine} {entry['until']}; this target runs {version}"
    return None


def why_value_absent(engine: str, version: str | None, flag: str, value: Any) -> str | None:
    """None when the flag takes this value in this engine and version, or takes any; else the reason why not.

    With an unknown version a value counts as existing if any release read has it. In the catalog a value that is gone
    has the first and the last version that took it.
    """
    if engine == EMBEDDED:
        choices = next((a.choices for a in build_parser()._actions if flag in a.option_strings), None)
        if choices is None or value in choices:
            return None
        return f"{flag} of the embedded engine takes no {value}; it takes {', '.join(map(str, choices))}"
    since = catalog(engine)["flags"].get(flag, {}).get("values")
    if since is None:
        return None
    if value not in since:
        return f"{flag} {value} is in no release of {engine} up to {catalog(engine)['newest']}"
    first, last = _span(since[value])
    if version is not None and version_key(version) < version_key(first):
        return f"{flag} {value} exists since {engine} {first}; this target runs {version}"
    if version is not None and last is not None and version_key(version) > version_key(last):
        return f"{flag} {value} was last taken by {engine} {last}; this target runs {version}"
    return None


def _span(value: str | list[str]) -> tuple[str, str | None]:
    """The first version that takes a value, and the last one where it is gone."""
    return (value, None) if isinstance(value, str) else (value[0], value[1])


def needs_version_check(engine: str, version: str | None, flag: str, value: Any = None) -> str | None:
    """A caution when existence could not be checked: since which version the flag, or its value, exists."""
    if engine == EMBEDDED or version is not None:
        return None
    data = catalog(engine)
    entry = data["flags"].get(flag, {})
    since, what = entry.get("since"), "the flag"
    if value in entry.get("values", {}):
        since, what = _span(entry["values"][value])[0], f"the value {value}"
    return f"version unknown: {what} exists since {engine} {since}" if since and since != data["oldest"] else None


def default_of(engine: str, version: str | None, flag: str) -> Any:
    """The default of a flag (None: unset, or not known); an unknown version reads the newest release."""
    if engine == EMBEDDED:
        return {flag_of(f.name): f.default for f in fields(EngineConfig)}.get(flag)
    defaults = catalog(engine)["flags"].get(flag, {}).get("defaults", [])
    here = version_key(version) if version else None
    value = None
    for since, default in defaults:
        if here is None or here >= version_key(since):
            value = default
    return value
