"""Exposed metrics in canonical names: the one step between an engine's page and the store.

Of each canonical metric the first source that is there is read. A name whose unit depends on the version is left
out while the version is unknown. Labels keep their names unless the dialect renames them; what `match` fixes, and
the ranks of processes that report the same requests, are no labels. NaN and `*_created` are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import Metric

from probe.dialects import CanonicalMetric, Dialect, Source
from probe.store import Sample

# Exposed series by name: labels and value.
Series = tuple[Mapping[str, str], float]
Page = dict[str, list[Series]]


def canonical_samples(
    families: Iterable[Metric], dialect: Dialect, target: str, ts: float
) -> tuple[list[Sample], dict[str, str]]:
    """Families as samples in canonical names, and what they tell of the configuration.

    Where several engines answer, the configuration is the first one's.
    """
    page = _page(families, dialect)
    info = _configuration(page, dialect)
    samples: list[Sample] = []
    for metric, sources in _readable(dialect):
        for source in sources:
            found = _read(page, dialect, metric, source, info)
            if found:
                samples += [Sample(target, name, labels, ts, value) for name, labels, value in found]
                break
    return samples, info


def missing(dialect: Dialect, samples: Iterable[Sample]) -> tuple[str, ...]:
    """Required metrics that a scrape did not carry.

    Where metrics show up at their first event, an engine that has not ended a request yet misses nothing.
    """
    names = {sample.metric for sample in samples}
    if dialect.lazy and "requests_finished_total" not in names:
        return ()
    return tuple(name for name in dialect.required if name not in names)


@cache
def _readable(dialect: Dialect) -> tuple[tuple[CanonicalMetric, tuple[Source, ...]], ...]:
    return tuple((metric, readable(dialect, metric)) for metric in dialect.metrics)


def readable(dialect: Dialect, metric: CanonicalMetric) -> tuple[Source, ...]:
    """Sources of a metric to try on a page, in order: those of the version first, then names of one meaning only."""
    meanings: dict[str, set[tuple[float, str | None]]] = {}
    for source in metric.sources:
        meanings.setdefault(source.name, set()).add((source.factor, source.factor_info))
    version = dialect.nearest()[0] if dialect.version is not None else None
    covered = [s for s in metric.sources if version is not None and s.covers(version)]
    plain = [s for s in metric.sources if len(meanings[s.name]) == 1]
    found: dict[tuple[object, ...], Source] = {}
    for source in (*covered, *plain):
        found.setdefault((source.name, *source.match.items()), source)
    return tuple(found.values())


@cache
def wanted_names(dialect: Dialect) -> frozenset[str]:
    """Names of exposed series that the dialect reads, in its usual spelling; all others can be skipped unread."""
    names = {config.name for config in dialect.config} | {dialect.info or "", dialect.only_models_of or ""}
    for metric in dialect.metrics:
        for source in metric.sources:
            names |= {source.name + suffix for suffix in _suffixes(metric)}
            if source.over is not None:
                names.add(source.over.name)
    return frozenset(names - {""})


def usual_spelling(dialect: Dialect, name: str) -> str:
    """An exposed name with the usual prefix where it has another spelling of it."""
    for other in dialect.prefixes[1:]:
        if name.startswith(other):
            return dialect.prefixes[0] + name.removeprefix(other)
    return name


def _page(families: Iterable[Metric], dialect: Dialect) -> Page:
    wanted, respell = wanted_names(dialect), len(dialect.prefixes) > 1
    page: Page = {}
    for family in families:
        for sample in family.samples:
            name = usual_spelling(dialect, sample.name) if respell else sample.name
            if family.type == "counter" and name not in wanted:
                name = name.removesuffix("_total")  # the parser gives it to counters that do without
            if name in wanted and not math.isnan(sample.value):
                page.setdefault(name, []).append((sample.labels, sample.value))
    models = {labels.get(dialect.model_label or "") for labels, _ in page.get(dialect.only_models_of or "", ())}
    if models:
        for name, series in page.items():
            page[name] = [s for s in series if s[0].get(dialect.model_label or "", None) in {None, *models}]
    return page


def _configuration(page: Page, dialect: Dialect) -> dict[str, str]:
    info = page.get(dialect.info or "", ())
    found = dict(info[0][0]) if info else {}
    for config in dialect.config:
        values = [value for labels, value in page.get(config.name, ()) if _matches(labels, config.match)]
        if values and config.key not in found:
            found[config.key] = str(int(values[0])) if float(values[0]).is_integer() else str(values[0])
    return found


def _suffixes(metric: CanonicalMetric) -> tuple[str, ...]:
    if metric.type != "histogram":
        return ("",)
    return ("_sum", "_count", "_bucket") if metric.buckets else ("_sum", "_count")


def _read(
    page: Page, dialect: Dialect, metric: CanonicalMetric, source: Source, info: Mapping[str, str]
) -> list[tuple[str, dict[str, str], float]]:
    """(canonical series name, labels, value) of one source; empty where it is not there or cannot be converted."""
    factor = _factor(source, info)
    if factor is None:
        return []
    found: list[tuple[str, dict[str, str], float]] = []
    for suffix in _suffixes(metric):
        series = _series(page, dialect, source, source.name + suffix)
        if suffix == _suffixes(metric)[0] and not series:
            return []
        if factor != 1.0 and suffix != "_count":
            series = [_scaled(labels, value, factor, suffix) for labels, value in series]
        found += [(metric.name + suffix, labels, value) for labels, value in series]
    return found if source.over is None else _over(found, _series(page, dialect, source.over, source.over.name))


def _factor(source: Source, info: Mapping[str, str]) -> float | None:
    if source.factor_info is None:
        return source.factor
    try:
        return source.factor * float(info[source.factor_info])
    except (KeyError, ValueError):
        return None


def _scaled(labels: dict[str, str], value: float, factor: float, suffix: str) -> tuple[dict[str, str], float]:
    """A histogram's bucket keeps its count and scales its bound; anything else scales its value."""
    if suffix != "_bucket":
        return labels, value * factor
    try:
        bound = float(labels["le"])
    except (KeyError, ValueError):
        return labels, value
    return {**labels, "le": "+Inf" if math.isinf(bound) else repr(round(bound * factor, 12))}, value


