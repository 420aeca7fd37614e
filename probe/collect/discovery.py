"""Engines that a Prometheus server scrapes already, found by the names of their metrics.

Three queries for a whole fleet: which metrics of engines each target has, what their information metrics say, and when
they were scraped.
A target that is down at the moment has no metrics and is not found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from prometheus_client import Metric

from probe.collect.prometheus import PrometheusServer, Series, quoted
from probe.dialects import ENGINES, load_dialect
from probe.dialects.detect import detect

KEPT = ("job", "instance")


@dataclass(frozen=True)
class Candidate:
    """An engine as Prometheus knows it; `matchers` single it out (`Target.options["matchers"]`).

    `versions` are those whose metrics it has (none: none that was read). `evidence`: one sentence on how it is known.
    `scrape_interval_s`: how often Prometheus scrapes it, None while it did so only once; asking more often is in vain.
    """

    name: str
    engine: str
    versions: tuple[str, ...]
    models: tuple[str, ...]
    matchers: dict[str, str]
    evidence: str
    scrape_interval_s: float | None = None


@dataclass(frozen=True)
class Discovery:
    """What was found, by name, and what the server warned of."""

    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...] = ()


def discover(server: PrometheusServer) -> Discovery:
    """All engines the server scrapes now; blocks, raises `PrometheusError`."""
    by = ", ".join(("__name__", *KEPT, *sorted(_model_labels())))
    named = server.query(f"count by ({by}) ({{__name__=~{quoted(_engine_names())}}})")
    infos = server.query(f"{{__name__=~{quoted(_info_names())}}}")
    pages: dict[tuple[str, ...], list[Series]] = {}
    for labels, points in (*named.series, *infos.series):
        pages.setdefault(_key(labels), []).append((labels, points))
    found = [c for key, page in sorted(pages.items()) if (c := _candidate(key, page)) is not None]
    intervals = _intervals(server, found)
    candidates = [
        replace(c, name=name, scrape_interval_s=intervals.get(_key(c.matchers)))
        for c, name in zip(found, _unique_names(found), strict=True)
    ]
    return Discovery(tuple(candidates), tuple(dict.fromkeys((*named.warnings, *infos.warnings))))


def _key(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(labels.get(label, "") for label in KEPT)


def _intervals(server: PrometheusServer, found: Iterable[Candidate]) -> dict[tuple[str, ...], float]:
    """The usual time between two scrapes, by job and instance."""
    jobs = sorted({re.escape(c.matchers.get("job", "")) for c in found})
    if not jobs:
        return {}
    result = {}
    for labels, points in server.query(f"up{{job=~{quoted('|'.join(jobs))}}}[5m]").series:
        gaps = [after[0] - before[0] for before, after in pairwise(points)]
        if gaps:
            result[_key(labels)] = round(median(gaps), 3)
    return result


def _unique_names(found: Sequence[Candidate]) -> list[str]:
    """Instances, with their job where several jobs scrape one."""
    taken = Counter(c.name for c in found)
    return [c.name if taken[c.name] == 1 else f"{_plain(c.matchers.get('job', ''))}-{c.name}" for c in found]


def _plain(text: str) -> str:
    """Text as it may be in a target's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _candidate(key: tuple[str, ...], page: Iterable[Series]) -> Candidate | None:
    page = list(page)
    families: dict[str, Metric] = {}
    models: set[str] = set()
    names = {labels["__name__"] for labels, _ in page}
    for labels, points in page:
        name = _family(labels["__name__"], names)
        own = {k: v for k, v in labels.items() if k != "__name__" and k not in KEPT}
        families.setdefault(name, Metric(name, "", "unknown")).add_sample(name, own, points[-1][1])
        models |= {own[label] for label in _model_labels() if own.get(label)}
    found = detect(families)
    if found is None:
        return None
    matchers = {label: value for label, value in zip(KEPT, key, strict=True) if value}
    name = _plain(matchers.get("instance") or matchers.get("job", ""))
    return Candidate(name, found.engine, found.versions, tuple(sorted(models)), matchers, found.evidence)


def _family(name: str, names: set[str]) -> str:
    """A histogram's name for its sum and count."""
    base = name.removesuffix("_sum").removesuffix("_count")
    return base if {f"{base}_sum", f"{base}_count"} <= names else name


def _engine_names() -> str:
    """A regular expression of all names that tell an engine."""
    prefixes = {re.escape(p) for engine in ENGINES for p in load_dialect(engine).prefixes}
    marks = {re.escape(m) for engine in ENGINES for m in load_dialect(engine).marks}
    # Buckets would be most of the answer and tell nothing.
    return "|".join([f"(?:{'|'.join(sorted(prefixes))}).*(?:[^t]|[^e]t)", *sorted(marks)])


def _info_names() -> str:
    infos = {info for engine in ENGINES if (info := load_dialect(engine).info)}
    return "|".join(sorted(re.escape(info) for info in infos)) or "none"


def _model_labels() -> set[str]:
    return {label for engine in ENGINES if (label := load_dialect(engine).model_label)}
