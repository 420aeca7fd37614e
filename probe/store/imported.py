"""Alerts of somebody else's Alertmanager, as its webhook told them: one row a fingerprint, the newest word wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

from sqlalchemy import Table, delete, select
from sqlalchemy.orm import Session

from probe.store.database import Database, upsert
from probe.store.lifecycle_models import ImportedAlertRow
from probe.store.records import ImportedAlert
from probe.store.writer import Writer

MAX_KEPT = 10_000


class Imported:
    """`store.imported`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def save(self, alerts: Iterable[ImportedAlert]) -> None:
        """Write alerts; what tells of an older incident than the stored one is left out. Keeps `MAX_KEPT` at most."""
        newest: dict[str, ImportedAlert] = {}
        for alert in alerts:
            known = newest.get(alert.fingerprint)
            if known is None or alert.starts_at >= known.starts_at:
                newest[alert.fingerprint] = alert

        def work(session: Session) -> None:
            for alert in newest.values():
                row = session.get(ImportedAlertRow, alert.fingerprint)
                if row is None or alert.starts_at >= row.starts_at:
                    table = cast("Table", ImportedAlertRow.__table__)
                    upsert(session.connection(), table, [dataclasses.asdict(alert)], key=("fingerprint",))
            oldest = select(ImportedAlertRow.fingerprint).order_by(ImportedAlertRow.received_at.desc())
            session.execute(
                delete(ImportedAlertRow).where(
                    ImportedAlertRow.fingerprint.in_(oldest.offset(MAX_KEPT).limit(MAX_KEPT))
                )
            )

        self._writer.call(work)

    def list(self, *, firing: bool = False, limit: int = 500) -> list[ImportedAlert]:
        """Firing ones first, each newest first; with `firing`, those only. `received_at` says how old the word is."""
        query = select(ImportedAlertRow).order_by(
            ImportedAlertRow.status, ImportedAlertRow.starts_at.desc(), ImportedAlertRow.fingerprint
        )
        if firing:
            query = query.where(ImportedAlertRow.status == "firing")
        with self._database.read() as session:
            return [_imported(row) for row in session.scalars(query.limit(limit))]

    def get(self, fingerprint: str) -> ImportedAlert | None:
        """The alert, or None."""
        with self._database.read() as session:
            row = session.get(ImportedAlertRow, fingerprint)
            return _imported(row) if row else None

    def prune(self, before: float) -> None:
        """Delete alerts not heard of since `before` (Unix seconds), firing or not."""

        def work(session: Session) -> None:
            session.execute(delete(ImportedAlertRow).where(ImportedAlertRow.received_at < before))

        self._writer.call(work)


def _imported(row: ImportedAlertRow) -> ImportedAlert:
    return ImportedAlert(**{f.name: getattr(row, f.name) for f in dataclasses.fields(ImportedAlert)})
