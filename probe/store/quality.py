"""Quality runs: a suite of checkable questions put to one server, and every answer it gave.

Items are committed when `add` returns, so a run that stops in the middle keeps what it has and can be resumed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, cast

from sqlalchemy import Table, select
from sqlalchemy.orm import Session

from probe.store.database import Database, upsert
from probe.store.models import QualityItemRow, QualityRunRow
from probe.store.records import QualityItem, QualityRun, StoreError
from probe.store.writer import Writer

STATUSES = ("running", "done", "incomplete")


class Quality:
    """`store.quality`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def start(
        self,
        target: str,
        label: str,
        model: str,
        suite: dict[str, Any],
        suite_key: str,
        facts: dict[str, Any],
        baseline_id: str | None = None,
    ) -> QualityRun:
        """A new run, status "running". Runs with one `suite_key` asked items that can be compared by their keys."""

        def work(session: Session) -> QualityRun:
            row = QualityRunRow(
                id=uuid.uuid4().hex,
                target=target,
                label=label,
                model=model,
                suite=suite,
                suite_key=suite_key,
                facts=facts,
                baseline_id=baseline_id,
                status="running",
                result=None,
                error=None,
                started_at=time.time(),
                ended_at=None,
            )
            session.add(row)
            session.flush()
            return _run(row)

        return self._writer.call(work)

    def add(self, run_id: str, items: Iterable[QualityItem]) -> None:
        """Keep items of a run; one asked again (the same key) replaces the first."""
        rows = [
            {
                "run_id": run_id,
                "key": item.key,
                "task": item.task,
                "turn": item.turn,
                "is_right": item.right,
                "is_valid": item.valid,
                "data": item.data,
            }
            for item in {item.key: item for item in items}.values()
        ]

        def work(session: Session) -> None:
            _require(session, run_id)
            upsert(session.connection(), cast("Table", QualityItemRow.__table__), rows, key=("run_id", "key"))

        if rows:
            self._writer.call(work)

    def items(self, run_id: str) -> list[QualityItem]:
        """What was asked and measured so far, by key."""
        query = select(QualityItemRow).where(QualityItemRow.run_id == run_id).order_by(QualityItemRow.key)
        with self._database.read() as session:
            return [
                QualityItem(row.key, row.task, row.turn, row.is_right, row.is_valid, dict(row.data))
                for row in session.scalars(query)
            ]

    def reopen(self, run_id: str) -> QualityRun:
        """An incomplete run goes on: status "running" again, its items stay."""

        def work(session: Session) -> QualityRun:
            row = _require(session, run_id)
            row.status, row.error, row.ended_at = "running", None, None
            return _run(row)

        return self._writer.call(work)

    def finish(self, run_id: str, status: str, result: dict[str, Any] | None, error: str | None = None) -> QualityRun:
        """Close the run: "done" or "incomplete", with the result of what was asked."""
        if status not in STATUSES:
            raise StoreError(f"A quality run is {', '.join(STATUSES)}, not {status!r}.")

        def work(session: Session) -> QualityRun:
            row = _require(session, run_id)
            row.status, row.result, row.error, row.ended_at = status, result, error, time.time()
            return _run(row)

        return self._writer.call(work)

    def get(self, run_id: str) -> QualityRun | None:
        """The run, or None."""
        with self._database.read() as session:
            row = session.get(QualityRunRow, run_id)
            return _run(row) if row else None

    def list(self, limit: int = 50, target: str | None = None, status: str | None = None) -> list[QualityRun]:
        """Newest first."""
        query = select(QualityRunRow).order_by(QualityRunRow.started_at.desc(), QualityRunRow.id).limit(limit)
        if target is not None:
            query = query.where(QualityRunRow.target == target)
        if status is not None:
            query = query.where(QualityRunRow.status == status)
        with self._database.read() as session:
            return [_run(row) for row in session.scalars(query)]

    def prune(self, before: float) -> int:
        """Delete runs that started before `before` (Unix seconds) and that no kept run is compared with.

        Returns the number of runs deleted.
        """

        def work(session: Session) -> int:
            kept = select(QualityRunRow.baseline_id).where(
                QualityRunRow.started_at >= before, QualityRunRow.baseline_id.is_not(None)
            )
            query = select(QualityRunRow).where(QualityRunRow.started_at < before, QualityRunRow.id.not_in(kept))
            rows = session.scalars(query).all()
            for row in rows:
                session.delete(row)
            return len(rows)

        return self._writer.call(work)


def _require(session: Session, run_id: str) -> QualityRunRow:
    row = session.get(QualityRunRow, run_id)
    if row is None:
        raise StoreError(f"There is no quality run {run_id!r}.")
    return row


def _run(row: QualityRunRow) -> QualityRun:
    return QualityRun(
        id=row.id,
        target=row.target,
        label=row.label,
        model=row.model,
        suite=dict(row.suite),
        suite_key=row.suite_key,
        facts=dict(row.facts),
        baseline_id=row.baseline_id,
        status=row.status,
        result=dict(row.result) if row.result is not None else None,
        error=row.error,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )
