"""The newest samples in memory, per target and series, as far back as the rules look at each of them.

Rules are evaluated on this, never on the database. Points of a series are in time order; a second value at the same
time replaces the first. Times are integer milliseconds inside, Unix seconds outside.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping

from probe.store import Sample

Point = tuple[float, float]  # (Unix seconds, value)
Labels = tuple[tuple[str, str], ...]

_COMPACT_AT = 256
_DROP_EVERY_MS = 5_000
FAR_S = 1e12  # later than any sample


def to_ms(ts: float) -> int:
    """Unix seconds as integer milliseconds, as the store and Prometheus keep them."""
    return round(min(ts, FAR_S) * 1000)


class Series:
    """One series' points, oldest first, and where its value fell (a counter's resets)."""

    __slots__ = ("_drops", "_start", "key", "labels", "times", "values")

    def __init__(self, labels: Mapping[str, str], points: Iterable[Point] = ()) -> None:
        self.labels = dict(labels)
        self.key: Labels = tuple(sorted(self.labels.items()))
        self.times = array("q")
        self.values = array("d")
        self._start = 0
        self._drops: list[tuple[int, float]] = []  # (time of the lower value, the value before it)
        for ts, value in points:
            self.append(to_ms(ts), value)

    def append(self, ts_ms: int, value: float) -> None:
        """Add the newest point; one that is older than the newest is left out."""
        if len(self.times) > self._start:
            newest = self.times[-1]
            if ts_ms < newest:
                return
            if ts_ms == newest:
                self.times.pop()
                self.values.pop()
                if self._drops and self._drops[-1][0] == newest:
                    self._drops.pop()
        if len(self.times) > self._start and value < self.values[-1]:
            self._drops.append((ts_ms, self.values[-1]))
        self.times.append(ts_ms)
        self.values.append(value)

    def __bool__(self) -> bool:
        return len(self.times) > self._start

    def span(self, start_ms: int, end_ms: int) -> tuple[int, int]:
        """Indices [i, j) of the points with start <= time <= end."""
        i = bisect_left(self.times, start_ms, self._start)
        return i, bisect_right(self.times, end_ms, i)

    def at(self, ts_ms: int) -> tuple[int, float] | None:
        """The newest point at or before a time, as (milliseconds, value)."""
        i = bisect_right(self.times, ts_ms, self._start) - 1
        return (self.times[i], self.values[i]) if i >= self._start else None

    def drops(self, after_ms: int, until_ms: int) -> list[float]:
        """The values before each fall with after < time <= until, oldest first."""
        return [before for ts, before in self._drops if after_ms < ts <= until_ms] if self._drops else []

    @property
    def points(self) -> list[Point]:
        """All points, for whoever reads them one by one."""
        return [(self.times[i] / 1000, self.values[i]) for i in range(self._start, len(self.times))]

    @property
    def oldest(self) -> Point:
        """The oldest point; the series must have one."""
        return self.times[self._start] / 1000, self.values[self._start]

    @property
    def newest(self) -> Point:
        """The newest point; the series must have one."""
        return self.times[-1] / 1000, self.values[-1]

    def first_since(self, ts: float, least: float = 1.0) -> float | None:
        """When the value was first `least` or more, from a time in seconds on."""
        for i in range(bisect_left(self.times, to_ms(ts), self._start), len(self.times)):
            if self.values[i] >= least:
                return self.times[i] / 1000
        return None

    @property
    def newest_ms(self) -> int:
        """Time of the newest point; the series must have one."""
        return self.times[-1]

    def drop_before(self, ts_ms: int) -> None:
        """Forget points older than a time."""
        self._start = bisect_left(self.times, ts_ms, self._start)
        if self._start > _COMPACT_AT and self._start * 8 > len(self.times):
            del self.times[: self._start]
            del self.values[: self._start]
            self._start = 0
        if self._drops and self._drops[0][0] < ts_ms:
            self._drops = [drop for drop in self._drops if drop[0] >= ts_ms]


class Window:
    """The samples of one target that its rules need, no older than needed before the newest.

    `horizons_s`: canonical metric -> seconds; samples of other metrics are left out. `keeps` tells of a metric's
    labels whether a rule reads that series at all (a burn rate needs one bucket of a histogram, not all).
    """

    def __init__(
        self, horizons_s: Mapping[str, float], keeps: Callable[[str, Mapping[str, str]], bool] | None = None
    ) -> None:
        self.horizons_s = dict(horizons_s)
        self._keeps = keeps
        self._series: dict[str, dict[Labels, Series]] = {}
        self._left_out: set[tuple[str, Labels]] = set()
        self._dropped_ms = 0

    def add(self, samples: Iterable[Sample]) -> None:
        """Take in samples; those of other metrics, or older than their series' newest, are left out."""
        newest = 0
        for sample in samples:
            if sample.metric not in self.horizons_s:
                continue
            key = tuple(sorted(sample.labels.items()))
            by_labels = self._series.setdefault(sample.metric, {})
            series = by_labels.get(key)
            if series is None:
                if (sample.metric, key) in self._left_out or not self._is_kept(sample, key):
                    continue
                series = by_labels[key] = Series(sample.labels)
            ts_ms = to_ms(sample.ts)
            series.append(ts_ms, sample.value)
            newest = max(newest, ts_ms)
        if newest - self._dropped_ms >= _DROP_EVERY_MS:
            self._drop_old(newest)
            self._dropped_ms = newest

    def series(self, metric: str) -> list[Series]:
        """The series of a metric (none if it was never seen)."""
        return list(self._series.get(metric, {}).values())

    def attempted_ms(self, now_ms: int) -> int | None:
        """When the target was last tried, at or before a time: what that scrape did not bring is stale."""
        tried = [point[0] for s in self.series("up") if (point := s.at(now_ms)) is not None]
        return max(tried, default=None)

    def _is_kept(self, sample: Sample, key: Labels) -> bool:
        if self._keeps is None or self._keeps(sample.metric, sample.labels):
            return True
        self._left_out.add((sample.metric, key))
        return False

    def _drop_old(self, newest_ms: int) -> None:
        for metric, by_labels in self._series.items():
            oldest = newest_ms - to_ms(self.horizons_s[metric])
            for key, series in list(by_labels.items()):
                series.drop_before(oldest)
                if not series:
                    del by_labels[key]
