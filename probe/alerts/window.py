"""The newest samples in memory, per target and series, as far back as the rules look at each metric.

Rules are evaluated on this, never on the database. Points of a series are in time order; a second value at
the same time replaces the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from probe.store import Sample

Point = tuple[float, float]  # (Unix seconds, value)
Labels = tuple[tuple[str, str], ...]


@dataclass
class Series:
    """One series' points, oldest first."""

    labels: dict[str, str]
    points: deque[Point] = field(default_factory=deque)


class Window:
    """The samples of one target that its rules need: per metric, no older than its horizon before the newest.

    `horizons_s`: canonical metric -> seconds; samples of other metrics are left out.
    """

    def __init__(self, horizons_s: Mapping[str, float]) -> None:
        self.horizons_s = dict(horizons_s)
        self._series: dict[str, dict[Labels, Series]] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """Take in samples; those of other metrics, or older than their series' newest, are left out."""
        newest = 0.0
        for sample in samples:
            if sample.metric not in self.horizons_s:
                continue
            key = tuple(sorted(sample.labels.items()))
            by_labels = self._series.setdefault(sample.metric, {})
            series = by_labels.setdefault(key, Series(dict(sample.labels)))
            if series.points and series.points[-1][0] >= sample.ts:
                if series.points[-1][0] > sample.ts:
                    continue
                series.points.pop()
            series.points.append((sample.ts, sample.value))
            newest = max(newest, sample.ts)
        self._drop_old(newest)

    def series(self, metric: str) -> list[Series]:
        """The series of a metric (none if it was never seen)."""
        return list(self._series.get(metric, {}).values())

    def _drop_old(self, newest: float) -> None:
        for metric, by_labels in self._series.items():
            ts = newest - self.horizons_s[metric]
            for key, series in list(by_labels.items()):
                while series.points and series.points[0][0] < ts:
                    series.points.popleft()
                if not series.points:
                    del by_labels[key]
