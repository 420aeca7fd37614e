"""Which metrics an engine exposes in a version.

Names, types and labels are owned by `probe/dialects/exposed`; versions that the user added with `kvoncall catalog add`
come from their catalog files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probe.dialects.exposed import ExposedMetric, load_exposed
from probe.dialects.load import ENGINES
from probe.dialects.versions import nearest, span
from runbooks.catalog_data import CatalogData, overlay_dir, read_file
from runbooks.versions import order_key

_SUFFIXES = ("_bucket", "_sum", "_count", "_created")


def metric_versions(engine: str) -> tuple[str, ...]:
    """The versions whose metrics were read, ascending; empty where the engine has no versions or is not known."""
    if engine not in ENGINES:
        return ()
    packaged, own = load_exposed(engine).versions, _own(engine)
    added = own.versions if own is not None and own.metrics else ()
    new = [version for version in added if version not in packaged]
    return tuple(sorted((*packaged, *new), key=_order)) if new else packaged


def metrics_at(engine: str, version: str | None) -> dict[str, ExposedMetric]:
    """Metrics of the nearest version read, by name, gated and hidden ones included; the newest if not known."""
    if engine not in ENGINES:
        return {}
    exposed, known = load_exposed(engine), metric_versions(engine)
    if not known:
        return exposed.at("")
    at = known[-1] if version is None else nearest(engine, version, known)[0]
    own = _own(engine)
    if own is not None and at in own.versions and own.metrics:
        return _forms_at(own.metrics, own.versions, at)
    return exposed.at(at)


def metric_facts(engine: str, version: str | None, metric: str) -> ExposedMetric | None:
    """A metric as exposed, also under a name of one of a histogram's series; None where the version has none."""
    found = metrics_at(engine, version)
    for name in (metric, *(metric.removesuffix(s) for s in _SUFFIXES if metric.endswith(s)), f"{metric}_total"):
        if name in found:
            return found[name]
    return None


def _order(version: str) -> tuple[int, ...]:
    return (1_000_000,) if version == "main" else order_key(version)


def _own(engine: str) -> CatalogData | None:
    file = overlay_dir() / f"{engine}.json"
    return read_file(file) if file.is_file() else None


def _forms_at(metrics: Mapping[str, Any], versions: tuple[str, ...], at: str) -> dict[str, ExposedMetric]:
    here, found = versions.index(at), {}
    for name, specs in metrics.items():
        for spec in specs:
            first, last = span(spec["versions"], versions)
            if first <= here <= last:
                labels, more = tuple(spec["labels"]), spec.get("open_labels", False)
                found[name] = ExposedMetric(
                    name, spec["type"], labels, versions[first], versions[last], open_labels=more
                )
    return found
