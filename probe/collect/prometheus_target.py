"""One engine as a Prometheus server sees it: its newest samples, each with Prometheus' scrape time, and its history.

`options["matchers"]` (job, instance, …) single it out: they must leave one series of `up`. Labels that `up` carries are
the target's own and are taken off the samples; what Prometheus renamed to `exported_…` because of them gets its name
back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from probe.collect.canonical import canonical_samples, wanted_names
from probe.collect.changes import Observation
from probe.collect.prometheus import PrometheusError, PrometheusServer, RangeAnswer, Series, selector
from probe.collect.scrape import dialect_of, read_scrape
from probe.dialects import Dialect
from probe.store import Sample, Target

if TYPE_CHECKING:
    import pandas as pd

LOOKBACK_S = 300.0  # Prometheus' own: what has no sample for so long is gone
OVERLAP_S = 5.0
_ABOUT_SCRAPES = {"scrape_duration_seconds", "scrape_samples_scraped"}
_NOT_THE_ENGINES = _ABOUT_SCRAPES | {"up"}


@dataclass
class PrometheusTarget:
    """Reads one target again and again; remembers up to where it has read."""

    server: PrometheusServer
    _read_until: float = float("-inf")

    def read(self, target: Target, now: float) -> list[Observation]:
        """What Prometheus scraped since the last read, oldest first; blocks. Nothing new is an empty list.

        `now` is the time of a finding that has none of its own: Prometheus fails, or the target is gone from it.
        Raises `DialectError` for an engine that is not known.
        """
        try:
            matchers = matchers_of(target)
            since = self._read_until if math.isfinite(self._read_until) else now - LOOKBACK_S
            window_s = math.ceil(min(max(now - since + OVERLAP_S, 2 * OVERLAP_S), LOOKBACK_S))
            dialect = dialect_of(target)
            names = {*spellings(dialect, wanted_names(dialect)), *_NOT_THE_ENGINES}
            answer = self.server.query(f"{selector(matchers, names)}[{window_s}s]")
            own = target_labels(answer.series, target)
            if own is None:
                if self.server.query(f"up{selector(matchers)}").series:
                    return []  # it scrapes less often than we ask
                sentence = f"{self.server.url} has no target with {selector(matchers)} any more."
                return [Observation(target, now, None, sentence)]
        except PrometheusError as error:
            return [Observation(target, now, None, str(error), known=False)]
        found = [o for o in _observations(answer, own, target, dialect) if o.ts > self._read_until]
        if found:
            self._read_until = found[-1].ts
        return found


def matchers_of(target: Target) -> dict[str, str]:
    """The labels that single out a target; raises `PrometheusError` if it has none."""
    matchers = target.options.get("matchers")
    if not isinstance(matchers, Mapping) or not matchers:
        raise PrometheusError(f"The target {target.name} does not say by which labels Prometheus knows it.")
    return {str(label): str(value) for label, value in matchers.items()}


def spellings(dialect: Dialect, names: Iterable[str]) -> set[str]:
    """Names in every spelling of the engine's prefix."""
    usual, *others = dialect.prefixes or ("",)
    found = set(names)
    return found | {other + n.removeprefix(usual) for n in found if usual and n.startswith(usual) for other in others}


def target_labels(series: Iterable[Series], target: Target) -> dict[str, str] | None:
    """The labels of the target itself (those of `up`), or None without `up`; `PrometheusError` if there are several."""
    found = [{k: v for k, v in labels.items() if k != "__name__"} for labels, _ in series if labels["__name__"] == "up"]
    if len(found) > 1:
        raise PrometheusError(
            f"The labels of {target.name} fit {len(found)} targets of its Prometheus: name job and instance."
        )
    return found[0] if found else None


def families_of(series: Iterable[tuple[Mapping[str, str], float]], own: Mapping[str, str]) -> list[Metric]:
    """Series of one moment, as if the engine had exposed them."""
    families: dict[str, Metric] = {}
    for labels, value in series:
        name = labels["__name__"]
        metric = families.setdefault(name, Metric(name, "", "unknown"))
        metric.add_sample(name, without(labels, own), value)
    return list(families.values())


