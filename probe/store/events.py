"""Events: things that happened once (an engine died, a counter was reset, a scrape failed)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import EventRow
from probe.store.records import Event
from probe.store.writer import Writer


class Events:
    """`store.events`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def add(
        self,
        target: str | None,
        kind: str,
        message: str,
        *,
        severity: str = "info",
        data: dict[str, Any] | None = None,
        ts: float | None = None,
    ) -> Event:
        """Write an event; it is committed when this returns. `ts` defaults to now."""

        def work(session: Session) -> Event:
            row = EventRow(
                target=target,
                ts=time.time() if ts is None else ts,
                kind=kind,
                severity=severity,
                message=message,
                data=data or {},
            )
            session.add(row)
            session.flush()
            return _event(row)

        return self._writer.call(work)

    def recent(
        self,
        limit: int | None = 100,
        target: str | None = None,
        kinds: Iterable[str] | None = None,
        since: float | None = None,
        after_id: int | None = None,
    ) -> list[Event]:
        """Newest first; `since` is inclusive, `after_id` not; `limit` None returns all that match."""
        query = select(EventRow).order_by(EventRow.ts.desc(), EventRow.id.desc())
        if limit is not None:
            query = query.limit(limit)
        if target is not None:
            query = query.where(EventRow.target == target)
        if kinds is not None:
            query = query.where(EventRow.kind.in_(list(kinds)))
        if since is not None:
            query = query.where(EventRow.ts >= since)
        if after_id is not None:
            query = query.where(EventRow.id > after_id)
        with self._database.read() as session:
            return [_event(row) for row in session.scalars(query)]

    def prune(self, before: float) -> None:
        """Delete events older than `before` (Unix seconds)."""

        def work(session: Session) -> None:
            session.execute(delete(EventRow).where(EventRow.ts < before))

        self._writer.call(work)


def _event(row: EventRow) -> Event:
    return Event(
        id=row.id,
        target=row.target,
        ts=row.ts,
        kind=row.kind,
        severity=row.severity,
        message=row.message,
        data=dict(row.data),
    )
