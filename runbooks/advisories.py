"""Advisories and known bugs of an engine's version that touch the KV cache, from `catalog/advisories.json`.

An advisory applies where the version is in one of its spans and what it needs is in use. What is not known to be in
use does not rule it out: `Advisory.certain` is False then, and `condition` says what to look for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from runbooks.flags import default_of
from runbooks.versions import version_key

Confidence = Literal["high", "medium", "low"]
_STAGES = ("--pipeline-parallel-size", "--pp-size")


@dataclass(frozen=True)
class Advisory:
    """One advisory for one target. `affected`: spans [first, fixed), None open; a fixed version "X+" is any after X.

    `certain`: what it needs is known to be in use; else only the version says so.
    """

    id: str
    aliases: tuple[str, ...]
    kind: Literal["security", "bug"]
    engine: str
    affected: tuple[tuple[str | None, str | None], ...]
    when: Mapping[str, Any]
    condition: str
    what: str
    fixed: str | None
    workaround: str
    source: str
    confidence: Confidence
    runbook: str
    certain: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        found = dataclasses.asdict(self)
        return {**found, "aliases": list(self.aliases), "affected": [list(span) for span in self.affected]}

    def holds_for(self, version: str) -> bool:
        """Whether a version is in one of the spans."""
        return any(_after(first, version) and _before(version, fixed) for first, fixed in self.affected)


@dataclass(frozen=True)
class Excluded:
    """A claim that must not be cited, and why."""

    id: str
    claim: str
    why: str


def advisories_for(
    engine: str,
    version: str | None,
    flags: Mapping[str, Any] | None = None,
    *,
    complete: bool = False,
    **in_use: bool | str | None,
) -> list[Advisory]:
    """Advisories that hold for a target, security first, the certain ones first.

    flags: "--flag" -> value as far as they are known. complete: they are a whole command line, so that what they do
    not name is not in use. in_use: what `when` may name (multimodal, lora, disaggregated,
    offload, context_above_pool, connector …) where the caller knows better than flags tell. A version that is not
    known has no advisories: it could have all of them.
    """
    if version is None or not version_key(version):
        return []
    known = _in_use(engine, version, flags or {}, complete)
    known |= {key: value for key, value in in_use.items() if value is not None}
    found = []
    for advisory in all_advisories():
        if advisory.engine != engine or not advisory.holds_for(version):
            continue
        met = [_is_met(wanted, known.get(key)) for key, wanted in advisory.when.items()]
        if False not in met:
            found.append(dataclasses.replace(advisory, certain=None not in met))
    return sorted(found, key=lambda a: (a.kind != "security", not a.certain, a.id))


@functools.cache
def all_advisories() -> tuple[Advisory, ...]:
    """Every advisory there is."""
    return tuple(
        Advisory(
            **{**one, "aliases": tuple(one["aliases"]), "affected": tuple(tuple(span) for span in one["affected"])}
        )
        for one in _read()["advisories"]
    )


@functools.cache
def excluded() -> tuple[Excluded, ...]:
    """Claims that are not cited."""
    return tuple(Excluded(**one) for one in _read()["excluded"])


@functools.cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        files(__package__).joinpath("catalog/advisories.json").read_text(encoding="utf-8")
    )
    return found


def _after(first: str | None, version: str) -> bool:
    return first is None or version_key(first) <= version_key(version)


def _before(version: str, fixed: str | None) -> bool:
    if fixed is None:
        return True
    if fixed.endswith("+"):
        return version_key(version) <= version_key(fixed.removesuffix("+"))
    return version_key(version) < version_key(fixed)


def _in_use(engine: str, version: str, flags: Mapping[str, Any], complete: bool) -> dict[str, bool | str]:
    """What flags tell of what is in use; nothing where they do not."""
    found: dict[str, bool | str] = {}
    if engine == "vllm":
        caching = flags.get("--enable-prefix-caching", default_of(engine, version, "--enable-prefix-caching"))
        if isinstance(caching, bool):
            found["prefix_caching"] = caching
    if flags.get("--async-scheduling") is False:
        found["async_scheduling"] = False
    transfer = str(flags.get("--kv-transfer-config") or "")
    told: dict[str, tuple[bool | str, tuple[str, ...]]] = {
        "connector": (transfer, ("--kv-transfer-config",)),
        "lora": (bool(flags.get("--enable-lora")), ("--enable-lora",)),
        "offload": (
            bool(transfer or flags.get("--kv-offloading-size") or flags.get("--enable-hierarchical-cache")),
            ("--kv-transfer-config", "--kv-offloading-size", "--enable-hierarchical-cache"),
        ),
        "fp8_kv": ("fp8" in str(flags.get("--kv-cache-dtype", "auto")), ("--kv-cache-dtype",)),
        "dp_attention": (bool(flags.get("--enable-dp-attention")), ("--enable-dp-attention",)),
        "pipeline_parallel": (_more_than_one(flags, _STAGES), _STAGES),
    }
    for key, (value, names) in told.items():
        if complete or any(flags.get(name) is not None for name in names):
            found[key] = value
    return found


def _more_than_one(flags: Mapping[str, Any], names: Iterable[str]) -> bool:
    return any(str(flags.get(name, 1)) not in ("1", "None") for name in names)


def _is_met(wanted: Any, known: Any) -> bool | None:
    """Whether a condition holds; None where that is not known."""
    if known is None:
        return None
    if isinstance(wanted, str):
        return wanted.lower() in str(known).lower()
    return bool(known) == bool(wanted)
