"""Receivers and how they are notified: two settings, checked on the way in. They hold references, never secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from probe.notify.receivers import NotifyOptions, Receiver, ReceiverError, parse_options, parse_receiver
from probe.store.database import Database
from probe.store.models import SettingRow
from probe.store.records import StoreError
from probe.store.writer import Writer

RECEIVERS = "receivers"
NOTIFY = "notify"


class Receivers:
    """`store.receivers`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def problems(self) -> list[str]:
        """One sentence for each stored entry that cannot be used."""
        with self._database.read() as session:
            return read_receivers(session)[1]

    def list(self) -> list[Receiver]:
        """All receivers by name; an entry that cannot be read (edited by hand) is left out, see `problems`."""
        with self._database.read() as session:
            return read_receivers(session)[0]

    def get(self, name: str) -> Receiver | None:
        """The receiver, or None."""
        return next((receiver for receiver in self.list() if receiver.name == name), None)

    def save(self, given: Mapping[str, Any] | Receiver) -> Receiver:
        """Add a receiver or replace the one of its name; raises `StoreError` saying what is wrong with it."""
        try:
            receiver = parse_receiver(given.to_dict() if isinstance(given, Receiver) else given)
        except ReceiverError as error:
            raise StoreError(str(error)) from None

        def work(session: Session) -> None:
            others = [entry for entry in _entries(session) if entry.get("name") != receiver.name]
            entries = sorted([*others, receiver.to_dict()], key=lambda entry: str(entry.get("name")))
            session.merge(SettingRow(key=RECEIVERS, value=entries))

        self._writer.call(work)
        return receiver

    def remove(self, name: str) -> None:
        """Forget a receiver; what still waits for it is not sent. Raises `StoreError` if there is none."""

        def work(session: Session) -> None:
            entries = _entries(session)
            rest = [entry for entry in entries if entry.get("name") != name]
            if len(rest) == len(entries):
                raise StoreError(f"There is no receiver named {name!r}.")
            session.merge(SettingRow(key=RECEIVERS, value=rest))

        self._writer.call(work)

    def options(self) -> NotifyOptions:
        """Grouping and pacing in force."""
        with self._database.read() as session:
            return read_options(session)

    def set_options(self, **changes: Any) -> NotifyOptions:
        """Change some of `NotifyOptions`; raises `StoreError` saying what is wrong."""
        unknown = set(changes) - set(NotifyOptions.__dataclass_fields__)
        if unknown:
            raise StoreError(f"There is no notification option {sorted(unknown)[0]!r}.")

        def work(session: Session) -> NotifyOptions:
            row = session.get(SettingRow, NOTIFY)
            merged = {**(row.value if row and isinstance(row.value, dict) else {}), **changes}
            try:
                options = parse_options(merged)
            except (ReceiverError, TypeError) as error:
                raise StoreError(str(error)) from None
            session.merge(SettingRow(key=NOTIFY, value=json.loads(json.dumps(merged))))
            return options

        return self._writer.call(work)


def read_receivers(session: Session) -> tuple[list[Receiver], list[str]]:
    """(usable receivers, what is wrong with the others), inside the caller's transaction."""
    found, problems = [], []
    for entry in _entries(session):
        try:
            found.append(parse_receiver(entry))
        except (ReceiverError, TypeError, ValueError) as error:
            problems.append(str(error))
    return found, problems


def read_options(session: Session) -> NotifyOptions:
    """The stored options, or the defaults where they cannot be read."""
    row = session.get(SettingRow, NOTIFY)
    try:
        return parse_options(row.value if row and isinstance(row.value, dict) else {})
    except (ReceiverError, TypeError):
        return NotifyOptions()


def _entries(session: Session) -> list[dict[str, Any]]:
    row = session.get(SettingRow, RECEIVERS)
    value = row.value if row else []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
