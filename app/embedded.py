"""The engine process the app brings along: its supervisor, its row in the store and its background traffic.

Starting, stopping and restarting take seconds (the process loads torch), so they run one after another on a
thread of their own; pages only ask for them and watch `snapshot()`. Every change leaves an event in the store
with the reason the operator typed. The engine is not restarted by itself after a crash: that it died, and why,
is what the operator has to see.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.licence import accept, pending_notice
from engine.config import ConfigError, EngineConfig
from engine.supervisor import EngineExit, EngineStartError, EngineSupervisor, SupervisorStatus
from probe.load.background import BackgroundLoad, BackgroundStatus
from probe.replay.drill import exit_data
from probe.store import Store

NAME = "embedded"
START_TIMEOUT_S = 240.0  # a GGUF file is dequantized first: 50 s for 270M parameters on two busy cores
log = logging.getLogger("kvoncall.app")


@dataclass(frozen=True)
class EmbeddedSnapshot:
    """What a page shows about the process; `busy` names the change under way, `problem` the last failure."""

    status: SupervisorStatus
    busy: str | None
    problem: str | None
    load: BackgroundStatus | None


class EmbeddedEngine:
    """Owns one `EngineSupervisor` and the load against it. Thread-safe."""

    def __init__(self, store: Store, flags: Sequence[str], *, log_dir: Path, load_rps: float) -> None:
        """Raises `ConfigError` on flags the engine does not know."""
        EngineConfig.from_args(list(flags))
        self._store = store
        self._load_holds = 0
        self._busy: str | None = None
        self._problem: str | None = None
        self._lock = threading.RLock()
        self._jobs: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue()
        self.supervisor = EngineSupervisor(list(flags), log_dir=log_dir, name=NAME, on_exit=self._on_exit)
        self._load = BackgroundLoad(self._load_url, rate=load_rps) if load_rps > 0 else None
        self._worker = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
        self._worker.start()

    # What pages ask for.

    def start(self, reason: str, flags: Sequence[str] | None = None) -> None:
        """Starts the process (with new flags, if given); raises `ConfigError` when they are wrong."""
        self._change("starting", "engine_start", reason, flags)

    def restart(self, reason: str, flags: Sequence[str] | None = None) -> None:
        """Restarts the process (with new flags, if given); raises `ConfigError` when they are wrong."""
        self._change("restarting", "engine_restart", reason, flags)

    def stop(self, reason: str) -> None:
        """Stops the process and its traffic."""
        self._jobs.put(("stopping", lambda: self._stop(reason)))

    def hold_load(self) -> None:
        """Pauses the background traffic until `release_load`; calls nest."""
        with self._lock:
            self._load_holds += 1
            if self._load is not None:
                self._load.pause()

    def release_load(self) -> None:
        """Ends one `hold_load`."""
        with self._lock:
            self._load_holds = max(0, self._load_holds - 1)
            if self._load is not None and self._load_holds == 0:
                self._load.resume()

    def pending_notice(self) -> str | None:
        """The licence notice that the operator has to accept before the model is used; None when there is none."""
        return pending_notice(self._store, self.supervisor.status().flags)

    def accept_notice(self) -> None:
        """Keeps that the operator accepted it; the background traffic starts."""
        text = self.pending_notice()
        if text is not None:
            accept(self._store, NAME, text)

    def snapshot(self) -> EmbeddedSnapshot:
        """State of the process, of a change under way and of the load."""
        with self._lock:
            load = self._load.status() if self._load is not None else None
            return EmbeddedSnapshot(self.supervisor.status(), self._busy, self._problem, load)

    def close(self) -> None:
        """Stops load and process; returns when both are gone."""
        self._jobs.put(None)
        if self._load is not None:
            self._load.stop()
        if self.supervisor.status().state == "running":
            self._stop("the app was stopped")
        self.supervisor.stop()
        self._worker.join(timeout=30)

    # The worker.

    def _change(self, what: str, kind: str, reason: str, flags: Sequence[str] | None) -> None:
        new = None if flags is None else list(flags)
        if new is not None:
            EngineConfig.from_args(new)
        self._jobs.put((what, lambda: self._bring_up(kind, reason, new)))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, act = job
            with self._lock:
                self._busy, self._problem = what, None
            try:
                act()
            except (EngineStartError, ConfigError) as error:
                self._fail(str(error))
            except Exception as error:
                log.exception("%s the embedded engine failed", what)
                self._fail(f"{what} the engine failed: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._busy = None
                self._jobs.task_done()

    def _fail(self, message: str) -> None:
        with self._lock:
            self._problem = message

    def _bring_up(self, kind: str, reason: str, flags: list[str] | None) -> None:
        """The target is registered even when the start fails: an engine that is down has to be seen."""
        if flags is not None:
            self._note_flags(flags, reason)
        try:
            if kind == "engine_start" and flags is None:
                self.supervisor.start(START_TIMEOUT_S)
            else:
                self.supervisor.restart(flags, START_TIMEOUT_S)
        finally:
            self._register(self.supervisor.status())
        status = self.supervisor.status()
        self._store.events.add(NAME, kind, reason, data={"flags": list(status.flags), "pid": status.pid})
        if self._load is not None:
            self._load.start()

    def _stop(self, reason: str) -> None:
        """The event comes first: whoever watches then knows that the engine is missing on purpose."""
        self._store.events.add(NAME, "engine_exit", f"stopped on purpose: {reason}", data={"reason": "stopped"})
        self.supervisor.stop()

    def _note_flags(self, flags: list[str], reason: str) -> None:
        before = self.supervisor.status().flags
        self._store.events.add(
            NAME, "flags_changed", reason, data={"from": list(before), "to": flags, "reason": reason}
        )

    def _register(self, status: SupervisorStatus) -> None:
        if status.base_url is not None:
            flags = list(status.flags)
            self._store.targets.upsert(NAME, url=status.base_url, kind="embedded", engine="kvoncall", flags=flags)

    def _load_url(self) -> str | None:
        status = self.supervisor.status()
        if status.state != "running" or self.pending_notice() is not None:
            return None
        return status.base_url

    def _on_exit(self, exit_: EngineExit) -> None:
        """Called by the supervisor's thread when the process ended by itself or by `stop`."""
        if exit_.reason == "stopped":
            return
        data = {**exit_data(exit_), "log_tail": list(exit_.log_tail)}
        self._store.events.add(NAME, "engine_exit", exit_.message, severity="critical", data=data, ts=exit_.at)