def _over(
    found: Sequence[tuple[str, dict[str, str], float]], series: Sequence[tuple[dict[str, str], float]]
) -> list[tuple[str, dict[str, str], float]]:
    totals: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in series:
        totals[tuple(sorted(labels.items()))] = totals.get(tuple(sorted(labels.items())), 0.0) + value
    by = [(name, labels, value, totals.get(tuple(sorted(labels.items())), 0.0)) for name, labels, value in found]
    return [(name, labels, value / total) for name, labels, value, total in by if total > 0]


def _series(page: Page, dialect: Dialect, source: Source, name: str) -> list[tuple[dict[str, str], float]]:
    """Series of a source with canonical labels."""
    exposed = page.get(name, ())
    if source.match:
        exposed = [s for s in exposed if _matches(s[0], source.match)]
    gone = {*source.match, *dialect.drop, *dialect.totals, *dialect.ranks}
    if not gone and not source.labels:
        return [(dict(labels), float(value)) for labels, value in exposed]
    lowest: dict[tuple[tuple[str, str], ...], tuple[tuple[int, ...], dict[str, str], float]] = {}
    for labels, value in exposed:
        if any(labels.get(label) for label in dialect.totals):
            continue
        kept = {source.labels.get(key, key): text for key, text in labels.items() if key not in gone}
        rank = tuple(_number(labels.get(label)) for label in dialect.ranks)
        key = tuple(sorted(kept.items()))
        if key not in lowest or rank < lowest[key][0]:
            lowest[key] = rank, kept, float(value)
    return [(labels, value) for _, labels, value in lowest.values()]


def _matches(labels: Mapping[str, str], match: Mapping[str, str]) -> bool:
    return all(labels.get(label) == value for label, value in match.items())


def _number(rank: str | None) -> int:
    return int(rank) if rank and rank.isdigit() else 0
