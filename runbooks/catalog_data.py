"""The flag catalog on disk: which forms every flag of an engine had, as ranges of the versions that were read.

catalog/ENGINE.json holds what releases say (`kvoncall catalog add` writes the same format), catalog/ENGINE-notes.json
what we say of it. A folder of the user's (`KVONCALL_CATALOG`, or `catalog` in the data folder) may add versions in
files of the first kind; where both know a version, the user's counts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runbooks.user_files import own_folder
from runbooks.versions import order_key, place

PACKAGED = Path(__file__).parent / "catalog"


class CatalogError(Exception):
    """A catalog file cannot be read or written; the message is one sentence for the user."""


@dataclass(frozen=True)
class Form:
    """A flag as one version has it. `computed`: source of a default that is not a literal (`default` is None then).

    Kinds: bool (`--x` and `--no-x`, takes no value), switch (`--x` only), bool-value (takes true or false), int,
    float, str, choice, list, json, value (a type of its own), env.
    """

    kind: str
    default: Any = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()
    deprecated: bool = False
    computed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As in the file: what is empty is left out."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.default is not None:
            found["default"] = self.default
        if self.choices is not None:
            found["choices"] = list(self.choices)
        if self.aliases:
            found["aliases"] = list(self.aliases)
        if self.deprecated:
            found["deprecated"] = True
        if self.computed is not None:
            found["computed"] = self.computed
        return found


@dataclass(frozen=True)
class Span:
    """First and last version read that have this form."""

    first: str
    last: str
    form: Form


@dataclass(frozen=True, eq=False)
class CatalogData:
    """What the releases of one engine say. `metrics` is filled in files of the user's only: see `probe/catalog`."""

    engine: str
    read: str
    versions: tuple[str, ...]  # ascending
    flags: Mapping[str, tuple[Span, ...]]
    metrics: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def form_at(self, flag: str, version: str | None) -> Form | None:
        """The form a flag has in a version (None: the newest read); None where it is not sure to exist.

        Between two versions read the older one's form holds if both have the flag.
        """
        spans = self.flags.get(flag, ())
        if not spans or not self.versions:
            return None
        at = len(self.versions) - 1 if version is None else place(version, self.versions)
        if at < 0:
            return None
        form = self._form(spans, at)
        if version is None or at == len(self.versions) - 1 or order_key(self.versions[at]) == order_key(version):
            return form
        return form if self._form(spans, at + 1) is not None else None

    def at(self, version: str) -> dict[str, Form]:
        """All flags of a version that was read."""
        index = self.versions.index(version)
        found = {name: self._form(spans, index) for name, spans in self.flags.items()}
        return {name: form for name, form in found.items() if form is not None}

    def _form(self, spans: Iterable[Span], index: int) -> Form | None:
        for span in spans:
            if self._index[span.first] <= index <= self._index[span.last]:
                return span.form
        return None

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {version: index for index, version in enumerate(self.versions)}

    @functools.cached_property
    def names_of_aliases(self) -> dict[str, tuple[str, ...]]:
        """Flags by each other spelling that any version takes."""
        found: dict[str, list[str]] = {}
        for name, spans in self.flags.items():
            for alias in {alias for span in spans for alias in span.form.aliases}:
                found.setdefault(alias, []).append(name)
        return {alias: tuple(names) for alias, names in found.items()}


def load(engine: str) -> CatalogData | None:
    """The packaged catalog with the user's versions merged in; None for an engine that has none."""
    own = overlay_dir() / f"{engine}.json"
    return _load(engine, own, own.stat().st_mtime_ns if own.is_file() else None)


@functools.lru_cache(maxsize=32)
def _load(engine: str, own: Path, stamp: int | None) -> CatalogData | None:
    packaged = PACKAGED / f"{engine}.json"
    base = read_file(packaged) if packaged.is_file() else None
    if stamp is None:
        return base
    added = read_file(own)
    return added if base is None else merge(base, added)


