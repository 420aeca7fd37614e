"""Wilson's score interval for a share of right answers. Pure Python: reports and probes use it without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959964


@dataclass(frozen=True)
class Accuracy:
    """`right` of `count` items, with the 95 % Wilson interval [low, high]."""

    right: int
    count: int
    accuracy: float
    low: float
    high: float


def wilson(right: int, count: int, z: float = Z_95) -> Accuracy:
    """Wilson's score interval for a proportion; count must be positive."""
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Accuracy(right, count, share, max(0.0, centre - half), min(1.0, centre + half))
