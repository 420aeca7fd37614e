"""Figures of the window: growth of counters as it was seen, gauges over time, means and quantiles of histograms.

By engine (the replica's label) or over the whole target. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

from probe.alerts.arithmetic import QuantileReading, growth, quantile
from probe.alerts.window import Series, Window
from probe.dialects import load_dialect
from probe.doctor.observed import Observed


class Figures:
    """What one window shows."""

    def __init__(self, observed: Observed, window: Window | None = None) -> None:
        self.observed = observed
        self.window_s = observed.window_s
        if window is None:
            window = Window({sample.metric: math.inf for sample in observed.samples})
            window.add(observed.samples)
        self.window = window
        self._since, self._until = observed.since, observed.until

    def ending(self, seconds: float) -> Figures:
        """The same of the end of the window."""
        if seconds >= self.window_s:
            return self
        shorter = dataclasses.replace(self.observed, since=self.observed.until - seconds)
        return Figures(shorter, self.window)

    def grown(self, metric: str, **labels: str) -> float | None:
        """Growth of a counter in the window over all series that carry the labels."""
        rises = [rise for series, rise in self._rises(metric) if labels.items() <= series.labels.items()]
        return sum(rises) if rises else None

    def grown_by_engine(self, metric: str) -> dict[str, float]:
        """Growth of a counter by replica."""
        found: dict[str, float] = {}
        for series, rise in self._rises(metric):
            engine = series.labels.get("engine", "")
            found[engine] = found.get(engine, 0.0) + rise
        return found

    def resets(self, metric: str) -> int:
        """How often a counter fell in the window."""
        grown = (growth(series, self._since, self._until) for series in self.window.series(metric))
        return sum(found.resets for found in grown if found is not None)

    def over_time(self, metric: str) -> list[float]:
        """A gauge's sum over replicas at each scrape of the window."""
        sums: dict[float, float] = {}
        for series in self.window.series(metric):
            for ts, value in self._within(series):
                sums[ts] = sums.get(ts, 0.0) + value
        return [sums[ts] for ts in sorted(sums)]

    def by_engine(self, metric: str) -> dict[str, list[float]]:
        """A gauge's values in the window by replica."""
        found: dict[str, list[float]] = {}
        for series in self.window.series(metric):
            values = [value for _, value in self._within(series)]
            if values:
                found[series.labels.get("engine", "")] = values
        return found

    def least(self, metric: str) -> float | None:
        """Least sum over replicas."""
        return min(self.over_time(metric), default=None)

    def most(self, metric: str) -> float | None:
        """Greatest sum over replicas."""
        return max(self.over_time(metric), default=None)

    def last(self, metric: str) -> float | None:
        """Newest sum over replicas."""
        values = self.over_time(metric)
        return values[-1] if values else None

    @cached_property
    def usage(self) -> tuple[float, float, float] | None:
        """Least, mean and greatest KV usage of the hottest replica, 0 to 1."""
        found = self.by_engine("kv_usage_ratio")
        if not found:
            return None
        values = max(found.values(), key=lambda one: sum(one) / len(one))
        return min(values), sum(values) / len(values), max(values)

    @cached_property
    def usage_by_engine(self) -> dict[str, float]:
        """Mean KV usage of each replica."""
        return {engine: sum(values) / len(values) for engine, values in self.by_engine("kv_usage_ratio").items()}

    @cached_property
    def replicas(self) -> int:
        """Engines behind the page."""
        return max(1, len(self.by_engine("requests_running")))

    def mean(self, histogram: str) -> float | None:
        """Mean of what a histogram observed in the window."""
        total, count = self.grown(f"{histogram}_sum"), self.grown(f"{histogram}_count")
        return total / count if total is not None and count else None

    def buckets(self, histogram: str) -> list[tuple[float, float]]:
        """(upper bound, growth) of a histogram, replicas added up."""
        merged: dict[float, float] = {}
        for series, rise in self._rises(f"{histogram}_bucket"):
            try:
                bound = float(series.labels.get("le", ""))
            except ValueError:
                continue
            merged[bound] = merged.get(bound, 0.0) + rise
        return sorted(merged.items())

    def quantile(self, q: float, histogram: str) -> QuantileReading | None:
        """A quantile of what a histogram observed in the window."""
        return quantile(q, self.buckets(histogram))

    def slow(self, histogram: str) -> tuple[float, float, float] | None:
        """(observations above the engine's objective, all observations, the objective in seconds)."""
        bound = load_dialect(self.observed.target.engine, self.observed.version).slo.get(histogram)
        served = self.grown(f"{histogram}_count")
        within = next((count for at, count in self.buckets(histogram) if at == bound), None)
        if bound is None or not served or within is None:
            return None
        return max(0.0, served - within), served, bound

    @property
    def in_service(self) -> float | None:
        """Requests that ended in the window, and those that run at its end."""
        finished, running = self.grown("requests_finished_total"), self.last("requests_running")
        return None if finished is None and running is None else (finished or 0.0) + (running or 0.0)

    @property
    def tokens(self) -> float | None:
        """Tokens generated in the window."""
        return self.grown("generation_tokens_total")

    @property
    def request_tokens(self) -> float | None:
        """Prompt and answer of a request that ended, on average."""
        prompt, answer = self.mean("request_prompt_tokens"), self.mean("request_generation_tokens")
        return None if prompt is None or answer is None else prompt + answer

    @cached_property
    def traffic(self) -> dict[str, Any]:
        """The facts of `runbooks.facts.TrafficFacts`; what was not measured is left out."""
        running, waiting, preempted = (
            self.most("requests_running"),
            self.most("requests_waiting"),
            self.grown("preemptions_total"),
        )
        p99 = self.quantile(0.99, "itl_seconds")
        prompts = self.grown("prompt_tokens_total")
        found = {
            "peak_running": None if running is None else int(running),
            "peak_waiting": None if waiting is None else int(waiting),
            "prompt_tokens_mean": self.mean("request_prompt_tokens"),
            "output_tokens_mean": self.mean("request_generation_tokens"),
            "queue_s_mean": self.mean("queue_seconds"),
            "prefill_s_mean": self.mean("prefill_seconds"),
            "itl_s_p99": None if p99 is None else p99.value,
            "itl_bound_s": load_dialect(self.observed.target.engine).slo.get("itl_seconds") if p99 else None,
            "prompt_tokens_per_s": prompts / self.window_s if prompts and self.window_s else None,
            "kv_usage_peak": None if self.usage is None else self.usage[2],
            "preemptions": None if preempted is None else int(preempted),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _rises(self, metric: str) -> list[tuple[Series, float]]:
        found = []
        for series in self.window.series(metric):
            rise = growth(series, self._since, self._until)
            if rise is not None:
                found.append((series, rise.value))
        return found

    def _within(self, series: Series) -> list[tuple[float, float]]:
        return [(ts, value) for ts, value in series.points if self._since <= ts <= self._until]
