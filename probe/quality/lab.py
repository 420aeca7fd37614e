"""Measures arms on engines of its own: one embedded engine an arm, started, asked, stopped.

These engines are no targets and nobody watches them. At most one more engine than the measured one runs: the next
arm's, so that its start-up overlaps the present measurement.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Arm:
    """One configuration to measure: `flags` are changes to the lab's base flags (None: back to the default)."""

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)


class _Start:
    """An engine on its way up, in a thread of its own."""

    def __init__(self, arm: Arm, supervisor: EngineSupervisor, api_key: str | None) -> None:
        self.arm = arm
        self.api_key = api_key
        self.supervisor = supervisor
        self._abandoned = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"start-{arm.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._abandoned:
            return
        try:
            self.supervisor.start(timeout_s=START_TIMEOUT_S)
        except BaseException as error:
            self._error = error

    def wait(self) -> str:
        """The engine's address once it answers; raises what its start raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return str(self.supervisor.base_url)

    def death(self) -> str | None:
        """How the engine ended, where it did; a death is noticed within moments of the connection's."""
        deadline = time.monotonic() + DEATH_SETTLES_S
        while self.supervisor.status().state == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = self.supervisor.status().last_exit
        return ended.message if ended else None

    def stop(self) -> None:
        self._abandoned = True
        self.supervisor.stop()  # interrupts a start
        self._thread.join()
        self.supervisor.stop()  # of a start that began after the first one


class Lab:
    """Use as a context manager: leaving it stops what still runs."""

    def __init__(
        self, store: Store, base_flags: Sequence[str], *, log_dir: Path, progress: Progress | None = None
    ) -> None:
        self._store = store
        self._base_flags = list(base_flags)
        self._log_dir = log_dir
        self._progress = progress
        self._prepared: _Start | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def prepare(self, arm: Arm) -> None:
        """Begin to start the engine of the arm to be measured next; returns at once.

        Raises `ConfigError` for flags that make no sense. An engine prepared before and not measured is stopped.
        """
        if self._prepared is not None and self._prepared.arm == arm:
            return
        self._discard()
        self._prepared = self._start(arm)

    def measure(
        self,
        arm: Arm,
        spec: SuiteSpec,
        *,
        baseline: QualityRun | None = None,
        resume: QualityRun | None = None,
        text: str | None = None,
        following: Arm | None = None,
    ) -> QualityRun:
        """Start the arm's engine (or take the prepared one), run the suite, stop it; `label` is the arm's name.

        `following`: prepare this arm meanwhile. Raises `ConfigError`, `EngineStartError` and `QualityError`.
        """
        if self._prepared is not None and self._prepared.arm == arm:
            start, self._prepared = self._prepared, None
        else:
            start = self._start(arm)
        try:
            url = start.wait()
            if following is not None:
                self.prepare(following)
            return self._ask(start, url, arm, spec, baseline=baseline, resume=resume, text=text)
        finally:
            start.stop()

    def _ask(self, start: _Start, url: str, arm: Arm, spec: SuiteSpec, **more: Any) -> QualityRun:
        try:
            return run_suite(
                self._store,
                url,
                spec,
                target=TARGET,
                label=arm.name,
                api_key=start.api_key,
                patience_s=0.0,  # nobody restarts this engine
                progress=self._progress,
                **more,
            )
        except QualityError as error:
            death = start.death()
            raise QualityError(f"{death}; {error}" if death else str(error), error.run_id) from None

    def _start(self, arm: Arm) -> _Start:
        flags = apply_changes(self._base_flags, arm.flags)
        name = "lab-" + re.sub(r"[^A-Za-z0-9._-]+", "-", arm.name)
        supervisor = EngineSupervisor(flags, log_dir=self._log_dir, name=name)
        return _Start(arm, supervisor, EngineConfig.from_args(flags).api_key)

    def _discard(self) -> None:
        if self._prepared is not None:
            self._prepared.stop()
            self._prepared = None
