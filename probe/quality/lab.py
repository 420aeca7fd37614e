"""Measures arms on engines of its own: one embedded engine an arm, started, asked, stopped.

These engines are no targets and nobody watches them. Two arms are measured at a time where there are two cores, each
engine with its share of them: small models gain little from a second thread, and start-ups overlap with measurements.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.config import EngineConfig, apply_changes
from engine.supervisor import EngineSupervisor
from probe.quality.run import Progress, run_suite
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import QualityRun, Store

TARGET = "lab"
"""The target that runs of a lab are stored under."""
START_TIMEOUT_S = 300.0  # a GGUF model on a busy machine takes minutes
DEATH_SETTLES_S = 2.0
MOST_AT_ONCE = 2


@dataclass(frozen=True)
class Arm:
    """One configuration to measure: `flags` are changes to the lab's base flags (None: back to the default)."""

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)


class Lab:
    """Use as a context manager: leaving it stops what still runs."""

    def __init__(
        self, store: Store, base_flags: Sequence[str], *, log_dir: Path, progress: Progress | None = None
    ) -> None:
        self._store = store
        self._base_flags = list(base_flags)
        self._log_dir = log_dir
        self._progress = progress
        self._lock = threading.Lock()
        self._running: set[EngineSupervisor] = set()
        self._closed = False

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every engine and start no more; what is being measured ends as incomplete."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for supervisor in running:
            supervisor.stop()

    def measure(
        self,
        arm: Arm,
        spec: SuiteSpec,
        *,
        baseline: QualityRun | None = None,
        resume: QualityRun | None = None,
        text: str | None = None,
        threads: int | None = None,
    ) -> QualityRun:
        """Start the arm's engine, run the suite, stop it; `label` is the arm's name.

        `threads`: cores the engine may compute on (default: all). Raises `ConfigError` for flags that make no sense,
        `EngineStartError` and `QualityError`.
        """
        flags = self._flags(arm)
        name = "lab-" + re.sub(r"[^A-Za-z0-9._-]+", "-", arm.name)
        supervisor = EngineSupervisor(flags, log_dir=self._log_dir, name=name, threads=threads)
        with self._lock:
            self._running.add(supervisor)
        try:
            self._refuse_when_closed()
            supervisor.start(timeout_s=START_TIMEOUT_S)
            self._refuse_when_closed()
            api_key = EngineConfig.from_args(flags).api_key
            return self._ask(supervisor, arm, spec, api_key=api_key, baseline=baseline, resume=resume, text=text)
        finally:
            supervisor.stop()
            with self._lock:
                self._running.discard(supervisor)

    def measure_all(
        self,
        arms: Sequence[Arm],
        spec: SuiteSpec,
        *,
        baseline: QualityRun | None = None,
        text: str | None = None,
    ) -> Iterator[QualityRun]:
        """The arms' runs in order, as they are done. The first failure ends the rest; raises as `measure` does.

        A generator that is not read to its end closes the lab.
        """
        for arm in arms:
            self._flags(arm)  # nonsense is refused before anything starts
        cores = os.cpu_count() or 1
        workers = min(MOST_AT_ONCE, cores)
        with ThreadPoolExecutor(workers, thread_name_prefix="lab") as pool:
            runs = [
                pool.submit(self.measure, arm, spec, baseline=baseline, text=text, threads=cores // workers)
                for arm in arms
            ]
            try:
                for run in runs:
                    yield run.result()
            finally:
                if any(not run.done() for run in runs) or any(run.exception() for run in runs):
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.close()

    def _flags(self, arm: Arm) -> list[str]:
        return apply_changes(self._base_flags, arm.flags)

    def _refuse_when_closed(self) -> None:
        with self._lock:
            if self._closed:
                raise QualityError("the measurement was stopped")

    def _ask(self, supervisor: EngineSupervisor, arm: Arm, spec: SuiteSpec, **more: Any) -> QualityRun:
        try:
            return run_suite(
                self._store,
                str(supervisor.base_url),
                spec,
                target=TARGET,
                label=arm.name,
                patience_s=0.0,  # nobody restarts this engine
                progress=self._progress,
                **more,
            )
        except QualityError as error:
            death = _death(supervisor)
            raise QualityError(f"{death}; {error}" if death else str(error), error.run_id) from None


def _death(supervisor: EngineSupervisor) -> str | None:
    """How the engine ended, where it did; a death is noticed within moments of the connection's."""
    deadline = time.monotonic() + DEATH_SETTLES_S
    while supervisor.status().state == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = supervisor.status().last_exit
    return ended.message if ended else None
