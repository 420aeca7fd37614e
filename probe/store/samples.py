"""Samples: values of series over time. Written in batches, read by target and metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import CursorResult, delete, exists, func, not_, select, tuple_
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import HourRow, NewestRow, RollupProgressRow, SampleRow, SeriesRow, TargetRow
from probe.store.raw import MINUTE_MS, read_samples
from probe.store.records import Sample, StoreError
from probe.store.rollups import ROWS_A_CALL
from probe.store.settings import Settings
from probe.store.stretches import HOUR_S, MINUTE_S, labelled, read_stretches
from probe.store.writer import PendingSample, SeriesKey, Writer

if TYPE_CHECKING:
    import pandas as pd

MAX_KEYS = 500_000

_LABELS = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Samples:
    """`store.samples`."""

    def __init__(self, database: Database, writer: Writer, settings: Settings) -> None:
        self._database = database
        self._writer = writer
        self._settings = settings
        self._target_ids: dict[str, int] = {}
        self._keys: dict[tuple[Any, ...], SeriesKey] = {}  # by target, metric and labels as they come

    def write(self, samples: Iterable[Sample]) -> None:
        """Queue samples for the next batch and return; `flush` waits for it.

        A second value of a series at the same millisecond replaces the first. NaN (Prometheus: no observation)
        is not stored. Raises `StoreError` for a target that is not registered.
        """
        self._write(samples, kept=True)

    def write_scrape(self, samples: Iterable[Sample]) -> None:
        """As `write`, for what comes anew with every scrape: with the setting `series_in_store` "alerts-only", only
        the newest value of each series is stored, and its past is left to the Prometheus server.
        """
        self._write(samples, kept=self._settings.shared("series_in_store") == "all")

    def _write(self, samples: Iterable[Sample], *, kept: bool) -> None:
        pending = []
        for sample in samples:
            if sample.value == sample.value:  # not NaN
                key = (sample.target, sample.metric, *sample.labels.items())
                series = self._keys.get(key) or self._series_key(sample, key)
                pending.append(PendingSample(series, to_ms(sample.ts), float(sample.value), kept))
        self._writer.add(pending)

    def _series_key(self, sample: Sample, key: tuple[Any, ...]) -> SeriesKey:
        series = SeriesKey(self._target_id(sample.target), sample.metric, canonical_labels(sample.labels))
        if len(self._keys) >= MAX_KEYS:
            self._keys.clear()
        self._keys[key] = series
        return series

    def flush(self) -> None:
        """Return once everything written so far is committed; raises `StoreError` if it cannot be."""
        self._writer.flush()

    def latest(self, target: str) -> dict[str, list[Sample]]:
        """Per metric, the samples of its newest scrape; their `ts` tells their age.

        A series that the newest scrape of its metric no longer had (the engine came back with other labels)
        is left out, so that sums over a metric do not count a dead series.
        """
        query = (
            select(SeriesRow.metric, SeriesRow.labels, NewestRow.ts_ms, NewestRow.value)
            .join(NewestRow, NewestRow.series_id == SeriesRow.id)
            .where(SeriesRow.target_id == self._target_id(target))
            .order_by(SeriesRow.metric, SeriesRow.id)
        )
        with self._database.read() as session:
            rows = session.execute(query).all()
        last: dict[str, int] = {}
        for metric, _, ts_ms, _ in rows:
            last[metric] = max(ts_ms, last.get(metric, ts_ms))
        result: dict[str, list[Sample]] = {}
        for metric, labels, ts_ms, value in rows:
            if ts_ms == last[metric]:
                sample = Sample(target, metric, json.loads(labels), ts_ms / 1000, value)
                result.setdefault(metric, []).append(sample)
        return result

    def range(
        self,
        target: str,
        metric: str,
        since: float,
        until: float | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        step_s: float | None = None,
    ) -> pd.DataFrame:
        """Samples with `since <= ts <= until` as columns `ts` (Unix seconds), `value` and one per label.

        `labels` keeps the series that carry at least these. Rows are ordered by series, then time. Without
        samples the frame is empty and has the columns `ts` and `value`. Raw samples are kept for `retention_days`.

        With `step_s` of 60 or more, the frame is that of `ranges`. `frame.attrs["resolution_s"]` says what it was read
        from (the coarsest; 0: raw samples).
        """
        series = self._series(target, (metric,), labels or {})
        if step_s is not None and step_s >= MINUTE_S and series:
            with self._database.read() as session:
                return read_stretches(session, series, since, until, step_s)[metric]
        with self._database.read() as session:
            table = read_samples(session, series, to_ms(since), None if until is None else to_ms(until))
        columns = {"ts": table[:, 1] / 1000, "value": table[:, 2]}
        frame = labelled(table[:, 0], columns, {i: found for i, (_, found) in series.items()})
        frame.attrs["resolution_s"] = 0.0
        return frame

    def ranges(
        self, target: str, metrics: Iterable[str], since: float, until: float | None = None, *, step_s: float = HOUR_S
    ) -> dict[str, pd.DataFrame]:
        """By metric that has series: one row per series and step of 60 s or more, from the finest rollup that is kept.

        Columns as `stretches.read_stretches` tells. One reading of many metrics costs little more than of one.
        """
        if step_s < MINUTE_S:
            raise StoreError("Samples are rolled up to steps of 60 s or more.")
        series = self._series(target, tuple(metrics), {})
        with self._database.read() as session:
            return read_stretches(session, series, since, until, step_s)

    def recent(self, target: str, metrics: Iterable[str], since: float) -> list[Sample]:
        """Samples of several metrics from `since` on, each series in time order (preloads the alert window)."""
        series = self._series(target, tuple(metrics), {})
        with self._database.read() as session:
            table = read_samples(session, series, to_ms(since), None)
        return [Sample(target, *series[int(i)], ts_ms / 1000, value) for i, ts_ms, value in table.tolist()]

    def oldest(self) -> float | None:
        """The minute of the oldest raw sample (Unix seconds), or None."""
        with self._database.read() as session:
            minute = session.scalar(select(func.min(SampleRow.minute)))
        return None if minute is None else float(minute * MINUTE_S)

    def prune(self, before: float) -> int:
        """Delete raw samples of minutes that ended before `before` (Unix seconds) and are rolled up; returns how many.

        Short transactions, so that nobody waits long for the write lock.
        """
        deleted = 0
        while (count := self._writer.call(partial(_prune_oldest, before=int(before // MINUTE_S)))) is not None:
            deleted += count
        return deleted

    def prune_series(self) -> None:
        """Delete series of which neither a sample nor a rollup is left."""
        self._writer.call(_prune_series)

    def _series(
        self, target: str, metrics: tuple[str, ...], labels: Mapping[str, str]
    ) -> dict[int, tuple[str, dict[str, str]]]:
        query = select(SeriesRow.id, SeriesRow.metric, SeriesRow.labels).where(
            SeriesRow.target_id == self._target_id(target), SeriesRow.metric.in_(metrics)
        )
        with self._database.read() as session:
            rows = session.execute(query).all()
        found = {series_id: (metric, json.loads(text)) for series_id, metric, text in rows}
        return {i: s for i, s in found.items() if labels.items() <= s[1].items()}

    def _target_id(self, name: str) -> int:
        known = self._target_ids.get(name)
        if known is not None:
            return known
        with self._database.read() as session:
            found = session.scalars(select(TargetRow.id).where(TargetRow.name == name)).one_or_none()
        if found is None:
            raise StoreError(f"There is no target named {name!r}: register it before writing or reading samples.")
        self._target_ids[name] = found
        return found


def canonical_labels(labels: Mapping[str, str]) -> str:
    """Labels as the text that identifies a series: JSON with sorted keys and no spaces."""
    return _LABELS.encode(dict(labels))


def to_ms(ts: float) -> int:
    """Unix seconds as integer milliseconds."""
    return round(ts * 1000)


def _prune_oldest(session: Session, before: int) -> int | None:
    """Delete some of the oldest samples; returns how many, None when no minute before `before` has any."""
    progress = session.scalars(select(RollupProgressRow).with_for_update()).one()
    before = min(before, progress.minutes_until)
    progress.raw_from = max(progress.raw_from, before)
    key = tuple_(SampleRow.minute, SampleRow.series_id)
    ordered = select(SampleRow.minute, SampleRow.series_id).where(SampleRow.minute < before)
    ordered = ordered.order_by(SampleRow.minute, SampleRow.series_id)
    first = session.execute(ordered.limit(1)).one_or_none()
    if first is None:
        return None
    end = session.execute(ordered.offset(ROWS_A_CALL).limit(1)).one_or_none()
    chosen = SampleRow.minute < before if end is None else key <= tuple_(*end)
    return cast("CursorResult[Any]", session.execute(delete(SampleRow).where(chosen))).rowcount


def _prune_series(session: Session) -> None:
    """Forget series without a raw sample, and delete those without rollups."""
    progress = session.scalars(select(RollupProgressRow)).one()
    gone_until = min(progress.raw_from, progress.hours_until * 60)
    session.execute(delete(NewestRow).where(NewestRow.ts_ms < gone_until * MINUTE_MS))
    used = exists().where(NewestRow.series_id == SeriesRow.id)
    rolled_up = exists().where(HourRow.series_id == SeriesRow.id)
    session.execute(delete(SeriesRow).where(not_(used), not_(rolled_up)).execution_options(synchronize_session=False))
