"""What is known of one flag in one version: its form there, and what we say of it.

Looks through spellings: other names, `--no-x` of a bool, underscores, `--x.field` of a JSON flag, names of variables in
the environment. Defaults are the effective ones; where hardware or model decide, `default` is None and
`default_note` says how.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runbooks.catalog_data import CatalogData, Form, load, notes
from runbooks.embedded_facts import EMBEDDED, THIS, embedded_facts
from runbooks.versions import nearest, order_key


@dataclass(frozen=True)
class FlagFacts:
    """A flag in a version. `since` and `until` are versions that were read; `until` None: the newest read has it."""

    name: str
    kind: str
    default: Any
    choices: tuple[Any, ...] | None
    since: str
    until: str | None
    restart: bool
    meaning: str
    raising: str  # what raising it, or switching it on, does
    deprecated: bool
    replaced_by: str | None
    kv: bool
    aliases: tuple[str, ...] = ()
    default_note: str | None = None
    declared_default: Any = None  # the parser's; a literal or None
    computed: str | None = None  # source of the declared default where it is no literal

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        found = asdict(self)
        for key in ("choices", "aliases"):
            found[key] = None if found[key] is None else list(found[key])
        return found


def known_versions(engine: str) -> tuple[str, ...]:
    """The versions of an engine that were read, ascending; empty for an engine without a catalog."""
    if engine == EMBEDDED:
        return (THIS,)
    data = load(engine)
    return () if data is None else data.versions


def nearest_version(engine: str, version: str | None) -> tuple[str, str | None]:
    """The version read whose facts hold for this one, and one sentence where that is a guess.

    Raises `LookupError` for an engine without a catalog. The embedded engine has one version, this package's.
    """
    if engine == EMBEDDED:
        return THIS, None
    known = known_versions(engine)
    if not known:
        raise LookupError(f"there is no flag catalog of {engine!r}")
    return nearest(engine, version, known)


def flag_facts(engine: str, version: str | None, flag: str) -> FlagFacts | None:
    """A flag, under any spelling, in the nearest version that was read; None where that has no such flag."""
    if engine == EMBEDDED:
        return next((f for f in all_flags(engine, version) if flag in (f.name, *f.aliases, f"--no-{f.name[2:]}")), None)
    data = load(engine)
    if data is None:
        return None
    at = nearest(engine, version, data.versions)[0]
    if flag in notes(engine).get("env", {}):
        return _env_facts(engine, data, at, flag)
    found = resolve(data, at, flag)
    return None if found is None else _facts(engine, data, at, *found)


def all_flags(engine: str, version: str | None) -> list[FlagFacts]:
    """Every flag of the nearest version that was read, by name; what only the environment sets comes last."""
    if engine == EMBEDDED:
        return [FlagFacts(**found) for found in embedded_facts()]
    data = load(engine)
    if data is None:
        return []
    return facts_of(data, nearest(engine, version, data.versions)[0])


def facts_of(data: CatalogData, version: str) -> list[FlagFacts]:
    """Every flag of a version that this catalog has."""
    engine = data.engine
    flags = [_facts(engine, data, version, name, form) for name, form in sorted(data.at(version).items())]
    env = (_env_facts(engine, data, version, name) for name in sorted(notes(engine).get("env", {})))
    return flags + [facts for facts in env if facts is not None]


def resolve(data: CatalogData, version: str | None, flag: str) -> tuple[str, Form] | None:
    """Catalog name and form of a flag as written, where the version is sure to take it."""
    for name in _spellings(data, flag):
        form = data.form_at(name, version)
        if form is None:
            continue
        if name != flag and not _takes(data.engine, version, name, form, flag):
            continue
        return name, form
    return None


def names_of(data: CatalogData, flag: str) -> list[str]:
    """Catalog names, of any version, that a spelling could mean."""
    return [name for name in dict.fromkeys(_spellings(data, flag)) if name in data.flags]


def _spellings(data: CatalogData, flag: str) -> Iterable[str]:
    yield flag
    dashed = f"--{flag[2:].replace('_', '-')}" if flag.startswith("--") else flag
    yield dashed
    yield from data.names_of_aliases.get(dashed, ())
    for prefix, replacement in (("--no-", "--"), ("--disable-", "--enable-")):
        if dashed.startswith(prefix):
            yield replacement + dashed.removeprefix(prefix)
    base, dot, _ = dashed.partition(".")
    if dot and base.startswith("--"):
        yield base


def _takes(engine: str, version: str | None, name: str, form: Form, flag: str) -> bool:
    """Whether the version takes this spelling of the flag."""
    dashed = f"--{flag[2:].replace('_', '-')}" if flag.startswith("--") else flag
    if dashed == name:
        return engine in ("vllm", "sglang")  # vLLM turns underscores into dashes; argparse itself does not
    if dashed in form.aliases:
        return True
    if dashed.startswith("--no-") and dashed.removeprefix("--no-") == name.removeprefix("--"):
        return form.kind == "bool"
    if dashed.startswith("--disable-") and name.startswith("--enable-"):
        newer = version is None or order_key(version) >= order_key("0.33.0")
        return engine == "vllm" and form.kind == "bool" and newer
    return "." in dashed and form.kind == "json"


def presence(data: CatalogData, name: str) -> tuple[str, str | None]:
    """First version read with the flag, and the last one where the newest read lacks it."""
    spans = data.flags[name]
    return spans[0].first, None if spans[-1].last == data.versions[-1] else spans[-1].last


def values(data: CatalogData, name: str) -> dict[Any, tuple[str, str | None]]:
    """First and last version of each value that was ever among the choices; last is None if none is gone."""
    found: dict[Any, tuple[str, str | None]] = {}
    for span in data.flags[name]:
        for value in span.form.choices or ():
            found[value] = (found.get(value, (span.first, None))[0], span.last)
    open_end = data.versions[-1]
    return {value: (first, None if last == open_end else last) for value, (first, last) in found.items()}


def effective_default(engine: str, version: str | None, name: str, form: Form) -> tuple[Any, str | None]:
    """What holds where the flag is not given, and how that comes about where the parser does not tell."""
    note = _note(engine, name)
    value = by_version(note["defaults"], version) if "defaults" in note else form.default
    said = by_version(note["default_notes"], version) if "default_notes" in note else None
    if said is None and form.computed is not None and "defaults" not in note:
        said = f"computed at the start: {form.computed}"
    return value, said


def by_version(steps: Sequence[Sequence[Any]], version: str | None) -> Any:
    """Of steps `[since, value]`, ascending, the last that has begun; None before the first."""
    here = order_key(version) if version is not None else None
    begun = [value for since, value in steps if here is None or order_key(since) <= here]
    return begun[-1] if begun else None


def _note(engine: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = notes(engine)["flags"].get(name, {})
    return found


def _facts(engine: str, data: CatalogData, version: str, name: str, form: Form) -> FlagFacts:
    note = _note(engine, name)
    since, until = presence(data, name)
    default, said = effective_default(engine, version, name, form)
    return FlagFacts(
        name=name,
        kind=form.kind,
        default=default,
        choices=form.choices,
        since=since,
        until=until,
        restart=note.get("restart", True),
        meaning=note.get("meaning", ""),
        raising=note.get("raising", ""),
        deprecated=form.deprecated,
        replaced_by=note.get("replaced_by"),
        kv=note.get("kv", False),
        aliases=form.aliases,
        default_note=said,
        declared_default=form.default,
        computed=form.computed,
    )


def _env_facts(engine: str, data: CatalogData, version: str, name: str) -> FlagFacts | None:
    """A variable in the environment; its versions are in our notes, as releases have no list of them to parse."""
    note = notes(engine)["env"][name]
    since, until = note.get("since", data.versions[0]), note.get("until")
    here = order_key(version)
    if here < order_key(since) or (until is not None and here > order_key(until)):
        return None
    return FlagFacts(
        name=name,
        kind="env",
        default=note.get("default"),
        choices=tuple(note["choices"]) if "choices" in note else None,
        since=since,
        until=until,
        restart=True,
        meaning=note["meaning"],
        raising=note.get("raising", ""),
        deprecated=False,
        replaced_by=note.get("replaced_by"),
        kv=note.get("kv", True),
    )


@functools.cache
def never_existed(engine: str) -> dict[str, str]:
    """Names that are often advised and that no release has, with what to use instead."""
    found: dict[str, str] = notes(engine).get("never", {})
    return found
