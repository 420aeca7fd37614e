"""Alerts with their transitions and acknowledgements, and the newest reading of every rule.

Evaluations are written by the leading monitor only, acknowledgements by anybody. A transition and the notifications
it asks for are one transaction: neither is ever there without the other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any, cast

from sqlalchemy import Select, Table, and_, delete, select
from sqlalchemy.orm import Session

from probe.store.database import Database, upsert
from probe.store.leases import require_lease
from probe.store.lifecycle_models import AcknowledgementRow
from probe.store.models import AlertRow, EventRow, ReadingRow, ReplayRow, TargetRow, TransitionRow
from probe.store.outbox import enqueue
from probe.store.records import ACK_KINDS, Acknowledgement, Alert, AlertUpdate, Lease, Reading, StoreError
from probe.store.replays import ACTIVE as ACTIVE_REPLAY
from probe.store.words import said_by
from probe.store.writer import Writer

ACTIVE = ("pending", "firing")


class Alerts:
    """`store.alerts`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def active(self, target: str | None = None) -> list[Alert]:
        """Pending and firing alerts, oldest first."""
        query = _alerts().where(AlertRow.state.in_(ACTIVE)).order_by(AlertRow.pending_at, AlertRow.id)
        if target is not None:
            query = query.where(AlertRow.target == target)
        with self._database.read() as session:
            return [_alert(found) for found in session.execute(query)]

    def history(self, limit: int = 200, target: str | None = None) -> list[Alert]:
        """Alerts of any state, newest first. (A pending alert that cleared in time leaves nothing here.)"""
        query = _alerts().order_by(AlertRow.pending_at.desc(), AlertRow.id.desc()).limit(limit)
        if target is not None:
            query = query.where(AlertRow.target == target)
        with self._database.read() as session:
            return [_alert(found) for found in session.execute(query)]

    def get(self, alert_id: int) -> Alert | None:
        """The alert, or None."""
        with self._database.read() as session:
            return _get(session, alert_id)

    def acknowledge(
        self, alert_id: int, *, author: str, reason: str, kind: str = "investigating", now: float | None = None
    ) -> Alert:
        """Take an active alert on until it resolves; replaces an acknowledgement in force. `kind`: of `ACK_KINDS`."""
        author, reason = said_by(author, reason, "An acknowledgement")
        if kind not in ACK_KINDS:
            raise StoreError(f"An acknowledgement is {', '.join(ACK_KINDS)}, not {kind!r}.")
        at = time.time() if now is None else now

        def work(session: Session) -> Alert:
            row = _require_active(session, alert_id)
            _end_acknowledgement(session, alert_id, author, at)
            session.add(AcknowledgementRow(alert_id=alert_id, author=author, kind=kind, reason=reason, at=at))
            data = {"alert": alert_id, "rule": row.rule, "author": author, "kind": kind, "reason": reason}
            _tell(session, row, "alert_acknowledged", f"{author} acknowledged {row.rule}: {reason}", data, at)
            return cast("Alert", _get(session, alert_id))

        return self._writer.call(work)

    def unacknowledge(self, alert_id: int, *, author: str, now: float | None = None) -> Alert:
        """Take the acknowledgement in force back; what it held is notified. Raises `StoreError` if there is none."""
        author, _ = said_by(author, "-", "An acknowledgement")
        at = time.time() if now is None else now

        def work(session: Session) -> Alert:
            row = _require_active(session, alert_id)
            if not _end_acknowledgement(session, alert_id, author, at):
                raise StoreError(f"Alert {alert_id} is not acknowledged.")
            data = {"alert": alert_id, "rule": row.rule, "author": author}
            _tell(session, row, "alert_unacknowledged", f"{author} took back acknowledging {row.rule}", data, at)
            return cast("Alert", _get(session, alert_id))

        return self._writer.call(work)

    def acknowledgements(self, alert_id: int) -> list[Acknowledgement]:
        """Every acknowledgement the alert ever had, oldest first."""
        query = (
            select(AcknowledgementRow).where(AcknowledgementRow.alert_id == alert_id).order_by(AcknowledgementRow.id)
        )
        with self._database.read() as session:
            return [_acknowledgement(row) for row in session.scalars(query)]

    def transitions(self, alert_id: int) -> list[tuple[float, str, str, float | None]]:
        """(ts, from, to, value) of every change of state, in order."""
        query = select(TransitionRow).where(TransitionRow.alert_id == alert_id).order_by(TransitionRow.id)
        with self._database.read() as session:
            return [(r.ts, r.from_state, r.to_state, r.value) for r in session.scalars(query)]

    def readings(self, target: str | None = None) -> list[Reading]:
        """The newest evaluation of every rule on every active target, alerting or not, by target and rule."""
        query = (
            select(ReadingRow)
            .join(TargetRow, TargetRow.name == ReadingRow.target)
            .where(TargetRow.active)
            .order_by(ReadingRow.target, ReadingRow.rule)
        )
        if target is not None:
            query = query.where(ReadingRow.target == target)
        with self._database.read() as session:
            return [_reading(row) for row in session.scalars(query)]

    def prune_readings(self, before: float) -> None:
        """Delete readings older than `before` (Unix seconds): those of targets nobody watches any more."""

        def work(session: Session) -> None:
            session.execute(delete(ReadingRow).where(ReadingRow.updated_at < before))

        self._writer.call(work)

    def save(self, updates: Iterable[AlertUpdate], lease: Lease | None = None) -> None:
        """Write evaluations in one transaction; raises `LeaseLostError` (and writes nothing) if `lease` is not held."""
        todo = list(updates)

        def work(session: Session) -> None:
            if lease is not None:
                require_lease(session, lease)
            rows = [dataclasses.asdict(update.reading) for update in todo]
            upsert(session.connection(), cast("Table", ReadingRow.__table__), rows, key=("rule", "target"))
            for update in todo:
                if update.reading.state != "inactive" or update.transitions:
                    _apply(session, update)

        self._writer.call(work)


