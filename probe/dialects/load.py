"""Reads the data files: canonical.json, one file an engine, and what each version exposes."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from importlib.resources import files
from typing import Any

from probe.dialects.exposed import Exposed, load_exposed
from probe.dialects.model import CanonicalMetric, Config, Dialect, DialectError, Source, base_name

ENGINES = ("kvoncall", "vllm", "sglang", "tensorrt-llm", "tgi", "triton")


@dataclasses.dataclass(frozen=True)
class CanonicalName:
    """An entry of canonical.json; `measured_by` is engine, device or collector."""

    name: str
    type: str
    unit: str
    meaning: str
    buckets: bool
    measured_by: str


@cache
def canonical_names() -> dict[str, CanonicalName]:
    """Every canonical metric there is, by name."""
    found = {}
    for name, spec in _read("canonical.json")["metrics"].items():
        measured_by = spec.get("from", "engine")
        found[name] = CanonicalName(
            name, spec["type"], spec["unit"], spec["meaning"], spec.get("buckets", False), measured_by
        )
    return found


@cache
def load_dialect(engine: str, version: str | None = None, spelling: str | None = None) -> Dialect:
    """The dialect of an engine, for a version where it is known; raises `DialectError` for an unknown engine.

    `spelling` is the prefix in use where an engine has several ("sglang_" for "sglang:"), as `detect` tells it.
    """
    if engine not in ENGINES:
        raise DialectError(f"The metrics of engine {engine!r} are not known: use one of {', '.join(sorted(ENGINES))}.")
    if spelling is not None:
        return _respelled(load_dialect(engine, version), spelling)
    data = _read(f"{engine}.json")
    exposed = load_exposed(engine)
    dialect = _dialect(data, exposed, version)
    names = canonical_names()
    metrics = []
    for name, sources in _sources(data, dialect).items():
        known = names[name]
        metrics.append(
            CanonicalMetric(
                name, known.type, known.unit, sources, known.buckets, dialect.absent.get(name), known.meaning
            )
        )
    dialect = dataclasses.replace(dialect, metrics=tuple(metrics))
    return dataclasses.replace(dialect, required=_required(dialect))


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return data


def _dialect(data: dict[str, Any], exposed: Exposed, version: str | None) -> Dialect:
    """The dialect without its metrics."""
    return Dialect(
        data["engine"],
        version,
        (),
        tuple(data["required"]),
        data["info"],
        exposed,
        tuple(data["prefixes"]),
        marks=tuple(data.get("marks", ())),
        config=tuple(Config(key, c["name"], c.get("match", {})) for key, c in data.get("config", {}).items()),
        model_label=data["model_label"],
        engine_label=data["engine_label"],
        ranks=tuple(data.get("ranks", ())),
        totals=tuple(data.get("totals", ())),
        drop=tuple(data.get("drop", ())),
        only_models_of=data.get("only_models_of"),
        lazy=data.get("lazy", False),
        hidden_by=data.get("hidden_by"),
        metrics_path=data.get("metrics_path", "/metrics"),
        version_at=tuple((path, key) for path, key in data["version_at"]),
        slo=data["slo"],
        slo_source=data["slo_source"],
        absent=data["absent"],
        notes=tuple(data.get("notes", ())),
    )


def _sources(data: dict[str, Any], dialect: Dialect) -> dict[str, tuple[Source, ...]]:
    """Sources by canonical name; those of a dialect that is extended only as far as this engine exposes them."""
    found: dict[str, tuple[Source, ...]] = {}
    if extends := data.get("extends"):
        base = load_dialect(extends["engine"], extends["version"])
        for metric in base.metrics:
            source = base.source_at(metric.name)
            if source is not None and (source.name in dialect.exposed.forms or source.name in dialect.exposed.always):
                found[metric.name] = (dataclasses.replace(source, since=None, until=None, gate=None),)
    labels = data.get("labels", {})
    for name, specs in data["metrics"].items():
        found[name] = tuple(_source(spec, labels, dialect) for spec in specs)
    return found


def _source(spec: str | dict[str, Any], labels: dict[str, str], dialect: Dialect) -> Source:
    fields: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    if over := fields.pop("over", None):
        fields["over"] = Source(**over, labels=labels)
    source = Source(**fields, labels=labels)
    forms = dialect.exposed.forms.get(base_name(dialect, source.name), ())
    if not forms or not forms[0].since:
        return source
    newest = dialect.known_versions[-1]
    until = forms[-1].until if forms[-1].until != newest else None
    return dataclasses.replace(source, since=source.since or forms[0].since, until=source.until or until)


def _required(dialect: Dialect) -> tuple[str, ...]:
    """What every server of the version exposes without a flag; of every version where it is not known."""
    if dialect.version is not None or not dialect.known_versions:
        versions: tuple[str | None, ...] = (dialect.version,)
    else:
        versions = dialect.known_versions

    def sure(name: str) -> bool:
        sources = [dialect.source_at(name, version) for version in versions]
        return all(source is not None and source.gate is None for source in sources)

    return tuple(name for name in dialect.required if sure(name))


def _respelled(dialect: Dialect, spelling: str) -> Dialect:
    """The dialect with another prefix in all its names; raises `DialectError` for one it does not have."""
    usual = dialect.prefixes[0]
    if spelling == usual:
        return dialect
    if spelling not in dialect.prefixes:
        known = ", ".join(dialect.prefixes)
        raise DialectError(f"Metrics of {dialect.engine} do not begin with {spelling!r}: use one of {known}.")

    def spell(name: str) -> str:
        return spelling + name.removeprefix(usual) if name.startswith(usual) else name

    def respell(source: Source) -> Source:
        over = respell(source.over) if source.over is not None else None
        return dataclasses.replace(source, name=spell(source.name), over=over)

    metrics = tuple(
        dataclasses.replace(metric, sources=tuple(respell(source) for source in metric.sources))
        for metric in dialect.metrics
    )
    forms = {
        spell(name): tuple(dataclasses.replace(form, name=spell(name)) for form in found)
        for name, found in dialect.exposed.forms.items()
    }
    return dataclasses.replace(
        dialect,
        metrics=metrics,
        info=spell(dialect.info) if dialect.info else None,
        exposed=dataclasses.replace(dialect.exposed, forms=forms),
        config=tuple(dataclasses.replace(c, name=spell(c.name)) for c in dialect.config),
        prefixes=(spelling,),
    )
