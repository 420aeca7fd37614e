"""Rounds of a quality canary: the same questions asked again and again, counted against a baseline.

A round is the samples of one moment, read when it is over: it does not go stale with the scrape interval. Its
interval is that of a paired difference, as both runs answer the same questions: only answers that changed count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from probe.alerts.rule import QualitySignal
from probe.alerts.window import Window

ROUND_EVENT = "quality_round"
"""The kind of event that says a round is in the store."""
Z_95 = 1.96


@dataclass(frozen=True)
class Round:
    """Counts of questions: asked, right before and wrong now, wrong before and right now, without a usable answer."""

    ts: float
    dtype: str
    items: int
    lost: int
    gained: int
    invalid: int

    @property
    def drop(self) -> float:
        """Share of the questions by which accuracy fell; negative where it rose."""
        return (self.lost - self.gained) / self.items

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `drop`: normal, with the variance of a paired difference of shares.

        A round carries no more than these counts; the finer interval of a run's result needs all its answers.
        """
        changed = self.lost + self.gained
        half = Z_95 * math.sqrt(changed - (self.lost - self.gained) ** 2 / self.items) / self.items
        return self.drop - half, self.drop + half

    @property
    def invalid_rate(self) -> float:
        """Share of the questions whose answer was no answer at all."""
        return self.invalid / self.items


def rounds(window: Window, signal: QualitySignal, since: float) -> list[Round]:
    """The complete rounds from `since` on, oldest first."""
    names = (signal.items, signal.lost, signal.gained, signal.invalid)
    found: dict[tuple[float, str], dict[str, float]] = {}
    for name in names:
        for series in window.series(name):
            for ts, value in series.points:
                if ts >= since:
                    found.setdefault((ts, series.labels.get("dtype", "")), {})[name] = value
    return [
        Round(ts, dtype, *(round(counts[name]) for name in names))
        for (ts, dtype), counts in sorted(found.items())
        if counts.keys() == set(names) and counts[signal.items] > 0
    ]


def is_worse(seen: Round, threshold: float, invalid_threshold: float) -> bool:
    """Whether accuracy fell beyond the threshold and beyond doubt, or too many answers are none."""
    fell = seen.drop > threshold and seen.interval[0] > 0
    return fell or seen.invalid_rate > invalid_threshold
