"""Lines for charts: what a windowed signal was at each moment of the past, thinned for the screen.

A gap stays a gap: where a target was not scraped there is NaN and the line breaks, and a counter that went
backwards was reset and counts from zero (the same reading as the alert evaluator's).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def grid(since: float, until: float, points: int) -> Floats:
    """`points` moments between `since` and `until` on whole multiples of their distance.

    So a redraw a moment later has the same grid, and the browser has nothing new to draw.
    """
    step = (until - since) / points
    moments: Floats = (np.floor(until / step) - np.arange(points - 1, -1, -1)) * step
    return moments


def held(ts: Floats, values: Floats, at: Floats, max_age: float) -> Floats:
    """A gauge at the moments `at`: its last sample, NaN when that is older than `max_age` seconds."""
    if len(ts) == 0:
        return np.full(len(at), np.nan)
    index = np.searchsorted(ts, at, side="right") - 1
    safe = np.clip(index, 0, None)
    return np.where((index >= 0) & (at - ts[safe] <= max_age), values[safe], np.nan)


def increases(ts: Floats, values: Floats, at: Floats, window: float, max_age: float) -> Floats:
    """By how much a counter grew in the `window` seconds before each moment; NaN without two samples there.

    As in `probe.alerts.arithmetic`, so that a line and its alert agree: a drop is a reset, and what the samples inside
    the window show is extrapolated to its edges.
    """
    if len(ts) < 2:
        return np.full(len(at), np.nan)
    step = np.diff(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(step < 0, values[1:], step))])
    last = np.searchsorted(ts, at, side="right") - 1
    first = np.searchsorted(ts, at - window, side="left")
    two = (last > first) & (last >= 0)
    last, first = np.clip(last, 0, len(ts) - 1), np.clip(first, 0, len(ts) - 1)
    known = two & (at - ts[last] <= max_age)
    with np.errstate(divide="ignore", invalid="ignore"):
        grown, sampled = total[last] - total[first], ts[last] - ts[first]
        mean_step = sampled / (last - first)
        to_start, to_end = ts[first] - (at - window), at - ts[last]
        to_zero = np.where((grown > 0) & (values[first] >= 0), sampled * (values[first] / grown), np.inf)
        to_start = np.minimum(to_start, to_zero)
        limit = mean_step * 1.1
        covered = sampled + np.where(to_start < limit, to_start, mean_step / 2)
        covered = covered + np.where(to_end < limit, to_end, mean_step / 2)
        return np.where(known, grown * (covered / sampled), np.nan)


def rates(ts: Floats, values: Floats, at: Floats, window: float, max_age: float) -> Floats:
    """Growth per second over the window; NaN without two samples there."""
    return increases(ts, values, at, window, max_age) / window


def total(parts: Sequence[Floats], points: int) -> Floats:
    """Sum over series; a series without a value is left out, all without one give NaN."""
    if not parts:
        return np.full(points, np.nan)
    stack = np.vstack(parts)
    return np.where(np.isnan(stack).all(axis=0), np.nan, np.nansum(stack, axis=0))


def hottest(parts: Sequence[Floats], points: int) -> Floats:
    """Maximum over series, for usage ratios: a mean would hide the one that is full."""
    if not parts:
        return np.full(points, np.nan)
    stack = np.vstack(parts)
    filled = np.where(np.isnan(stack), -np.inf, stack).max(axis=0)
    return np.where(np.isneginf(filled), np.nan, filled)


def quotient(numerator: Floats, denominator: Floats) -> Floats:
    """Ratio of sums; NaN where nothing is in the denominator."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def sparkline(values: Floats) -> list[float]:
    """For `st.metric(chart_data=)`, which draws no gaps: what is known, in order."""
    return [float(value) for value in values if np.isfinite(value)]


def quantile(q: float, bounds: Floats, increases_by_bucket: Floats) -> Floats:
    """The q-quantile at each moment from cumulative bucket increases [buckets, moments], `bounds` ascending.

    Linear inside a bucket; a quantile in the open last bucket gives its lower bound, as Prometheus does.
    NaN where nothing was observed.
    """
    out = np.full(increases_by_bucket.shape[1], np.nan)
    for i, column in enumerate(np.nan_to_num(increases_by_bucket).T):
        counts = np.maximum.accumulate(column)
        if counts[-1] <= 0:
            continue
        rank = q * counts[-1]
        bucket = int(np.searchsorted(counts, rank, side="left"))
        if not np.isfinite(bounds[bucket]):
            out[i] = bounds[bucket - 1] if bucket else np.nan
            continue
        low = bounds[bucket - 1] if bucket else 0.0
        below = counts[bucket - 1] if bucket else 0.0
        inside = counts[bucket] - below
        out[i] = low + (bounds[bucket] - low) * ((rank - below) / inside if inside > 0 else 1.0)
    return out
