"""Runs the isolation probe against one target in a thread, one round at a time; the round is kept in the store.

A round that is stopped says so: it can still show a leak, but no longer that there is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from probe.isolation.client import ProbeError
from probe.isolation.options import IsolationOptions
from probe.isolation.probe import run_isolation
from probe.isolation.record import record
from probe.store import Store, StoreError, Target

LINES_KEPT = 200
log = logging.getLogger("kvoncall.app")


@dataclass(frozen=True)
class IsolatingStatus:
    """`lines`: (time, what happened), oldest first. `problem` is how the last round failed."""

    running: bool
    stopping: bool
    target: str | None
    lines: tuple[tuple[float, str], ...]
    problem: str | None


class Isolating:
    """Owns the thread; thread-safe."""

    def __init__(self, store: Store, quiet: Callable[[], AbstractContextManager[None]]) -> None:
        """`quiet` keeps other load off the processor while it is open: the probe reads times."""
        self._store = store
        self._quiet = quiet
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._target: str | None = None
        self._lines: list[tuple[float, str]] = []
        self._problem: str | None = None

    def run(self, target: Target, options: IsolationOptions, api_key: str | None = None) -> None:
        """One round in the calling thread; never raises: `status().problem` says what went wrong."""
        with self._lock:
            self._target, self._lines, self._problem = target.name, [], None
        try:
            with self._quiet():
                result = run_isolation(
                    target.url, options, target=target.name, api_key=api_key, progress=self._note,
                    cancelled=self._stop.is_set,
                )  # fmt: skip
            record(self._store, target.name, result)
            self._note(result.sentence)
        except (ProbeError, StoreError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("probing isolation failed")
            self._fail(f"The probe failed: {type(error).__name__}: {error}")

    def start(self, target: Target, options: IsolationOptions, api_key: str | None = None) -> threading.Thread:
        """`run` in a thread of its own."""
        self._stop.clear()
        thread = threading.Thread(target=self.run, args=(target, options, api_key), name="probe-isolation", daemon=True)
        with self._lock:
            self._thread = thread
        thread.start()
        return thread

    def stop(self) -> None:
        """Ends the round after the request under way."""
        self._stop.set()

    def status(self) -> IsolatingStatus:
        """Of the round under way, or of the last one."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            stopping = running and self._stop.is_set()
            return IsolatingStatus(running, stopping, self._target, tuple(self._lines), self._problem)

    def _note(self, line: str) -> None:
        with self._lock:
            self._lines = [*self._lines[-LINES_KEPT:], (time.time(), line)]

    def _fail(self, message: str) -> None:
        with self._lock:
            self._problem = message