def engines() -> tuple[str, ...]:
    """Engines with a catalog, packaged or the user's."""
    packaged = {file.name.removesuffix("-notes.json") for file in PACKAGED.glob("*-notes.json")}
    return tuple(sorted(packaged | {file.stem for file in overlay_dir().glob("*.json")}))


def overlay_dir() -> Path:
    """Where the user's own catalog files live: `KVONCALL_CATALOG`, else `catalog` in the data folder."""
    return own_folder("KVONCALL_CATALOG", "catalog")


@functools.cache
def notes(engine: str) -> dict[str, Any]:
    """What we say of an engine's flags: meaning, direction, effective defaults, what replaces what, what never was."""
    file = PACKAGED / f"{engine}-notes.json"
    if not file.is_file():
        return {"flags": {}, "env": {}, "never": {}}
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def read_file(path: Path) -> CatalogData:
    """One catalog file; raises `CatalogError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        versions = tuple(data["versions"])
        flags = {name: tuple(_span(spec) for spec in specs) for name, specs in data["flags"].items()}
        known = set(versions)
        if not all({span.first, span.last} <= known for spans in flags.values() for span in spans):
            raise ValueError("a range names a version that is not in `versions`")
        return CatalogData(data["engine"], data["read"], versions, flags, data.get("metrics", {}))
    except OSError as error:
        raise CatalogError(f"The catalog file {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CatalogError(
            f"{path} is not a catalog file: {reason}; write it anew with `kvoncall catalog add`."
        ) from error


def _span(spec: Mapping[str, Any]) -> Span:
    first, _, last = spec["versions"].partition("..")
    choices = spec.get("choices")
    form = Form(
        spec["kind"],
        spec.get("default"),
        None if choices is None else tuple(choices),
        tuple(spec.get("aliases", ())),
        spec.get("deprecated", False),
        spec.get("computed"),
    )
    return Span(first, last or first, form)


def merge(base: CatalogData, added: CatalogData) -> CatalogData:
    """Both catalogs in one; the added one counts for its versions."""
    table = {version: base.at(version) for version in base.versions}
    table |= {version: added.at(version) for version in added.versions}
    metrics = {**base.metrics, **added.metrics}
    return from_table(base.engine, base.read, table, metrics)


def from_table(
    engine: str,
    read: str,
    table: Mapping[str, Mapping[str, Form]],
    metrics: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> CatalogData:
    """The compact catalog of the flags of each version."""
    versions = tuple(sorted(table, key=order_key))
    flags: dict[str, list[Span]] = {}
    for index, version in enumerate(versions):
        for name, form in table[version].items():
            spans = flags.setdefault(name, [])
            if spans and spans[-1].last == versions[index - 1] and _same(spans[-1].form, form):
                spans[-1] = Span(spans[-1].first, version, form)
            else:
                spans.append(Span(version, version, form))
    return CatalogData(engine, read, versions, {name: tuple(flags[name]) for name in sorted(flags)}, metrics or {})


def _same(one: Form, other: Form) -> bool:
    """`False` is not `0` here, nor `4` the same as `4.0`."""
    return one == other and repr(one.default) == repr(other.default)


def text_of(data: CatalogData) -> str:
    """The file's text, one flag a line."""
    head = {"engine": data.engine, "read": data.read, "versions": list(data.versions)}
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
    flags = [f"  {json.dumps(name)}: {_line([_spec(s) for s in spans])}" for name, spans in data.flags.items()]
    lines.append(' "flags": {\n' + ",\n".join(flags) + "\n }" + ("," if data.metrics else ""))
    if data.metrics:
        metrics = [f"  {json.dumps(name)}: {_line(list(specs))}" for name, specs in sorted(data.metrics.items())]
        lines.append(' "metrics": {\n' + ",\n".join(metrics) + "\n }")
    return "{\n" + "\n".join(lines) + "\n}\n"


def _spec(span: Span) -> dict[str, Any]:
    versions = span.first if span.first == span.last else f"{span.first}..{span.last}"
    return {"versions": versions, **span.form.to_dict()}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
