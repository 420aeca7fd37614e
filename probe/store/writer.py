"""The one thread of a process that writes to the store.

Samples are handed over without waiting and written in batches; everything else is a call that runs in a
transaction of its own and whose result (or `StoreError`) comes back to the caller. A batch that cannot be
written stays in memory and is tried again; the trouble shows in `notice` at once and as a `store_error` event
once writing works again. Invariant: a sample leaves memory only after its transaction committed, or is
counted in the event that says how many were lost and why.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from sqlalchemy import Connection, Table, exc, select
from sqlalchemy.orm import Session

from probe.store.database import Database, upsert
from probe.store.models import EventRow, SeriesRow
from probe.store.raw import insert_samples, is_counter, note_newest
from probe.store.records import StoreError

BATCH_DELAY_S = 0.2
BATCH_ROWS = 20_000
MAX_PENDING_ROWS = 500_000
RETRY_S = (0.5, 1.0, 2.0, 5.0)

log = logging.getLogger("kvoncall.store")
T = TypeVar("T")


class SeriesKey(NamedTuple):
    """What makes a series: `labels` is canonical JSON."""

    target_id: int
    metric: str
    labels: str


class PendingSample(NamedTuple):
    """A sample on its way: `ts_ms` integer milliseconds; `kept` False: only remembered as the newest of its series."""

    series: SeriesKey
    ts_ms: int
    value: float
    kept: bool = True


@dataclass
class _Call:
    work: Callable[[Session], Any]
    done: Future[Any]
    flush: bool = False


@dataclass
class _Trouble:
    """Writes of samples failing since `since` (Unix seconds)."""

    since: float
    sentence: str
    attempts: int = 0
    lost: int = 0


class Writer:
    """Owns the write side of a `Database` until `close`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[list[PendingSample] | _Call | None] = queue.SimpleQueue()
        self._pending: list[PendingSample] = []
        self._series: dict[SeriesKey, int] = {}
        self._trouble: _Trouble | None = None
        self._next_write = float("inf")
        self._closed = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvoncall-store-writer", daemon=True)
        self._thread.start()

    @property
    def notice(self) -> str | None:
        """What is wrong with writing right now, or None."""
        trouble = self._trouble
        return trouble.sentence if trouble else None

    def add(self, samples: list[PendingSample]) -> None:
        """Queue samples; returns at once."""
        if samples:
            self._put(samples)

    def call(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a write transaction on the writer thread and return its result."""
        future: Future[Any] = Future()
        self._put(_Call(work, future))
        return cast("T", future.result())

    def flush(self) -> None:
        """Return once every sample added before is committed; raises `StoreError` if that fails."""
        future: Future[Any] = Future()
        self._put(_Call(lambda _session: None, future, flush=True))
        future.result()

    def close(self) -> None:
        """Write what is pending and end the thread; raises `StoreError` if samples could not be written."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        if self._pending:
            raise StoreError(f"{len(self._pending)} samples were not written: {self.notice}")

    def _put(self, item: list[PendingSample] | _Call) -> None:
        with self._close_lock:  # nothing may be queued behind the end marker
            if self._closed:
                raise StoreError("The store is closed.")
            self._queue.put(item)

    def _run(self) -> None:
        while True:
            calls, closing = self._collect()
            flushing = [call for call in calls if call.flush]
            due = time.monotonic() >= self._next_write
            if (self._pending or self._trouble) and (due or flushing or closing or self._batch_is_full()):
                self._write_pending()
            for call in calls:
                self._answer(call)
            if closing:
                return

    def _batch_is_full(self) -> bool:
        return len(self._pending) >= BATCH_ROWS and self._trouble is None

    def _collect(self) -> tuple[list[_Call], bool]:
        """Wait for work, then take all that is queued: samples into `_pending`, calls to the caller."""
        calls: list[_Call] = []
        wait = None if self._next_write == float("inf") else max(0.0, self._next_write - time.monotonic())
        try:
            item = self._queue.get(timeout=wait)
            while True:
                if item is None:
                    return calls, True
                if isinstance(item, _Call):
                    calls.append(item)
                else:
                    self._hold(item)
                    if self._batch_is_full():
                        break
                item = self._queue.get_nowait()
        except queue.Empty:
            pass
        return calls, False

    def _hold(self, samples: list[PendingSample]) -> None:
        self._pending.extend(samples)
        self._next_write = min(self._next_write, time.monotonic() + BATCH_DELAY_S)
        excess = len(self._pending) - MAX_PENDING_ROWS
        if excess > 0 and self._trouble:
            del self._pending[:excess]
            self._trouble.lost += excess

    def _answer(self, call: _Call) -> None:
        try:
            if call.flush and self._trouble:
                raise StoreError(self._trouble.sentence)
            if call.flush:
                call.done.set_result(None)
                return
            with self._database.errors(), Session(self._database.writers) as session, session.begin():
                result = call.work(session)
            call.done.set_result(result)
        except BaseException as error:
            call.done.set_exception(error)

    def _write_pending(self) -> None:
        try:
            try:
                self._commit_pending()
            except exc.IntegrityError:
                self._series.clear()  # retention, here or in another process, may have removed series
                self._commit_pending()
        except Exception as error:
            self._failed(error)

    def _commit_pending(self) -> None:
        with self._database.writers.begin() as connection:
            found = self._write(connection, self._pending)
            if self._trouble:
                _report(connection, self._trouble, late=len(self._pending))
        self._series.update(found)
        self._pending = []
        self._trouble = None
        self._next_write = float("inf")

    def _write(self, connection: Connection, batch: list[PendingSample]) -> dict[SeriesKey, int]:
        """Write the batch; returns the series ids learned, to be kept once this is committed."""
        found: dict[SeriesKey, int] = {}
        known = self._series
        missing = {sample.series for sample in batch if sample.series not in known}
        if missing:
            found = _register_series(connection, missing)
            known = known | found
        # The last value wins where a series has two at one time; one statement may not touch a row twice.
        kept: dict[tuple[int, int], float] = {}
        newest: dict[int, tuple[int, float]] = {}
        for series, ts_ms, value, is_kept in batch:
            series_id = known[series]
            if is_kept:
                kept[series_id, ts_ms] = value
            before = newest.get(series_id)
            if before is None or ts_ms >= before[0]:
                newest[series_id] = (ts_ms, value)
        if kept:
            insert_samples(connection, kept)
        note_newest(connection, newest)
        return found

    def _failed(self, error: Exception) -> None:
        sentence = self._database.sentence(error)
        if self._trouble is None:
            self._trouble = _Trouble(since=time.time(), sentence=sentence)
            log.warning("%s Keeping %d samples and trying again.", sentence, len(self._pending))
        trouble = self._trouble
        trouble.sentence = sentence
        trouble.attempts += 1
        if not isinstance(error, exc.OperationalError) and trouble.attempts > 1:
            # The database works but refuses these rows; trying for ever would block all later ones.
            log.error("%s %d samples are lost.", sentence, len(self._pending))
            trouble.lost += len(self._pending)
            self._pending = []
        self._next_write = time.monotonic() + RETRY_S[min(trouble.attempts, len(RETRY_S)) - 1]


def _register_series(connection: Connection, keys: set[SeriesKey]) -> dict[SeriesKey, int]:
    table = cast("Table", SeriesRow.__table__)
    rows = [{"target_id": t, "metric": m, "labels": lb, "counter": is_counter(m)} for t, m, lb in sorted(keys)]
    upsert(connection, table, rows, key=("target_id", "metric", "labels"), keep=True)
    query = select(SeriesRow.target_id, SeriesRow.metric, SeriesRow.labels, SeriesRow.id).where(
        SeriesRow.target_id.in_({key.target_id for key in keys})
    )
    return {SeriesKey(t, m, labels): series_id for t, m, labels, series_id in connection.execute(query)}


def _report(connection: Connection, trouble: _Trouble, *, late: int) -> None:
    lasted = time.time() - trouble.since
    message = f"Samples could not be written for {lasted:.1f} s: {trouble.sentence}"
    message += f" {late} were written late, {trouble.lost} were lost."
    connection.execute(
        cast("Table", EventRow.__table__).insert(),
        {
            "target": None,
            "ts": time.time(),
            "kind": "store_error",
            "severity": "error" if trouble.lost else "warning",
            "message": message,
            "data": {"lasted_s": lasted, "late": late, "lost": trouble.lost, "attempts": trouble.attempts},
        },
    )
