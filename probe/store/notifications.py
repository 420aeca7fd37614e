"""The outbox: which notifications wait, which are on their way, and what became of them.

Claiming is one conditional UPDATE, so two processes never take the same row; a claim that ran out (its process died)
may be taken again, and the row then counts as "may have arrived". Delivery is therefore at least once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import CursorResult, and_, case, delete, func, or_, select, true, update
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.leases import require_lease
from probe.store.lifecycle_models import NotificationRow
from probe.store.models import AlertRow, EventRow
from probe.store.outbox import insert
from probe.store.receivers import read_options
from probe.store.records import Alert, Lease, Notification
from probe.store.writer import Writer

OPEN = ("pending", "sending")


@dataclass(frozen=True)
class Outcome:
    """What became of one claimed notification; `retry_at` (Unix seconds) is set where it is tried again."""

    state: str
    error: str | None = None
    retry_at: float | None = None
    unconfirmed: bool = False


class Notifications:
    """`store.notifications`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def relevant(self) -> list[Notification]:
        """All rows of alerts that fire or have something to be sent: what a dispatcher decides on."""
        waiting = select(NotificationRow.alert_id).where(NotificationRow.state.in_(OPEN))
        query = _notifications().where(or_(AlertRow.state == "firing", NotificationRow.alert_id.in_(waiting)))
        with self._database.read() as session:
            return [_notification(*found) for found in session.execute(query.order_by(NotificationRow.id))]

    def list(
        self,
        limit: int = 200,
        *,
        alert_id: int | None = None,
        receiver: str | None = None,
        states: Iterable[str] | None = None,
    ) -> list[Notification]:
        """Newest first."""
        query = _notifications().order_by(NotificationRow.created_at.desc(), NotificationRow.id.desc()).limit(limit)
        if alert_id is not None:
            query = query.where(NotificationRow.alert_id == alert_id)
        if receiver is not None:
            query = query.where(NotificationRow.receiver == receiver)
        if states is not None:
            query = query.where(NotificationRow.state.in_(list(states)))
        with self._database.read() as session:
            return [_notification(*found) for found in session.execute(query)]

    def counts(self) -> dict[str, dict[str, int]]:
        """Rows by receiver and state, as far back as they are kept."""
        query = select(NotificationRow.receiver, NotificationRow.state, func.count()).group_by(
            NotificationRow.receiver, NotificationRow.state
        )
        found: dict[str, dict[str, int]] = {}
        with self._database.read() as session:
            for receiver, state, number in session.execute(query):
                found.setdefault(receiver, {})[state] = number
        return found

    def flushed(self) -> dict[tuple[str, str], float]:
        """When each group that has something to be sent was last sent anything: (receiver, group key) -> seconds."""
        waiting = select(NotificationRow.receiver, NotificationRow.group_key).where(NotificationRow.state.in_(OPEN))
        rows = waiting.distinct().subquery()
        query = (
            select(NotificationRow.receiver, NotificationRow.group_key, func.max(NotificationRow.done_at))
            .join(
                rows,
                and_(
                    rows.c.receiver == NotificationRow.receiver,
                    rows.c.group_key == NotificationRow.group_key,
                ),
            )
            .where(NotificationRow.state == "sent")
            .group_by(NotificationRow.receiver, NotificationRow.group_key)
        )
        with self._database.read() as session:
            return {(receiver, key): at for receiver, key, at in session.execute(query) if at is not None}

    def add(self, wanted: Iterable[tuple[Alert, str, str]], now: float, lease: Lease | None = None) -> None:
        """Write outbox rows (alert, transition, receiver) that are missing."""
        todo = list(wanted)

        def work(session: Session) -> None:
            if lease is not None:
                require_lease(session, lease)
            group_by = read_options(session).group_by
            for alert, transition, receiver in todo:
                row = session.get(AlertRow, alert.id)
                if row is not None and row.state == "firing":  # else it is over, and nobody needs to be told
                    insert(session, alert, transition, [receiver], group_by, now)

        self._writer.call(work)

    def drop(self, reasons: Mapping[int, str], now: float, lease: Lease | None = None) -> None:
        """Close rows that need not be sent any more, saying why."""

        def work(session: Session) -> None:
            if lease is not None:
                require_lease(session, lease)
            for row_id, reason in reasons.items():
                session.execute(
                    update(NotificationRow)
                    .where(NotificationRow.id == row_id, NotificationRow.state.in_(OPEN))
                    .values(state="dropped", error=reason, done_at=now, unconfirmed=_maybe_arrived())
                )

        self._writer.call(work)

    def delete(self, ids: Iterable[int], lease: Lease | None = None) -> None:
        """Remove open rows of a receiver that is gone, or takes such alerts no more."""
        todo = list(ids)

        def work(session: Session) -> None:
            if lease is not None:
                require_lease(session, lease)
            session.execute(
                delete(NotificationRow).where(NotificationRow.id.in_(todo), NotificationRow.state.in_(OPEN))
            )

        self._writer.call(work)

    def claim(
        self, ids: Iterable[int], owner: str, now: float, ttl_s: float, lease: Lease | None = None
    ) -> frozenset[int]:
        """Take rows for sending until `now + ttl_s`; returns those that nobody else has. Counts a try."""
        todo = list(ids)

        def work(session: Session) -> frozenset[int]:
            if lease is not None:
                require_lease(session, lease)
            claimed = session.scalars(
                update(NotificationRow)
                .where(NotificationRow.id.in_(todo))
                .where(
                    or_(
                        NotificationRow.state == "pending",
                        and_(NotificationRow.state == "sending", NotificationRow.claimed_until <= now),
                    )
                )
                .values(
                    unconfirmed=_maybe_arrived(),
                    state="sending",
                    tries=NotificationRow.tries + 1,
                    claimed_by=owner,
                    claimed_until=now + ttl_s,
                )
                .returning(NotificationRow.id)
            )
            return frozenset(claimed)

        return self._writer.call(work)

    def finish(self, outcomes: Mapping[int, Outcome], owner: str, now: float) -> None:
        """Write what became of rows claimed by `owner`; a row that somebody else took meanwhile is theirs."""

        def work(session: Session) -> None:
            for row_id, outcome in outcomes.items():
                _finish(session, row_id, outcome, owner, now)

        self._writer.call(work)

    def prune(self, before: float) -> None:
        """Delete closed rows older than `before` (Unix seconds), except those of alerts that still fire."""

        def work(session: Session) -> None:
            firing = select(AlertRow.id).where(AlertRow.state == "firing")
            session.execute(
                delete(NotificationRow)
                .where(NotificationRow.created_at < before, NotificationRow.state.not_in(OPEN))
                .where(NotificationRow.alert_id.not_in(firing))
            )

        self._writer.call(work)


