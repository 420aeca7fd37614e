"""Reading at a coarser step: the finest resolution that fits, as one frame.

Hours and minutes that are rolled up come from the rollups; what is not yet (the last minute or two, more when nobody
leads) is computed from raw samples in the same way, so that a frame reaches up to now and its increases add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from probe.store.models import HourRow, MinuteRow, RollupProgressRow, SampleRow
from probe.store.raw import existing, pieces
from probe.store.rollups import VALUES, minutes_of_raw

if TYPE_CHECKING:
    import pandas as pd

MINUTE_S, HOUR_S = 60, 3600
Floats = NDArray[np.float64]
Series = Mapping[int, tuple[str, dict[str, str]]]


def read_stretches(session: Session, series: Series, since: float, until: float | None, step_s: float) -> pd.DataFrame:
    """Stretches of `step_s` (60 or more) that hold anything in `since..until` and begin on a multiple of `step_s`.

    Columns: `ts` (the beginning, Unix seconds), `value` (a gauge's mean, a counter's last), `low`, `high` (gauges),
    `last`, `count`, `increase`, `resets` (counters), `resolution_s`, and one per label; NaN where it makes no sense.
    `resolution_s` is the length of what a row was read from; where it is above `step_s`, nothing finer is kept.
    """
    import pandas as pd  # half a second that the command line mostly does not need

    progress = session.scalars(select(RollupProgressRow)).one()
    since -= since % step_s
    hours_end = progress.hours_until
    if step_s < HOUR_S:
        kept = session.scalar(select(func.min(MinuteRow.hour)).where(MinuteRow.hour >= since // HOUR_S))
        hours_end = min(hours_end, hours_end if kept is None else kept)
    rows = _hours(session, series, since, until, hours_end)
    minute = max(int(since // MINUTE_S), hours_end * 60)
    last_minute = None if until is None else int(until // MINUTE_S)
    rows += _minutes(session, series, minute, last_minute, progress.minutes_until)
    rows += _from_raw(session, series, max(minute, progress.minutes_until), last_minute, progress.hours_until)
    rows.sort(key=lambda row: row[:2])
    columns = _merged(np.array(rows, np.float64).reshape(-1, 3 + len(VALUES)), step_s)
    ids = columns.pop("series_id").astype(int).tolist()
    labels = sorted({name for _, found in series.values() for name in found})
    return pd.DataFrame({**columns, **{name: [series[i][1].get(name, "") for i in ids] for name in labels}})


def _hours(session: Session, series: Series, since: float, until: float | None, end: int) -> list[tuple[Any, ...]]:
    """(series id, beginning in Unix seconds, resolution in seconds, *VALUES) of the hours before `end`."""
    first, last = int(since // HOUR_S), end - 1 if until is None else min(end - 1, int(until // HOUR_S))
    columns = [getattr(HourRow, name) for name in VALUES]
    rows: list[tuple[Any, ...]] = []
    for some, _ in pieces(series, [first]):
        query = select(HourRow.series_id, HourRow.hour, *columns).where(
            HourRow.series_id.in_(some), HourRow.hour >= first, HourRow.hour <= last
        )
        rows.extend((i, hour * HOUR_S, HOUR_S, *values) for i, hour, *values in session.execute(query))
    return rows


def _minutes(session: Session, series: Series, first: int, last: int | None, end: int) -> list[tuple[Any, ...]]:
    last = end - 1 if last is None else min(end - 1, last)
    columns = [getattr(MinuteRow, name) for name in VALUES]
    rows: list[tuple[Any, ...]] = []
    for some, hours in pieces(series, existing(session, MinuteRow.hour, first // 60, last // 60)):
        query = select(MinuteRow.series_id, MinuteRow.minute, *columns).where(
            MinuteRow.hour.in_(hours), MinuteRow.series_id.in_(some), MinuteRow.minute.between(first, last)
        )
        rows.extend((i, minute * MINUTE_S, MINUTE_S, *values) for i, minute, *values in session.execute(query))
    return rows


def _from_raw(
    session: Session, series: Series, first: int, last: int | None, hours_until: int
) -> list[tuple[Any, ...]]:
    minutes = existing(session, SampleRow.minute, first, last)
    rows: list[tuple[Any, ...]] = []
    for some, _ in pieces(series, [first]) if minutes else ():
        query = minutes_of_raw(minutes, some, hours_until=hours_until)
        rows.extend((i, minute * MINUTE_S, MINUTE_S, *values) for i, minute, *values in session.execute(query))
    return rows


def _merged(table: Floats, step_s: float) -> dict[str, Floats]:
    """Rows (as of `_hours`, in order) put together into stretches of `step_s`, by column."""
    names = ("series_id", "ts", "resolution_s", *VALUES)
    c = {name: table[:, index] for index, name in enumerate(names)}
    length = np.maximum(c["resolution_s"], step_s)
    ts = c["ts"] - c["ts"] % length
    changes = (np.diff(c["series_id"]) != 0) | (np.diff(ts) != 0)
    starts = np.flatnonzero(np.concatenate([[True], changes])) if len(table) else np.zeros(0, int)
    ends = np.append(starts[1:], len(table)) - 1 if len(table) else starts
    total = {name: _reduced(np.add, c[name], starts) for name in ("count", "total", "increase", "resets")}
    last = c["last"][ends]
    is_gauge = np.isnan(total["increase"])
    with np.errstate(invalid="ignore"):
        mean = total["total"] / total["count"]
    return {
        "series_id": c["series_id"][starts],
        "ts": ts[starts],
        "value": np.where(is_gauge, mean, last),
        "low": _reduced(np.fmin, c["low"], starts),
        "high": _reduced(np.fmax, c["high"], starts),
        "last": last,
        "count": total["count"],
        "increase": total["increase"],
        "resets": total["resets"],
        "resolution_s": _reduced(np.maximum, c["resolution_s"], starts),
    }


def _reduced(function: np.ufunc, values: Floats, starts: NDArray[np.intp]) -> Floats:
    return np.asarray(function.reduceat(values, starts) if len(starts) else values[:0], np.float64)
