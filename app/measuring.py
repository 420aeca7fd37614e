"""Measures cache formats in a thread, each on an engine of its own that nobody watches; one measurement at a time.

The first format is what the others are compared with. What was measured before a stop or a failure stays in the
store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from engine.config import ConfigError, apply_changes
from engine.supervisor import EngineStartError
from probe.quality.candidates import format_arms
from probe.quality.lab import Lab
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import Store, StoreError

LINES_KEPT = 200
# What decides the cache's format; a format is measured with the others of these at their defaults.
CACHE_FLAGS = ("--kv-cache-dtype", "--kv-cache-dtype-skip-layers", "--kv-cache-dtype-layers", "--calculate-kv-scales")
log = logging.getLogger("kvoncall.app")


@dataclass(frozen=True)
class MeasuringStatus:
    """`lines`: (time, what happened), oldest first. `problem` ended the last measurement early."""

    running: bool
    stopping: bool
    formats: tuple[str, ...]
    done: int
    lines: tuple[tuple[float, str], ...]
    problem: str | None


class Measuring:
    """Owns the thread; thread-safe."""

    def __init__(self, store: Store, log_dir: Path, quiet: Callable[[], AbstractContextManager[None]]) -> None:
        """`quiet` keeps other load off the processor while it is open."""
        self._store = store
        self._quiet = quiet
        self._log_dir = log_dir
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._formats: tuple[str, ...] = ()
        self._done = 0
        self._lines: list[tuple[float, str]] = []
        self._problem: str | None = None

    def run(self, base_flags: Sequence[str], formats: Sequence[str], spec: SuiteSpec) -> None:
        """Measures in the calling thread; never raises: `status().problem` says what went wrong."""
        with self._lock:
            self._formats, self._done, self._lines, self._problem = tuple(formats), 0, [], None
        try:
            with self._quiet():
                self._measure(base_flags, formats, spec)
        except (QualityError, EngineStartError, ConfigError, StoreError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("measuring formats failed")
            self._fail(f"Measuring failed: {type(error).__name__}: {error}")

    def start(self, base_flags: Sequence[str], formats: Sequence[str], spec: SuiteSpec) -> threading.Thread:
        """`run` in a thread of its own."""
        self._stop.clear()
        thread = threading.Thread(
            target=self.run, args=(list(base_flags), list(formats), spec), name="measure-formats", daemon=True
        )
        with self._lock:
            self._thread = thread
        thread.start()
        return thread

    def stop(self) -> None:
        """Ends the measurement after the format that is being measured."""
        self._stop.set()

    def status(self) -> MeasuringStatus:
        """Of the measurement under way, or of the last one."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            return MeasuringStatus(
                running, running and self._stop.is_set(), self._formats, self._done, tuple(self._lines), self._problem
            )

    def _measure(self, base_flags: Sequence[str], formats: Sequence[str], spec: SuiteSpec) -> None:
        first, *others = format_arms(formats)
        plain = apply_changes(list(base_flags), dict.fromkeys(CACHE_FLAGS))
        with Lab(self._store, plain, log_dir=self._log_dir, progress=self._note) as lab:
            baseline = lab.measure(first, spec)
            self._count()
            if self._stop.is_set():
                self._note("stopped; what was measured is kept")
                return
            for _ in lab.measure_all(others, spec, baseline=baseline):
                self._count()
                if self._stop.is_set():
                    self._note("stopped; what was measured is kept")
                    return

    def _note(self, line: str, *_: object) -> None:
        with self._lock:
            self._lines = [*self._lines[-LINES_KEPT:], (time.time(), line)]

    def _count(self) -> None:
        with self._lock:
            self._done += 1

    def _fail(self, message: str) -> None:
        with self._lock:
            self._problem = message
