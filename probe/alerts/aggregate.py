"""Figures of one model over all its targets and engines, each with the stamp of what it rests on.

Counts add up, ratios are ratios of sums, quantiles come from merged buckets, KV usage is the hottest engine's. An
engine that does not answer is missing from the sums and said to be missing; it never makes a mean look better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from probe.alerts.arithmetic import Moment, QuantileReading, bucket_increases, increase, quantile
from probe.alerts.window import Series, to_ms

METRICS = (
    "up",
    "requests_running",
    "requests_waiting",
    "kv_usage_ratio",
    "preemptions_total",
    "requests_finished_total",
    "generation_tokens_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "ttft_seconds_bucket",
)
"""What the figures are made of."""


@dataclass(frozen=True)
class ModelFigures:
    """`None`: nothing is known of it. `hottest`: (KV usage, target, engine). `eviction`: (preemptions, in service)."""

    model: str
    targets: tuple[str, ...]
    running: float | None
    waiting: float | None
    hottest: tuple[float, str, str] | None
    eviction: tuple[float, float] | None
    tokens_per_s: float | None
    hit_rate: float | None
    ttft_p95: QuantileReading | None
    engines_answering: int
    engines_known: int
    oldest_s: float | None
    resets: int

    @property
    def eviction_rate(self) -> float | None:
        """Preemptions per request in service."""
        return self.eviction[0] / self.eviction[1] if self.eviction is not None else None

    @property
    def stamp(self) -> str:
        """What the figures rest on."""
        said = f"{self.engines_answering} of {self.engines_known} engines"
        if self.oldest_s is not None:
            said += f", up to {self.oldest_s:.0f} s old"
        return said + (f", {self.resets} counter reset{'s' if self.resets > 1 else ''}" if self.resets else "")


def by_model(moments: Mapping[str, Moment], window_s: float) -> list[ModelFigures]:
    """Figures of every model that was seen, by name; `moments`: target -> its samples as of now."""
    models: dict[str, set[str]] = {}
    for target, at in moments.items():
        for series in at.window.series("requests_running"):
            models.setdefault(series.labels.get("model_name", ""), set()).add(target)
    return [_figures(model, {t: moments[t] for t in sorted(models[model])}, window_s) for model in sorted(models)]


def _figures(model: str, moments: Mapping[str, Moment], window_s: float) -> ModelFigures:
    running = _sum(_newest(moments, "requests_running", model))
    preempted, finished = (
        _growth(moments, f"{m}_total", model, window_s) for m in ("preemptions", "requests_finished")
    )
    tokens = _growth(moments, "generation_tokens_total", model, window_s)
    queries, hits = (_growth(moments, f"prefix_{m}_total", model, window_s) for m in ("queries", "hits"))
    usage = [
        (value, target, series.labels.get("engine", ""))
        for target, series, value in _newest(moments, "kv_usage_ratio", model)
    ]
    in_service = None if finished is None or running is None else max(finished + running, 1.0)
    known = [(at, s) for at in moments.values() for s in _of(at, "requests_running", model)]
    ages = [(at.now_ms - s.newest_ms) / 1000 for at, s in known if at.newest(s, "requests_running") is not None]
    return ModelFigures(
        model=model,
        targets=tuple(moments),
        running=running,
        waiting=_sum(_newest(moments, "requests_waiting", model)),
        hottest=max(usage, default=None),
        eviction=None if preempted is None or in_service is None else (preempted, in_service),
        tokens_per_s=None if tokens is None else tokens / window_s,
        hit_rate=hits / queries if hits is not None and queries else None,
        ttft_p95=_ttft(moments, model, window_s),
        engines_answering=len(ages),
        engines_known=len(known),
        oldest_s=max(ages, default=None),
        resets=_resets(moments, "requests_finished_total", model, window_s),
    )


def _of(at: Moment, metric: str, model: str) -> list[Series]:
    return [s for s in at.window.series(metric) if s.labels.get("model_name", "") == model]


def _newest(moments: Mapping[str, Moment], metric: str, model: str) -> list[tuple[str, Series, float]]:
    return [
        (target, series, value)
        for target, at in moments.items()
        for series in _of(at, metric, model)
        if (value := at.newest(series, metric)) is not None
    ]


def _sum(found: Iterable[tuple[str, Series, float]]) -> float | None:
    values = [value for _, _, value in found]
    return sum(values) if values else None


def _growth(moments: Mapping[str, Moment], metric: str, model: str, window_s: float) -> float | None:
    grown = [
        value
        for at in moments.values()
        for series in _of(at, metric, model)
        if (value := increase(series, at.now_ms - to_ms(window_s), at.now_ms)) is not None
    ]
    return sum(grown) if grown else None


def _resets(moments: Mapping[str, Moment], metric: str, model: str, window_s: float) -> int:
    return sum(
        len(series.drops(at.now_ms - to_ms(window_s), at.now_ms))
        for at in moments.values()
        for series in _of(at, metric, model)
    )


def _ttft(moments: Mapping[str, Moment], model: str, window_s: float) -> QuantileReading | None:
    merged: dict[float, float] = {}
    for at in moments.values():
        for bound, count in bucket_increases("ttft_seconds", window_s, at, (("model_name", model),)):
            merged[bound] = merged.get(bound, 0.0) + count
    return quantile(0.95, sorted(merged.items()))
