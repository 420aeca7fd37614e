"""The store: one object with a room for each kind of record. Thread-safe; one per process and database."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from probe.store.alerts import Alerts
from probe.store.database import BUSY_TIMEOUT_MS, Database, give_pages_back
from probe.store.events import Events
from probe.store.imported import Imported
from probe.store.leases import Leases
from probe.store.notes import Notes
from probe.store.notifications import Notifications
from probe.store.quality import Quality
from probe.store.receivers import Receivers
from probe.store.replays import Replays
from probe.store.rollups import Rollups
from probe.store.samples import Samples
from probe.store.settings import Settings
from probe.store.silences import Silences
from probe.store.targets import Targets
from probe.store.writer import Writer


class Store:
    """Use `Store.open`; close it to be sure that every sample is on disk."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writer = Writer(database)
        self.targets = Targets(database, self._writer)
        self.settings = Settings(database, self._writer)
        self.samples = Samples(database, self._writer, self.settings)
        self.rollups = Rollups(database, self._writer)
        self.events = Events(database, self._writer)
        self.alerts = Alerts(database, self._writer)
        self.silences = Silences(database, self._writer)
        self.receivers = Receivers(database, self._writer)
        self.notifications = Notifications(database, self._writer)
        self.imported = Imported(database, self._writer)
        self.notes = Notes(database, self._writer)
        self.replays = Replays(database, self._writer)
        self.quality = Quality(database, self._writer)
        self.leases = Leases(database, self._writer)

    @classmethod
    def open(cls, location: Path | str, *, busy_timeout_s: float = BUSY_TIMEOUT_MS / 1000) -> Store:
        """Open (and create or migrate) the store in a data directory, or at a database URL.

        Raises `StoreError` with one sentence when it is locked, read-only, damaged, no database, or newer.
        """
        database = Database(location, busy_timeout_ms=round(busy_timeout_s * 1000))
        try:
            database.migrate()
            database.give_space_back()
        except BaseException:
            database.dispose()
            raise
        return cls(database)

    @property
    def where(self) -> str:
        """The database file or URL (without its password)."""
        return self._database.where

    @property
    def notice(self) -> str | None:
        """One sentence while samples cannot be written, or None."""
        return self._writer.notice

    def used_bytes(self) -> int:
        """Bytes that the records take (on PostgreSQL an estimate)."""
        return self._database.used_bytes()

    def reclaim(self) -> None:
        """Give freed pages of the file back to the disk, a little at a time (PostgreSQL: its autovacuum does that)."""
        while self._writer.call(give_pages_back):
            pass

    def flush(self) -> None:
        """Return once every sample written so far is committed."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is pending and close; raises `StoreError` if samples could not be written."""
        try:
            self._writer.close()
        finally:
            self._database.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
