"""Silences: who muted what, until when, and why. They are never deleted while they can matter; they expire."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from probe.notify.matchers import Matcher, MatcherError, narrowing, parse_matchers
from probe.store.database import Database
from probe.store.lifecycle_models import SilenceRow
from probe.store.models import EventRow
from probe.store.records import Silence, StoreError
from probe.store.words import said_by
from probe.store.writer import Writer

MAX_S = 366 * 86_400.0

log = logging.getLogger("kvoncall.store")


class Silences:
    """`store.silences`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def add(
        self,
        matchers: str | Iterable[Matcher],
        *,
        ends_at: float,
        author: str,
        reason: str,
        starts_at: float | None = None,
        now: float | None = None,
    ) -> Silence:
        """Mute alerts that meet all matchers, from `starts_at` (default now) to `ends_at`; raises `StoreError`."""
        created = time.time() if now is None else now
        starts = created if starts_at is None else starts_at
        author, reason = said_by(author, reason, "A silence")
        try:
            parsed = parse_matchers(matchers if isinstance(matchers, str) else ", ".join(map(str, matchers)))
        except MatcherError as error:
            raise StoreError(f"The silence's matchers cannot be read: {error}.") from None
        if not narrowing(parsed):
            raise StoreError("A silence needs a matcher that names something, or it would mute every alert.")
        if not created < ends_at <= created + MAX_S or ends_at <= starts:
            raise StoreError("A silence must end after it starts, in the future, and within a year.")

        def work(session: Session) -> Silence:
            row = SilenceRow(
                matchers=[str(m) for m in parsed],
                starts_at=starts,
                ends_at=ends_at,
                author=author,
                reason=reason,
                created_at=created,
            )
            session.add(row)
            session.flush()
            _tell(session, row, "silence_added", author, f"silenced {', '.join(row.matchers)}: {reason}", created)
            return _silence(row)

        return self._writer.call(work)

    def list(self, *, expired: bool = False, now: float | None = None) -> list[Silence]:
        """Silences that are active or still to come, soonest end first; with `expired`, all, newest end first."""
        at = time.time() if now is None else now
        query = select(SilenceRow).order_by(SilenceRow.ends_at.desc(), SilenceRow.id.desc())
        if not expired:
            query = select(SilenceRow).where(SilenceRow.ends_at > at).order_by(SilenceRow.ends_at, SilenceRow.id)
        with self._database.read() as session:
            return list(_readable(session.scalars(query)))

    def get(self, silence_id: int) -> Silence | None:
        """The silence, expired or not, or None."""
        with self._database.read() as session:
            row = session.get(SilenceRow, silence_id)
            return _silence(row) if row else None

    def expire(self, silence_id: int, *, author: str, now: float | None = None) -> Silence:
        """End a silence at once; alerts it held that still fire are notified. Raises `StoreError`."""
        at = time.time() if now is None else now
        author, _ = said_by(author, "-", "Ending a silence")

        def work(session: Session) -> Silence:
            row = session.get(SilenceRow, silence_id)
            if row is None:
                raise StoreError(f"There is no silence {silence_id}.")
            if row.ends_at <= at:
                raise StoreError(f"Silence {silence_id} has expired already.")
            row.ends_at, row.expired_by = at, author
            row.starts_at = min(row.starts_at, at)
            _tell(session, row, "silence_expired", author, f"ended the silence of {', '.join(row.matchers)}", at)
            return _silence(row)

        return self._writer.call(work)

    def prune(self, before: float) -> None:
        """Delete silences that ended before `before` (Unix seconds)."""

        def work(session: Session) -> None:
            session.execute(delete(SilenceRow).where(SilenceRow.ends_at < before))

        self._writer.call(work)


def _tell(session: Session, row: SilenceRow, kind: str, actor: str, deed: str, at: float) -> None:
    data = {"silence": row.id, "matchers": list(row.matchers), "author": actor, "reason": row.reason}
    data["ends_at"] = row.ends_at
    session.add(EventRow(target=None, ts=at, kind=kind, severity="info", message=f"{actor} {deed}", data=data))
    session.flush()


def _readable(rows: Iterable[SilenceRow]) -> Iterator[Silence]:
    """A silence whose matchers this version refuses mutes nothing, rather than stopping every notification."""
    for row in rows:
        try:
            yield _silence(row)
        except MatcherError:
            log.warning("Silence %d cannot be read and mutes nothing: %s", row.id, ", ".join(row.matchers))


def _silence(row: SilenceRow) -> Silence:
    return Silence(
        id=row.id,
        matchers=parse_matchers(", ".join(row.matchers)),
        starts_at=row.starts_at,
        ends_at=row.ends_at,
        author=row.author,
        reason=row.reason,
        created_at=row.created_at,
        expired_by=row.expired_by,
    )
