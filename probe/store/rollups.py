"""Rollups: what a minute and an hour of each series came to, made from complete minutes and kept when raw samples go.

Made by the leading monitor, in order and in short transactions; each minute is read once. A counter's increase starts
at the last sample before the stretch, however old, and a value below its predecessor counts in full (a reset), so that
increases of any run of stretches add up to the raw increase. A sample that comes after its minute was rolled up is
noted by the writer (`raw.insert_samples`); its minute, the one that follows in its series, and their hours are then
made anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, cast

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    Table,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
)
from sqlalchemy.orm import Session, aliased

from probe.store.database import Database
from probe.store.models import HourRow, LateRow, MinuteRow, RollupProgressRow, SampleRow, SeriesRow
from probe.store.raw import existing, pieces
from probe.store.writer import Writer

SETTLE_S = 30.0  # a minute is complete this long after its end
SAMPLES_A_CALL = 20_000  # rolled up in one transaction, or one minute
LATE_MINUTES_A_CALL = 20
ROWS_A_CALL = 100_000  # deleted in one transaction, so that nobody waits long for the write lock
MAX_HOURS = 10_000  # looked through for the value before a stretch, when no hour was ever rolled up
GAUGE, COUNTER = ("low", "high", "total"), ("increase", "resets")
VALUES = ("count", "last", *GAUGE, *COUNTER)

_MINUTES = cast("Table", MinuteRow.__table__)
_HOURS = cast("Table", HourRow.__table__)


class Rollups:
    """`store.rollups`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def advance(self, now: float) -> int:
        """Roll up what is complete at `now` (Unix seconds) and not yet rolled up; returns the minutes made.

        Short transactions one after the other: it can be stopped anywhere and goes on where it was.
        """
        until = int((now - SETTLE_S) // 60)
        made = 0
        while (more := self._writer.call(partial(_next_stretch, until=until))) is not None:
            made += more
        while redone := self._writer.call(_redo_late):
            made += redone
        return made

    def prune(self, minutes_before: float, hours_before: float) -> None:
        """Delete 1-minute and 1-hour rollups older than these Unix seconds; those of raw samples that are kept stay."""
        while self.prune_oldest(minutes_before):
            pass
        with self._database.read() as session:
            ids = session.scalars(select(SeriesRow.id)).all()
        for some, _ in pieces(ids, [0]):
            self._writer.call(partial(_prune_hours, before=int(hours_before // 3600), series=some))

    def prune_oldest(self, before: float) -> bool:
        """Delete (a part of) the oldest hour of 1-minute rollups; False if none may go that is older than `before`."""
        return self._writer.call(partial(_prune_minutes, before=int(before // 3600)))


def _next_stretch(session: Session, until: int) -> int | None:
    """Roll up the next minutes before `until`, or the next hour that is complete; returns the number of minutes.

    None when there is nothing to do. Minutes of one hour go together as far as they are small.
    """
    progress = _progress(session)
    until = max(until, progress.minutes_until)
    minute = session.scalar(
        select(func.min(SampleRow.minute)).where(SampleRow.minute >= progress.minutes_until, SampleRow.minute < until)
    )
    complete = (until if minute is None else minute) // 60
    hour = session.scalar(
        select(func.min(MinuteRow.hour)).where(MinuteRow.hour >= progress.hours_until, MinuteRow.hour < complete)
    )
    if hour is not None:
        _roll_hour(session, hour)
        progress.hours_until = hour + 1
        return 0
    progress.hours_until = max(progress.hours_until, complete)
    if minute is None:
        progress.minutes_until = until
        return None
    rows = session.scalar(select(func.count()).where(SampleRow.minute == minute)) or 1
    end = min(minute + max(1, SAMPLES_A_CALL // rows), (minute // 60 + 1) * 60, until)
    minutes = existing(session, SampleRow.minute, minute, end - 1)
    _roll_minutes(session, minutes)
    progress.minutes_until = end
    return len(minutes)


def _progress(session: Session) -> RollupProgressRow:
    """The one row, locked until the end of the transaction."""
    return session.scalars(select(RollupProgressRow).with_for_update()).one()


def _roll_minutes(session: Session, minutes: list[int], series: Collection[int] | None = None) -> None:
    """Minutes of one hour; with `series`, they are made anew for those."""
    hour = minutes[0] // 60
    if series is not None:
        session.execute(
            delete(MinuteRow).where(
                MinuteRow.hour == hour, MinuteRow.minute.in_(minutes), MinuteRow.series_id.in_(series)
            )
        )
    made = minutes_of_raw(minutes, series, hours_until=hour).add_columns(literal(hour))
    session.execute(insert(_MINUTES).from_select(["series_id", "minute", *VALUES, "hour"], made))


def _roll_hour(session: Session, hour: int, series: Collection[int] | None = None) -> None:
    if series is not None:
        session.execute(delete(HourRow).where(HourRow.hour == hour, HourRow.series_id.in_(series)))
    session.execute(insert(_HOURS).from_select(["series_id", "hour", *VALUES], _hour_of_minutes(hour, series)))


def _redo_late(session: Session) -> int:
    """Make anew what late samples changed, a few minutes of it; returns the number of minutes, 0 in the end."""
    progress = _progress(session)
    minutes = session.scalars(select(LateRow.minute).distinct().order_by(LateRow.minute).limit(LATE_MINUTES_A_CALL))
    found = minutes.all()
    for minute in found:
        series = session.scalars(select(LateRow.series_id).where(LateRow.minute == minute)).all()
        for some, _ in pieces(series, [minute]):
            if minute >= progress.raw_from:  # else its other samples are gone, and with them the means to count
                _redo(session, progress, minute, some)
        session.execute(delete(LateRow).where(LateRow.minute == minute))
    return len(found)


def _redo(session: Session, progress: RollupProgressRow, minute: int, series: list[int]) -> None:
    """This minute of these series, then the minute that follows in each counter: it grew from another value."""
    following: dict[int, list[int]] = {minute: series}
    for series_id, later in _following(session, progress, minute, series):
        following.setdefault(later, []).append(series_id)
    for changed, ids in sorted(following.items()):
        _roll_minutes(session, [changed], ids)
        if changed // 60 < progress.hours_until:
            _roll_hour(session, changed // 60, ids)


def _following(
    session: Session, progress: RollupProgressRow, minute: int, series: list[int]
) -> Iterator[tuple[int, int]]:
    """(series id, next minute that was rolled up) of the counters among `series` that have one."""
    counters = session.scalars(select(SeriesRow.id).where(SeriesRow.id.in_(series), SeriesRow.counter)).all()
    hour = minute // 60
    first = select(MinuteRow.series_id, func.min(MinuteRow.minute)).group_by(MinuteRow.series_id)
    same_hour = first.where(MinuteRow.hour == hour, MinuteRow.series_id.in_(counters), MinuteRow.minute > minute)
    found = {row[0]: row[1] for row in session.execute(same_hour)}
    yield from found.items()
    unfinished = range(max(hour + 1, progress.hours_until), progress.minutes_until // 60 + 1)
    for series_id in (i for i in counters if i not in found):
        of_series = select(func.min(HourRow.hour)).where(HourRow.series_id == series_id, HourRow.hour > hour)
        next_hour = session.scalar(of_series)
        hours = unfinished if next_hour is None else [next_hour]
        later = session.scalar(
            select(func.min(MinuteRow.minute)).where(MinuteRow.hour.in_(hours), MinuteRow.series_id == series_id)
        )
        if later is not None:
            yield series_id, later


def minutes_of_raw(minutes: Collection[int], series: Collection[int] | None, *, hours_until: int) -> Select[Any]:
    """Select series_id, minute and `VALUES` of these minutes from raw samples.

    `minutes` must be all that hold samples of a stretch of time, the stretch before them must be rolled up, and
    hours before `hours_until` too.
    """
    literally: BindParameter[Any] = bindparam("minutes", list(minutes), expanding=True, literal_execute=True)
    chosen = [SampleRow.minute.in_(literally)]
    if series is not None:
        chosen.append(SampleRow.series_id.in_(series))
    order: dict[str, Any] = {"partition_by": SampleRow.series_id, "order_by": (SampleRow.minute, SampleRow.ms)}
    raw = (
        select(
            SampleRow.series_id,
            SampleRow.minute,
            SampleRow.value,
            SeriesRow.counter,
            func.lag(SampleRow.value).over(**order).label("previous"),
            func.lead(SampleRow.minute).over(**order).label("next_minute"),
        )
        .join(SeriesRow, SeriesRow.id == SampleRow.series_id)
        .where(*chosen)
        .subquery()
    )
    before = func.coalesce(raw.c.previous, *_last_before(raw.c.series_id, min(minutes), hours_until))
    s = select(raw, case((raw.c.counter, before)).label("before")).subquery().c
    grown = case((s.before.is_(None), 0.0), (s.value < s.before, s.value), else_=s.value - s.before)
    is_last = or_(s.next_minute.is_(None), s.next_minute != s.minute)
    of_gauge = case((not_(s.counter), s.value))
    return select(
        s.series_id,
        s.minute,
        func.count().label("count"),
        func.max(case((is_last, s.value))).label("last"),
        func.min(of_gauge).label("low"),
        func.max(of_gauge).label("high"),
        func.sum(of_gauge).label("total"),
        func.sum(case((s.counter, grown))).label("increase"),
        func.sum(case((s.counter, case((s.value < s.before, 1), else_=0)))).label("resets"),
    ).group_by(s.series_id, s.minute)


def _last_before(series_id: ColumnElement[int], minute: int, hours_until: int) -> tuple[Any, Any]:
    """The newest value before `minute`: of a minute in an hour that is not rolled up yet, else of an earlier hour."""
    hour = minute // 60
    of_minutes = (
        select(MinuteRow.last)
        .where(
            MinuteRow.hour.in_(range(min(hour, max(hours_until, hour - MAX_HOURS)), hour + 1)),
            MinuteRow.series_id == series_id,
            MinuteRow.minute < minute,
        )
        .order_by(MinuteRow.hour.desc(), MinuteRow.minute.desc())
        .limit(1)
        .scalar_subquery()
    )
    of_hours = (
        select(HourRow.last)
        .where(HourRow.series_id == series_id, HourRow.hour < hour)
        .order_by(HourRow.hour.desc())
        .limit(1)
        .scalar_subquery()
    )
    return of_minutes, of_hours


def _hour_of_minutes(hour: int, series: Collection[int] | None) -> Select[Any]:
    m, later = MinuteRow, aliased(MinuteRow)
    last = (
        select(later.last)
        .where(later.hour == hour, later.series_id == m.series_id)
        .order_by(later.minute.desc())
        .limit(1)
        .scalar_subquery()
    )
    chosen = [m.hour == hour] if series is None else [m.hour == hour, m.series_id.in_(series)]
    sums = [func.sum(column) for column in (m.total, m.increase, m.resets)]
    return (
        select(m.series_id, literal(hour), func.sum(m.count), last, func.min(m.low), func.max(m.high), *sums)
        .where(*chosen)
        .group_by(m.series_id)
    )


def _prune_minutes(session: Session, before: int) -> bool:
    """Delete the oldest hour of 1-minute rollups, or a part of it; False when none is older than hour `before`."""
    progress = _progress(session)
    oldest = session.scalar(select(func.min(MinuteRow.hour)))
    if oldest is None or oldest >= min(before, progress.raw_from // 60, progress.hours_until):
        return False
    of_hour = select(MinuteRow.series_id).where(MinuteRow.hour == oldest).order_by(MinuteRow.series_id)
    end = session.scalar(of_hour.offset(ROWS_A_CALL).limit(1))
    chosen = [MinuteRow.hour == oldest] if end is None else [MinuteRow.hour == oldest, MinuteRow.series_id <= end]
    session.execute(delete(MinuteRow).where(*chosen))
    return True


def _prune_hours(session: Session, before: int, series: Collection[int]) -> None:
    progress = _progress(session)
    before = min(before, progress.raw_from // 60, progress.hours_until)
    session.execute(delete(HourRow).where(HourRow.series_id.in_(series), HourRow.hour < before))
