"""Samples: values of series over time. Written in batches, read by target and metric."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import SampleRow, SeriesRow, TargetRow
from probe.store.records import Sample, StoreError
from probe.store.writer import PendingSample, Writer

if TYPE_CHECKING:
    import pandas as pd


class Samples:
    """`store.samples`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer
        self._target_ids: dict[str, int] = {}

    def write(self, samples: Iterable[Sample]) -> None:
        """Queue samples for the next batch and return; `flush` waits for it.

        A second value of a series at the same millisecond replaces the first. NaN (Prometheus: no observation)
        is not stored. Raises `StoreError` for a target that is not registered.
        """
        self._writer.add(
            [
                PendingSample(
                    self._target_id(s.target), s.metric, canonical_labels(s.labels), to_ms(s.ts), float(s.value)
                )
                for s in samples
                if not math.isnan(s.value)
            ]
        )

    def flush(self) -> None:
        """Return once everything written so far is committed; raises `StoreError` if it cannot be."""
        self._writer.flush()

    def latest(self, target: str) -> dict[str, list[Sample]]:
        """Per metric, the samples of its newest scrape; their `ts` tells their age.

        A series that the newest scrape of its metric no longer had (the engine came back with other labels)
        is left out, so that sums over a metric do not count a dead series.
        """
        newest = (
            select(func.max(SampleRow.ts_ms))
            .where(SampleRow.series_id == SeriesRow.id)
            .correlate(SeriesRow)
            .scalar_subquery()
        )
        query = (
            select(SeriesRow.metric, SeriesRow.labels, SampleRow.ts_ms, SampleRow.value)
            .join(SampleRow, SampleRow.series_id == SeriesRow.id)
            .where(SeriesRow.target_id == self._target_id(target), SampleRow.ts_ms == newest)
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
    ) -> pd.DataFrame:
        """Samples with `since <= ts <= until` as columns `ts` (Unix seconds), `value` and one per label.

        `labels` keeps the series that carry at least these. Rows are ordered by series, then time. Without
        samples the frame is empty and has the columns `ts` and `value`.
        """
        import pandas as pd  # half a second that the command line mostly does not need

        series = self._series(target, (metric,), labels or {})
        query = (
            select(SampleRow.series_id, SampleRow.ts_ms, SampleRow.value)
            .where(SampleRow.series_id.in_(series), SampleRow.ts_ms >= to_ms(since))
            .order_by(SampleRow.series_id, SampleRow.ts_ms)
        )
        if until is not None:
            query = query.where(SampleRow.ts_ms <= to_ms(until))
        with self._database.read() as session:
            rows = session.execute(query).all()
        columns: dict[str, list[Any]] = {"ts": [r[1] / 1000 for r in rows], "value": [r[2] for r in rows]}
        for name in sorted({name for _, found in series.values() for name in found}):
            columns[name] = [series[r[0]][1].get(name, "") for r in rows]
        return pd.DataFrame(columns)

    def recent(self, target: str, metrics: Iterable[str], since: float) -> list[Sample]:
        """Samples of several metrics from `since` on, each series in time order (preloads the alert window)."""
        series = self._series(target, tuple(metrics), {})
        query = (
            select(SampleRow.series_id, SampleRow.ts_ms, SampleRow.value)
            .where(SampleRow.series_id.in_(series), SampleRow.ts_ms >= to_ms(since))
            .order_by(SampleRow.series_id, SampleRow.ts_ms)
        )
        with self._database.read() as session:
            rows = session.execute(query).all()
        return [Sample(target, *series[series_id], ts_ms / 1000, value) for series_id, ts_ms, value in rows]

    def prune(self, before: float) -> int:
        """Delete samples older than `before` (Unix seconds) and series left empty; returns samples deleted.

        One short transaction per series, so that nobody waits long for the write lock.
        """
        with self._database.read() as session:
            ids = session.scalars(select(SeriesRow.id)).all()
        return sum(self._writer.call(partial(_prune_series, series_id=i, before_ms=to_ms(before))) for i in ids)

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
    return json.dumps(dict(labels), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def to_ms(ts: float) -> int:
    """Unix seconds as integer milliseconds."""
    return round(ts * 1000)


def _prune_series(session: Session, series_id: int, before_ms: int) -> int:
    where = (SampleRow.series_id == series_id, SampleRow.ts_ms < before_ms)
    count = session.scalar(select(func.count()).select_from(SampleRow).where(*where)) or 0
    if count:
        session.execute(delete(SampleRow).where(*where))
    left = session.scalar(select(SampleRow.ts_ms).where(SampleRow.series_id == series_id).limit(1))
    if left is None and count:
        session.execute(delete(SeriesRow).where(SeriesRow.id == series_id))
    return count
