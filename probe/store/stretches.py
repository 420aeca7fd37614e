"""Reading at a coarser step: the finest resolution that fits, as one frame a metric.

Hours and minutes that are rolled up come from the rollups; what is not yet (the last minute or two, more when nobody
leads) is computed from raw samples in the same way, so that a frame reaches up to now and its increases add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from probe.store.models import HourRow, MinuteRow, RollupColumns, RollupProgressRow, SampleRow
from probe.store.raw import Floats, existing, fetch, is_counter, pieces
from probe.store.rollups import COUNTER, GAUGE, VALUES, minutes_of_raw

if TYPE_CHECKING:
    import pandas as pd

MINUTE_S, HOUR_S = 60, 3600
NAMES = ("series_id", "ts", "resolution_s", *VALUES)
Series = Mapping[int, tuple[str, dict[str, str]]]
Ids = Collection[int]


def read_stretches(
    session: Session, series: Series, since: float, until: float | None, step_s: float
) -> dict[str, pd.DataFrame]:
    """By metric: stretches of `step_s` (60 or more) that hold anything in `since..until`, on multiples of `step_s`.

    Columns: `ts` (the beginning, Unix seconds), `value` (a gauge's mean, a counter's last), `low`, `high` (gauges),
    `last`, `count`, `increase`, `resets` (counters), `resolution_s`, and one per label; NaN where it makes no sense.
    `resolution_s` is the length of what a row was read from; where it is above `step_s`, nothing finer is kept. A
    sample that came late is in it from the next `Rollups.advance` on.
    """
    progress = session.scalars(select(RollupProgressRow)).one()
    since -= since % step_s
    hours_end = progress.hours_until
    if step_s < HOUR_S:
        kept = session.scalar(select(func.min(MinuteRow.hour)).where(MinuteRow.hour >= since // HOUR_S))
        hours_end = min(hours_end, hours_end if kept is None else kept)
    minute = max(int(since // MINUTE_S), hours_end * 60)
    tables = [np.zeros((len(NAMES), 0))]
    for of_kind in (COUNTER, GAUGE):
        ids = [i for i, (metric, _) in series.items() if is_counter(metric) == (of_kind == COUNTER)]
        tables += _hours(session, ids, of_kind, int(since // HOUR_S), hours_end - 1, until)
        tables += _minutes(session, ids, of_kind, minute, progress.minutes_until - 1, until)
    tables += _from_raw(session, series, max(minute, progress.minutes_until), until, progress.hours_until)
    merged = _merged(np.concatenate(tables, axis=1), step_s)
    return {metric: _frame(merged, series, metric) for metric in sorted({metric for metric, _ in series.values()})}


def labelled(ids: Floats, columns: dict[str, Floats], found: Mapping[int, Mapping[str, str]]) -> pd.DataFrame:
    """A frame of the columns and one per label; `ids` are the series of its rows, `found` their labels."""
    import pandas as pd  # half a second that the command line mostly does not need

    known = sorted(found)
    place = np.searchsorted(known, ids)
    labels = {
        name: np.array([found[i].get(name, "") for i in known], object)[place]
        for name in sorted({name for of_series in found.values() for name in of_series})
    }
    return pd.DataFrame({**columns, **(labels if len(ids) else {})})


def _frame(merged: dict[str, Floats], series: Series, metric: str) -> pd.DataFrame:
    found = {i: labels for i, (name, labels) in series.items() if name == metric}
    chosen = np.isin(merged["series_id"], list(found))
    columns = {name: values[chosen] for name, values in merged.items() if name != "series_id"}
    frame = labelled(merged["series_id"][chosen], columns, found)
    frame.attrs["resolution_s"] = float(frame["resolution_s"].max()) if len(frame) else float("nan")
    return frame


def _columns(row: type[RollupColumns], of_kind: tuple[str, ...]) -> list[Any]:
    return [getattr(row, name) for name in ("count", "last", *of_kind)]


def _hours(
    session: Session, ids: Ids, of_kind: tuple[str, ...], first: int, last: int, until: float | None
) -> Iterator[Floats]:
    last = last if until is None else min(last, int(until // HOUR_S))
    for some, _ in pieces(ids, [first]):
        query = select(HourRow.series_id, HourRow.hour, *_columns(HourRow, of_kind)).where(
            HourRow.series_id.in_(some), HourRow.hour.between(first, last)
        )
        yield _table(session, query, HOUR_S)


def _minutes(
    session: Session, ids: Ids, of_kind: tuple[str, ...], first: int, last: int, until: float | None
) -> Iterator[Floats]:
    last = last if until is None else min(last, int(until // MINUTE_S))
    for some, hours in pieces(ids, existing(session, MinuteRow.hour, first // 60, last // 60)):
        query = select(MinuteRow.series_id, MinuteRow.minute, *_columns(MinuteRow, of_kind)).where(
            MinuteRow.hour.in_(hours), MinuteRow.series_id.in_(some), MinuteRow.minute.between(first, last)
        )
        yield _table(session, query, MINUTE_S)


def _from_raw(session: Session, ids: Ids, first: int, until: float | None, hours_until: int) -> Iterator[Floats]:
    minutes = existing(session, SampleRow.minute, first, None if until is None else int(until // MINUTE_S))
    if not minutes:
        return
    # Minutes not yet rolled up to hours begin here; without any, there is nothing to look through.
    unfinished = session.scalar(select(func.min(MinuteRow.hour)).where(MinuteRow.hour >= hours_until))
    hours_until = minutes[0] // 60 if unfinished is None else unfinished
    for some, _ in pieces(ids, [first]):
        yield _table(session, minutes_of_raw(minutes, some, hours_until=hours_until), MINUTE_S)


def _table(session: Session, query: Select[Any], length_s: int) -> Floats:
    """`NAMES` by row, of a query for series id, number of the stretch and some `VALUES`; all else is NaN."""
    rows = fetch(session, query)
    table = np.full((len(NAMES), len(rows)), np.nan)
    for name, column in zip(query.selected_columns.keys(), rows.T, strict=True):
        table[NAMES.index(name) if name in NAMES else 1] = column
    table[1] *= length_s
    table[2] = length_s
    return table


def _merged(table: Floats, step_s: float) -> dict[str, Floats]:
    """The columns of a table (`NAMES` by row) put together into stretches of `step_s`, in order of series and time."""
    c = dict(zip(NAMES, table[:, np.lexsort((table[1], table[0]))], strict=True))
    length = np.maximum(c["resolution_s"], step_s)
    ts = c["ts"] - c["ts"] % length
    begins = np.ones(len(ts), bool)
    begins[1:] = (np.diff(c["series_id"]) != 0) | (np.diff(ts) != 0)
    starts = np.flatnonzero(begins)
    last = c["last"][np.append(starts[1:], len(ts))[: len(starts)] - 1]
    sums = {name: _reduced(np.add, c[name], starts) for name in ("count", "total", "increase", "resets")}
    return {
        "series_id": c["series_id"][starts],
        "ts": ts[starts],
        "value": np.where(np.isnan(sums["increase"]), sums["total"] / sums["count"], last),
        "low": _reduced(np.fmin, c["low"], starts),
        "high": _reduced(np.fmax, c["high"], starts),
        "last": last,
        "count": sums["count"],
        "increase": sums["increase"],
        "resets": sums["resets"],
        "resolution_s": _reduced(np.maximum, c["resolution_s"], starts),
    }


def _reduced(function: np.ufunc, values: Floats, starts: NDArray[np.intp]) -> Floats:
    return np.asarray(function.reduceat(values, starts) if len(starts) else values[:0], np.float64)
