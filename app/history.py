"""Samples of the last hours in memory, so that a redraw reads only what is new and tabs share one reading.

One `History` belongs to the process's runtime. A series is two arrays, time and value; memory is bounded by the
longest range a page offers and by the number of metrics kept.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from probe.store import Store

Floats = NDArray[np.float64]
KEEP_S = 7 * 3600.0
OVERLAP_S = 20.0  # read again: samples are committed in batches and may come late
SHARED_FOR_S = 0.9
MAX_METRICS = 400


class Line(NamedTuple):
    """One series in time order; `ts` in Unix seconds."""

    labels: dict[str, str]
    ts: Floats
    values: Floats


@dataclass
class _Kept:
    """What is known of one metric of one target, from `since` on."""

    since: float
    lines: list[Line]
    read_at: float
    used_at: float = field(default_factory=time.monotonic)

    @property
    def until(self) -> float:
        return max((float(line.ts[-1]) for line in self.lines if len(line.ts)), default=self.since)


class History:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._lock = threading.Lock()

    def lines(self, target: str, metric: str, since: float) -> list[Line]:
        """Every series of `metric` with its samples from `since` on; raises `StoreError`."""
        with self._lock:
            kept = self._fresh(target, metric, since)
            kept.used_at = time.monotonic()
            return [_from(line, since) for line in kept.lines]

    def _fresh(self, target: str, metric: str, since: float) -> _Kept:
        kept = self._kept.get((target, metric))
        if kept is None or since < kept.since:
            self._forget()
            kept = _Kept(since, split(self._store.samples.range(target, metric, since)), time.monotonic())
            self._kept[target, metric] = kept
        elif time.monotonic() - kept.read_at > SHARED_FOR_S:
            start = max(kept.since, kept.until - OVERLAP_S)
            kept.lines = _joined(kept.lines, split(self._store.samples.range(target, metric, start)), start)
            kept.read_at = time.monotonic()
            oldest = time.time() - KEEP_S
            if kept.since < oldest - 600:
                kept.since, kept.lines = oldest, [_from(line, oldest) for line in kept.lines]
        return kept

    def _forget(self) -> None:
        if len(self._kept) >= MAX_METRICS:
            del self._kept[min(self._kept, key=lambda key: self._kept[key].used_at)]


def split(frame: pd.DataFrame) -> list[Line]:
    """A range query (ts, value and a column a label, ordered by series, then time) as one `Line` per series."""
    if frame.empty:
        return []
    ts, values = frame["ts"].to_numpy(np.float64), frame["value"].to_numpy(np.float64)
    names = [column for column in frame.columns if column not in ("ts", "value")]
    columns = [frame[name].to_numpy(str) for name in names]
    change = np.zeros(len(ts), bool)
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    starts = np.concatenate([[0], np.flatnonzero(change)])
    ends = np.append(starts[1:], len(ts))
    return [
        Line({name: str(column[a]) for name, column in zip(names, columns, strict=True)}, ts[a:b], values[a:b])
        for a, b in zip(starts, ends, strict=True)
    ]


def _joined(old: list[Line], new: list[Line], start: float) -> list[Line]:
    """`old` before `start`, then `new`."""
    rest = {_key(line): line for line in new}
    joined = []
    for line in old:
        later = rest.pop(_key(line), None)
        end = int(np.searchsorted(line.ts, start, side="left"))
        if later is None:
            joined.append(Line(line.labels, line.ts[:end], line.values[:end]))
        else:
            ts = np.concatenate([line.ts[:end], later.ts])
            joined.append(Line(line.labels, ts, np.concatenate([line.values[:end], later.values])))
    return joined + list(rest.values())


def _key(line: Line) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in line.labels.items() if value))


def _from(line: Line, since: float) -> Line:
    start = int(np.searchsorted(line.ts, since, side="left"))
    return Line(line.labels, line.ts[start:], line.values[start:])
