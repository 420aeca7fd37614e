"""Replays and their journals. Every call is committed when it returns, so a crash loses nothing before it."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from probe.store.database import Database
from probe.store.models import JournalRow, ReplayRow
from probe.store.records import JournalEntry, Replay, StoreError
from probe.store.writer import Writer

ACTIVE = ("running", "waiting_apply")


class Replays:
    """`store.replays`."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer

    def create(self, scenario: str, target: str, options: dict[str, Any] | None = None) -> Replay:
        """A new replay, owned by this process, status "running"."""

        def work(session: Session) -> Replay:
            row = ReplayRow(
                id=uuid.uuid4().hex,
                scenario=scenario,
                target=target,
                status="running",
                step=None,
                options=options or {},
                result=None,
                started_at=time.time(),
                ended_at=None,
                owner_pid=os.getpid(),
                owner_host=socket.gethostname(),
                apply_requested=False,
            )
            session.add(row)
            session.flush()
            return _replay(row)

        return self._writer.call(work)

    def append(self, replay_id: str, step: str, message: str, data: dict[str, Any] | None = None) -> JournalEntry:
        """Add a line to the journal; its `seq` follows the last one."""

        def work(session: Session) -> JournalEntry:
            _require(session, replay_id)
            last = session.scalar(select(func.max(JournalRow.seq)).where(JournalRow.replay_id == replay_id))
            row = JournalRow(
                replay_id=replay_id, seq=(last or 0) + 1, ts=time.time(), step=step, message=message, data=data
            )
            session.add(row)
            session.flush()
            return _entry(row)

        return self._writer.call(work)

    def set_step(self, replay_id: str, step: str) -> None:
        """The step the replay is in."""
        self._change(replay_id, step=step)

    def set_status(self, replay_id: str, status: str) -> None:
        """running, waiting_apply, done, failed or interrupted."""
        self._change(replay_id, status=status)

    def set_target(self, replay_id: str, target: str) -> None:
        """Name the target once it is known (a drill engine is named after its replay)."""
        self._change(replay_id, target=target)

    def finish(self, replay_id: str, status: str, result: dict[str, Any] | None) -> None:
        """Close the replay with its result."""
        self._change(replay_id, status=status, result=result, ended_at=time.time())

    def request_apply(self, replay_id: str) -> None:
        """Ask the process that runs the replay to apply the remedy."""
        self._change(replay_id, apply_requested=True)

    def apply_requested(self, replay_id: str) -> bool:
        """Whether somebody asked to apply the remedy."""
        with self._database.read() as session:
            return _require(session, replay_id).apply_requested

    def get(self, replay_id: str) -> Replay | None:
        """The replay, or None."""
        with self._database.read() as session:
            row = session.get(ReplayRow, replay_id)
            return _replay(row) if row else None

    def journal(self, replay_id: str) -> list[JournalEntry]:
        """The journal in order."""
        query = select(JournalRow).where(JournalRow.replay_id == replay_id).order_by(JournalRow.seq)
        with self._database.read() as session:
            return [_entry(row) for row in session.scalars(query)]

    def mark_interrupted(self) -> list[Replay]:
        """Mark replays of this host as interrupted whose process is gone; returns those marked now."""

        def work(session: Session) -> list[Replay]:
            query = select(ReplayRow).where(ReplayRow.status.in_(ACTIVE), ReplayRow.owner_host == socket.gethostname())
            rows = [row for row in session.scalars(query) if not process_runs(row.owner_pid)]
            for row in rows:
                row.status = "interrupted"
                row.ended_at = time.time()
            return [_replay(row) for row in rows]

        return self._writer.call(work)

    def list(self, limit: int = 100) -> list[Replay]:
        """Newest first."""
        query = select(ReplayRow).order_by(ReplayRow.started_at.desc()).limit(limit)
        with self._database.read() as session:
            return [_replay(row) for row in session.scalars(query)]

    def _change(self, replay_id: str, **values: Any) -> None:
        def work(session: Session) -> None:
            row = _require(session, replay_id)
            for name, value in values.items():
                setattr(row, name, value)

        self._writer.call(work)


def process_runs(pid: int) -> bool:
    """Whether a process with this id runs on this host; a zombie (dead, not yet reaped) does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state != "Z"


def _require(session: Session, replay_id: str) -> ReplayRow:
    row = session.get(ReplayRow, replay_id)
    if row is None:
        raise StoreError(f"There is no replay {replay_id!r}.")
    return row


def _replay(row: ReplayRow) -> Replay:
    return Replay(
        id=row.id,
        scenario=row.scenario,
        target=row.target,
        status=row.status,
        step=row.step,
        options=dict(row.options),
        result=dict(row.result) if row.result is not None else None,
        started_at=row.started_at,
        ended_at=row.ended_at,
        owner_pid=row.owner_pid,
    )


def _entry(row: JournalRow) -> JournalEntry:
    return JournalEntry(seq=row.seq, ts=row.ts, step=row.step, message=row.message, data=row.data)
