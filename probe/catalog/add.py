"""`kvoncall catalog add`: the flags and metrics of another release, into the catalog.

The release is parsed, never imported. What it has is compared with the nearest older version known, and may be written
to the user's catalog folder in the format of the packaged files.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.catalog.archive import Release, open_release
from probe.catalog.diff import Change, flag_changes, metric_changes
from probe.catalog.metrics import metric_versions, metrics_at
from probe.catalog.metrics_source import SourceMetric, source_metrics
from probe.catalog.sglang_flags import sglang_flags
from probe.catalog.source import Modules
from probe.catalog.vllm_flags import vllm_flags
from probe.dialects.exposed import ExposedMetric
from runbooks.catalog_data import (
    CatalogData,
    CatalogError,
    Form,
    from_table,
    load,
    overlay_dir,
    read_file,
    text_of,
)
from runbooks.flag_facts import facts_of
from runbooks.versions import order_key, place

_READERS = {"vllm": vllm_flags, "sglang": sglang_flags}


@dataclass(frozen=True)
class Added:
    """What a release has, and what is new in it against `base`, a version known (None: the engine is new)."""

    engine: str
    version: str
    flags: dict[str, Form]
    metrics: dict[str, SourceMetric]
    base: str | None
    known: bool  # the catalog had this version already; `base` is itself then
    changes: list[Change]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "engine": self.engine,
            "version": self.version,
            "compared_with": self.base,
            "known_before": self.known,
            "flags": {name: form.to_dict() for name, form in sorted(self.flags.items())},
            "metrics": {name: metric.to_dict() for name, metric in sorted(self.metrics.items())},
            "changes": [change.to_dict() for change in self.changes],
        }


def read_release(path: Path, *, engine: str | None = None, version: str | None = None) -> Added:
    """Flags and metrics of the release at `path`, and what changed; raises `CatalogError`."""
    release = open_release(path, engine=engine, version=version)
    modules = Modules(release.files)
    try:
        flags = _READERS[release.engine](modules)
        metrics = source_metrics(modules, release.engine)
    except RecursionError as error:
        raise CatalogError(f"{path} holds source that is nested too deeply to be read: this is no release.") from error
    base = _base(release)
    return Added(
        release.engine,
        release.version,
        flags,
        metrics,
        base,
        base is not None and order_key(base) == order_key(release.version),
        [] if base is None else _changes(release, base, flags, metrics),
    )


def _base(release: Release) -> str | None:
    """The newest version known that is not newer; the oldest where all are."""
    data = load(release.engine)
    if data is None:
        return None
    return data.versions[max(place(release.version, data.versions), 0)]


def _changes(release: Release, base: str, flags: dict[str, Form], metrics: dict[str, SourceMetric]) -> list[Change]:
    data = load(release.engine)
    assert data is not None
    here = from_table(release.engine, data.read, {release.version: flags})
    found = flag_changes(facts_of(data, base), facts_of(here, release.version))
    if not metric_versions(release.engine):
        return found
    exposed = {
        name: ExposedMetric(name, m.type, m.labels, release.version, release.version, open_labels=m.open_labels)
        for name, m in metrics.items()
    }
    return found + metric_changes(metrics_at(release.engine, base), exposed)


def write(added: Added, folder: Path | None = None) -> Path:
    """Merges the version into ENGINE.json of the user's catalog folder and returns the file; raises `CatalogError`."""
    folder = folder or overlay_dir()
    file = folder / f"{added.engine}.json"
    old = read_file(file) if file.is_file() else CatalogData(added.engine, "", (), {})
    table = {version: old.at(version) for version in old.versions} | {added.version: added.flags}
    metrics = _metrics_by_version(old) | {added.version: added.metrics}
    read = f"read from releases by `kvoncall catalog add`, last {added.version}"
    data = from_table(added.engine, read, table)
    data = CatalogData(data.engine, read, data.versions, data.flags, _ranges(metrics, data.versions))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json.new", delete=False, encoding="utf-8") as new:
            new.write(text_of(data))
        os.replace(new.name, file)  # noqa: PTH105 - a reader sees the old file or the new one
    except OSError as error:
        raise CatalogError(f"{file} cannot be written: {error.strerror or error}; give --catalog-dir.") from error
    return file


def _metrics_by_version(data: CatalogData) -> dict[str, dict[str, SourceMetric]]:
    found: dict[str, dict[str, SourceMetric]] = {version: {} for version in data.versions}
    for name, specs in data.metrics.items():
        for spec in specs:
            first, _, last = spec["versions"].partition("..")
            start, stop = data.versions.index(first), data.versions.index(last or first)
            for version in data.versions[start : stop + 1]:
                labels = tuple(spec["labels"])
                found[version][name] = SourceMetric(name, spec["type"], labels, spec.get("open_labels", False))
    return found


def _ranges(table: dict[str, dict[str, SourceMetric]], versions: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Ranges of versions with the same form, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for index, version in enumerate(versions):
        for name, metric in table.get(version, {}).items():
            specs = found.setdefault(name, [])
            first, _, last = specs[-1]["versions"].partition("..") if specs else ("", "", "")
            same = specs and {k: v for k, v in specs[-1].items() if k != "versions"} == metric.to_dict()
            if same and (last or first) == versions[index - 1]:
                specs[-1]["versions"] = f"{first}..{version}"
            else:
                specs.append({"versions": version, **metric.to_dict()})
    return found
