"""Alerts with their transitions, and the newest reading of every rule. Written by the leading monitor only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

from sqlalchemy import Table, delete, select
from sqlalchemy.orm import Session

from probe.store.database import Database, upsert
from probe.store.leases import require_lease
from probe.store.models import AlertRow, ReadingRow, ReplayRow, TargetRow, TransitionRow
from probe.store.records import Alert, AlertUpdate, Lease, Reading
from probe.store.replays import ACTIVE as ACTIVE_REPLAY
from probe.store.writer import Writer

ACTIVE = ("pending", "firing")


class Alerts:
    """`store.alerts`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def active(self, target: str | None = None) -> list[Alert]:
        """Pending and firing alerts, oldest first."""
        query = select(AlertRow).where(AlertRow.state.in_(ACTIVE)).order_by(AlertRow.pending_at, AlertRow.id)
        if target is not None:
            query = query.where(AlertRow.target == target)
        with self._database.read() as session:
            return [_alert(row) for row in session.scalars(query)]

    def history(self, limit: int = 200, target: str | None = None) -> list[Alert]:
        """Alerts of any state, newest first. (A pending alert that cleared in time leaves nothing here.)"""
        query = select(AlertRow).order_by(AlertRow.pending_at.desc(), AlertRow.id.desc()).limit(limit)
        if target is not None:
            query = query.where(AlertRow.target == target)
        with self._database.read() as session:
            return [_alert(row) for row in session.scalars(query)]

    def get(self, alert_id: int) -> Alert | None:
        """The alert, or None."""
        with self._database.read() as session:
            row = session.get(AlertRow, alert_id)
            return _alert(row) if row else None

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


def _alert(row: AlertRow) -> Alert:
    return Alert(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Alert)})


def _reading(row: ReadingRow) -> Reading:
    return Reading(**{f.name: getattr(row, f.name) for f in dataclasses.fields(Reading)})