def _get(session: Session, alert_id: int) -> Alert | None:
    found = session.execute(_alerts().where(AlertRow.id == alert_id)).one_or_none()
    return _alert(found) if found else None


def _require_active(session: Session, alert_id: int) -> AlertRow:
    row = session.get(AlertRow, alert_id)
    if row is None:
        raise StoreError(f"There is no alert {alert_id}.")
    if row.state not in ACTIVE:
        raise StoreError(f"Alert {alert_id} is {row.state}: only pending and firing alerts are acknowledged.")
    return row


def _end_acknowledgement(session: Session, alert_id: int, author: str, at: float) -> bool:
    row = session.scalars(
        select(AcknowledgementRow).where(
            AcknowledgementRow.alert_id == alert_id, AcknowledgementRow.removed_at.is_(None)
        )
    ).one_or_none()
    if row is None:
        return False
    row.removed_at, row.removed_by = at, author
    session.flush()
    return True


def _tell(session: Session, row: AlertRow, kind: str, message: str, data: dict[str, object], at: float) -> None:
    session.add(EventRow(target=row.target, ts=at, kind=kind, severity="info", message=message, data=data))
    session.flush()


def _apply(session: Session, update: AlertUpdate) -> None:
    reading = update.reading
    row = session.scalars(
        select(AlertRow).where(
            AlertRow.rule == reading.rule, AlertRow.target == reading.target, AlertRow.state.in_(ACTIVE)
        )
    ).one_or_none()
    if reading.state == "inactive":
        if row is not None and row.firing_at is None:
            session.execute(delete(TransitionRow).where(TransitionRow.alert_id == row.id))
            session.delete(row)
        return
    if row is None:
        if reading.state == "resolved":
            return
        row = _new_alert(session, update)
    row.state = reading.state
    row.coverage = reading.coverage
    row.progress_s = update.progress_s
    row.updated_at = reading.updated_at
    if reading.verdict == "breach":
        row.value, row.numerator, row.denominator = reading.value, reading.numerator, reading.denominator
        row.summary = reading.summary
    for _, to_state in update.transitions:
        if to_state == "firing":
            row.firing_at = reading.updated_at
        if to_state == "resolved":
            row.resolved_at = reading.updated_at
    session.flush()
    for from_state, to_state in update.transitions:
        session.add(
            TransitionRow(
                alert_id=row.id,
                ts=reading.updated_at,
                from_state=from_state,
                to_state=to_state,
                value=reading.value,
            )
        )
        session.flush()  # ids follow the order of the changes
    states = [to_state for _, to_state in update.transitions if to_state in ("firing", "resolved")]
    if states:
        alert = cast("Alert", _get(session, row.id))
        for state in states:
            enqueue(session, alert, state, reading.updated_at)


def _new_alert(session: Session, update: AlertUpdate) -> AlertRow:
    reading = update.reading
    replay_id = session.scalars(
        select(ReplayRow.id)
        .where(ReplayRow.target == reading.target, ReplayRow.status.in_(ACTIVE_REPLAY))
        .order_by(ReplayRow.started_at.desc())
        .limit(1)
    ).one_or_none()
    row = AlertRow(
        rule=reading.rule,
        target=reading.target,
        severity=update.severity,
        threshold=reading.threshold,
        window_s=reading.window_s,
        hold_s=update.hold_s,
        summary=reading.summary,
        runbook=update.runbook,
        replay_id=replay_id,
        pending_at=reading.updated_at,
    )
    session.add(row)
    return row


def _alerts() -> Select[Any]:
    """Alerts with their target's engine and model, and the acknowledgement in force."""
    model = TargetRow.facts["model"].as_string()
    in_force = and_(AcknowledgementRow.alert_id == AlertRow.id, AcknowledgementRow.removed_at.is_(None))
    return (
        select(AlertRow, TargetRow.engine, model, AcknowledgementRow)
        .outerjoin(TargetRow, TargetRow.name == AlertRow.target)
        .outerjoin(AcknowledgementRow, in_force)
    )


_OWN_FIELDS = [f.name for f in dataclasses.fields(Alert) if f.name not in ("engine", "model", "acknowledgement")]


def _alert(found: Any) -> Alert:
    row, engine, model, ack = found
    acknowledgement = None if ack is None else _acknowledgement(ack)
    fields = {name: getattr(row, name) for name in _OWN_FIELDS}
    return Alert(**fields, engine=engine or "", model=model or "", acknowledgement=acknowledgement)


def _acknowledgement(row: AcknowledgementRow) -> Acknowledgement:
    return Acknowledgement(row.author, row.kind, row.reason, row.at)


def _reading(row: ReadingRow) -> Reading:
    return Reading(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Reading)})
