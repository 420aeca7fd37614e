"""Settings of the store: small JSON values shared by every process that uses it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import SettingRow
from probe.store.records import StoreError
from probe.store.writer import Writer

DEFAULTS: dict[str, Any] = {
    "retention_days": 7.0,  # raw samples
    "event_retention_days": 90.0,
}


class Settings:
    """`store.settings`; the known keys and their defaults are `DEFAULTS`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def get(self, key: str) -> Any:
        """The value, or its default."""
        if key not in DEFAULTS:
            raise StoreError(f"There is no setting {key!r}.")
        with self._database.read() as session:
            row = session.get(SettingRow, key)
            return row.value if row else DEFAULTS[key]

    def set(self, key: str, value: float) -> None:
        """Change a setting; both known ones are days above 0."""
        if key not in DEFAULTS:
            raise StoreError(f"There is no setting {key!r}.")
        if not value > 0:
            raise StoreError(f"The setting {key} must be above 0 days.")

        def work(session: Session) -> None:
            session.merge(SettingRow(key=key, value=value))

        self._writer.call(work)