def without(labels: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Labels as the engine gave them: without the target's, and under their own names."""
    result = {}
    for name, value in labels.items():
        if name == "__name__" or own.get(name) == value:
            continue
        plain = name.removeprefix("exported_")
        result[plain if plain in own else name] = value
    return result


def _observations(answer: RangeAnswer, own: Mapping[str, str], target: Target, dialect: Dialect) -> list[Observation]:
    moments: dict[float, dict[str, float]] = {}
    engine: dict[float, list[tuple[Mapping[str, str], float]]] = {}
    for labels, points in answer.series:
        name = labels["__name__"]
        for ts, value in points:
            if name in _NOT_THE_ENGINES:
                moments.setdefault(ts, {})[name] = value
            else:
                engine.setdefault(ts, []).append((labels, value))
    found = []
    refused = {f"Prometheus warns: {warning}": 1 for warning in answer.warnings}
    for ts, about in sorted(moments.items()):
        if "up" not in about:
            continue
        duration_s = about.get("scrape_duration_seconds", 0.0)
        if about["up"] == 0.0:
            instance = own.get("instance", target.name)
            sentence = f"Prometheus could not scrape {instance}."
            found.append(Observation(target, ts, None, sentence, duration_s))
            continue
        families = families_of(engine.get(ts, ()), own)
        read = read_scrape(families, dialect, target.name, ts, refused)
        exposed = int(about.get("scrape_samples_scraped", read.exposed))
        found.append(Observation(target, ts, replace(read, exposed=exposed), None, duration_s))
    return found


def series(
    server: PrometheusServer, target: Target, metric: str, start: float, end: float, step: float
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """A canonical metric of a target over time, as `store.samples.range` gives it, and what is wrong with it.

    Columns `ts`, `value` and one per label; rows by series, then time. Blocks; raises `PrometheusError`.
    """
    import pandas as pd  # half a second that the command line mostly does not need

    dialect = dialect_of(target)
    wanted = {"up"} if metric == "up" else _sources_of(dialect, metric)
    if not wanted:
        raise PrometheusError(f"{target.engine} exposes nothing that gives {metric}.")
    matchers = matchers_of(target)
    answer = server.query_range(selector(matchers, wanted), start, end, step)
    own = target_labels(server.query(f"up{selector(matchers)}").series, target) or matchers
    at: dict[float, list[tuple[Mapping[str, str], float]]] = {}
    for labels, points in answer.series:
        for ts, value in points:
            at.setdefault(ts, []).append((labels, value))
    found: list[Sample] = []
    for ts, rows in sorted(at.items()):
        if metric == "up":
            found += [Sample(target.name, "up", without(labels, own), ts, value) for labels, value in rows]
        else:
            samples, _ = canonical_samples(families_of(rows, own), dialect, target.name, ts)
            found += [s for s in samples if s.metric == metric]
    found.sort(key=lambda s: (sorted(s.labels.items()), s.ts))
    columns: dict[str, list[Any]] = {"ts": [s.ts for s in found], "value": [s.value for s in found]}
    for name in sorted({name for s in found for name in s.labels}):
        columns[name] = [s.labels.get(name, "") for s in found]
    problems = (*answer.warnings, *([answer.problem] if answer.problem else []))
    return pd.DataFrame(columns), problems


def _sources_of(dialect: Dialect, series_name: str) -> set[str]:
    """Exposed names from which a canonical series (of a histogram, with its suffix) is made."""
    found: set[str] = set()
    for metric in dialect.metrics:
        suffix = series_name.removeprefix(metric.name)
        if not series_name.startswith(metric.name) or suffix not in ("", "_sum", "_count", "_bucket"):
            continue
        for source in metric.sources:
            found |= {source.name + suffix, source.name + ("_sum" if suffix else "")}
            if source.over is not None:
                found.add(source.over.name)
    if not found:
        return set()
    about = {dialect.info or "", dialect.only_models_of or "", *(config.name for config in dialect.config)}
    return spellings(dialect, (found | about) - {""})
