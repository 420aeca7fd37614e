"""Settings of the store: small JSON values shared by every process that uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import SettingRow
from probe.store.records import StoreError
from probe.store.writer import Writer

SHARED_FOR_S = 5.0


class _Setting(NamedTuple):
    default: Any
    allowed: Callable[[Any], bool]
    must: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _days(default: float) -> _Setting:
    return _Setting(default, lambda value: _is_number(value) and value > 0, "above 0 days")


_SETTINGS = {
    "retention_days": _days(7.0),  # raw samples
    "minute_retention_days": _days(30.0),  # 1-minute rollups; never less than raw samples
    "hour_retention_days": _days(400.0),
    "event_retention_days": _days(90.0),
    # Above it the oldest raw samples go first, then the oldest 1-minute rollups.
    "max_size_mb": _Setting(20_000.0, lambda value: _is_number(value) and value >= 16, "at least 16 MB"),
    "series_in_store": _Setting("all", lambda value: value in ("all", "alerts-only"), "all or alerts-only"),
}
DEFAULTS: dict[str, Any] = {key: setting.default for key, setting in _SETTINGS.items()}


class Settings:
    """`store.settings`; the known keys and their defaults are `DEFAULTS`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer
        self._shared: dict[str, tuple[float, Any]] = {}

    def get(self, key: str) -> Any:
        """The value, or its default."""
        if key not in _SETTINGS:
            raise StoreError(f"There is no setting {key!r}.")
        with self._database.read() as session:
            row = session.get(SettingRow, key)
            return row.value if row else DEFAULTS[key]

    def shared(self, key: str) -> Any:
        """As `get`, at most 5 s old: for what is asked with every scrape."""
        read_at, value = self._shared.get(key, (float("-inf"), None))
        if time.monotonic() - read_at > SHARED_FOR_S:
            value = self.get(key)
            self._shared[key] = (time.monotonic(), value)
        return value

    def set(self, key: str, value: Any) -> None:
        """Change a setting; raises `StoreError` for a value that it cannot have."""
        if key not in _SETTINGS:
            raise StoreError(f"There is no setting {key!r}.")
        if not _SETTINGS[key].allowed(value):
            raise StoreError(f"The setting {key} must be {_SETTINGS[key].must}.")

        def work(session: Session) -> None:
            session.merge(SettingRow(key=key, value=value))

        self._writer.call(work)
        self._shared.pop(key, None)
