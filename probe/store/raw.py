"""Raw samples in their tables: how they are laid down and found again, on a connection of the caller.

Tables are clustered by stretches of time (see `models.SampleRow`), so a reader first finds the stretches that hold
anything, at a seek each, and then asks for its series in those. Invariant: a sample that comes after its minute was
rolled up leaves a row in `rollup_late` in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, Table, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from probe.store.database import upsert_tuples
from probe.store.models import LateRow, NewestRow, RollupProgressRow, SampleRow

COUNTER_ENDS = ("_total", "_bucket", "_count", "_sum")
MINUTE_MS = 60_000
STRETCHES_A_QUERY = 4_000  # a statement takes at most 32,766 variables
SERIES_A_QUERY = 4_000
ROWS_AT_ONCE = 500
Floats = NDArray[np.float64]

_SAMPLES = cast("Table", SampleRow.__table__)
_NEWEST = cast("Table", NewestRow.__table__)
_LATE = cast("Table", LateRow.__table__)


def is_counter(metric: str) -> bool:
    """Whether a canonical metric only grows until it is reset: a counter, or a part of a histogram."""
    return metric.endswith(COUNTER_ENDS)


def insert_samples(connection: Connection, values: Mapping[tuple[int, int], float]) -> None:
    """Write values by (series id, Unix milliseconds); one that is there already is replaced."""
    # Shared lock: a rollup of these minutes waits until they are committed. (SQLite has one writer anyway.)
    query = select(RollupProgressRow.raw_from, RollupProgressRow.minutes_until).with_for_update(read=True)
    raw_from, minutes_until = connection.execute(query).one()
    rows = sorted((ts_ms // MINUTE_MS, i, ts_ms % MINUTE_MS, value) for (i, ts_ms), value in values.items())
    upsert_tuples(connection, _SAMPLES, rows, key=("minute", "series_id", "ms"))
    late = sorted({(minute, i) for minute, i, _, _ in rows if raw_from <= minute < minutes_until})
    upsert_tuples(connection, _LATE, late, key=("minute", "series_id"))


def note_newest(connection: Connection, newest: Mapping[int, tuple[int, float]]) -> None:
    """Remember the newest (Unix milliseconds, value) of each series id."""
    rows = [(series_id, ts_ms, value) for series_id, (ts_ms, value) in sorted(newest.items())]
    upsert_tuples(connection, _NEWEST, rows, key=("series_id",), unless_older="ts_ms")


def existing(session: Session, column: InstrumentedAttribute[int], first: int, last: int | None) -> list[int]:
    """The values within `first..last` that the leading key column of a table has, ascending."""
    bounds = [column >= first] if last is None else [column >= first, column <= last]
    start = select(func.min(column).label("at")).where(*bounds).cte("stretches", recursive=True)
    later = select(func.min(column)).where(column > start.c.at, *bounds[1:]).scalar_subquery()
    stretches = start.union_all(select(later).where(start.c.at.is_not(None)))
    return [at for at in session.scalars(select(stretches.c.at)) if at is not None]


def read_samples(session: Session, series: Iterable[int], since_ms: int, until_ms: int | None) -> Floats:
    """Columns series id, Unix milliseconds, value with `since_ms <= time <= until_ms`; rows by series, then time."""
    last = None if until_ms is None else until_ms // MINUTE_MS
    minutes = existing(session, SampleRow.minute, since_ms // MINUTE_MS, last)
    blocks = [np.zeros((0, 4))]
    for some, stretches in pieces(series, minutes):
        query = select(SampleRow.series_id, SampleRow.minute, SampleRow.ms, SampleRow.value).where(
            SampleRow.minute.in_(stretches), SampleRow.series_id.in_(some)
        )
        blocks.append(fetch(session, query))
    ids, minute, ms, value = np.concatenate(blocks).T
    ts_ms = minute * MINUTE_MS + ms
    within = (ts_ms >= since_ms) & (ts_ms <= (np.inf if until_ms is None else until_ms))
    table = np.column_stack([ids, ts_ms, value])[within]
    order = np.lexsort((table[:, 1], table[:, 0]))
    return np.asarray(table[order], np.float64)


def fetch(session: Session, query: Select[*tuple[Any, ...]]) -> Floats:
    """The rows of a query for numbers, as floats (NULL: NaN)."""
    # In pieces: thousands of row tuples at once set off a full garbage collection, which takes longer than the query.
    found = session.connection().execute(query).partitions(ROWS_AT_ONCE)
    blocks = [np.array([tuple(row) for row in rows], np.float64) for rows in found]
    return np.concatenate([np.zeros((0, len(query.selected_columns))), *blocks])


def pieces(series: Iterable[int], stretches: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """(series, stretches) of a size that one statement takes."""
    ids = iter(sorted(series))
    while some := list(islice(ids, SERIES_A_QUERY)):
        for start in range(0, len(stretches), STRETCHES_A_QUERY):
            yield some, list(stretches[start : start + STRETCHES_A_QUERY])