def _finish(session: Session, row_id: int, outcome: Outcome, owner: str, now: float) -> None:
    values: dict[str, Any] = {"state": outcome.state, "error": outcome.error, "claimed_by": None, "claimed_until": None}
    if outcome.unconfirmed:
        values["unconfirmed"] = True
    if outcome.state == "pending":
        values["due_at"] = outcome.retry_at
    else:
        values["done_at"] = now
    result = session.execute(
        update(NotificationRow)
        .where(NotificationRow.id == row_id, NotificationRow.state == "sending", NotificationRow.claimed_by == owner)
        .values(**values)
    )
    if outcome.state != "failed" or cast("CursorResult[Any]", result).rowcount == 0:
        return
    row, alert = session.execute(
        select(NotificationRow, AlertRow)
        .join(AlertRow, AlertRow.id == NotificationRow.alert_id)
        .where(NotificationRow.id == row_id)
    ).one()
    message = f"Receiver {row.receiver} was not told that {alert.rule} is {_word(row.transition)}: {outcome.error}"
    data = {"alert": alert.id, "rule": alert.rule, "receiver": row.receiver, "transition": row.transition}
    session.add(
        EventRow(
            target=alert.target,
            ts=now,
            kind="notification_failed",
            severity="error",
            message=message,
            data={**data, "tries": row.tries},
        )
    )


def _word(transition: str) -> str:
    return "still firing" if transition.startswith("repeat") else transition


def _maybe_arrived() -> Any:
    """A row found in "sending" was left there by a process that died: it may have arrived."""
    return case((NotificationRow.state == "sending", true()), else_=NotificationRow.unconfirmed)


def _notifications() -> Any:
    return select(NotificationRow, AlertRow.rule, AlertRow.target).join(
        AlertRow, AlertRow.id == NotificationRow.alert_id
    )


def _notification(row: NotificationRow, rule: str, target: str) -> Notification:
    return Notification(
        id=row.id,
        alert_id=row.alert_id,
        rule=rule,
        target=target,
        transition=row.transition,
        receiver=row.receiver,
        group_key=row.group_key,
        state=row.state,
        created_at=row.created_at,
        due_at=row.due_at,
        done_at=row.done_at,
        tries=row.tries,
        unconfirmed=row.unconfirmed,
        error=row.error,
        claimed_until=row.claimed_until,
    )
