"""The engine of one replay: a process of its own, registered as a target, stopped whatever happens.

Its exits become `engine_exit` events of the store, which is what the `oom` rule reads.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from engine.config import apply_changes
from engine.supervisor import EngineExit, EngineSupervisor
from probe.load.endpoint import Endpoint, describe
from probe.store import Store

START_TIMEOUT_S = 60.0


class DrillEngine:
    """One supervised engine process and its target row."""

    what = "drill engine"
    opening = "starting a drill engine"
    api_key: str | None = None

    def __init__(
        self,
        store: Store,
        name: str,
        flags: list[str],
        *,
        log_dir: Path,
        time_scale: float,
        scrape_interval_s: float,
        threads: int | None = None,
    ) -> None:
        self._store = store
        self._time_scale = time_scale
        self._scrape_interval_s = scrape_interval_s
        self._exits: list[EngineExit] = []
        self._registered = False
        self.name = name
        self.flags = list(flags)
        self._supervisor = EngineSupervisor(
            self.flags, log_dir=log_dir, name=name, on_exit=self._on_exit, threads=threads
        )

    @property
    def base_url(self) -> str:
        """Where the engine listens."""
        return str(self._supervisor.base_url)

    def start(self) -> Endpoint:
        """Starts the process, registers the target, returns what it serves; raises `EngineStartError`."""
        self._supervisor.start(timeout_s=START_TIMEOUT_S)
        endpoint = self._register()
        self._store.events.add(self.name, "engine_start", "drill engine started", data={"flags": self.flags})
        return endpoint

    def changed(self, changes: Mapping[str, Any]) -> list[str]:
        """Its command line with these flags changed; raises `ConfigError`."""
        return apply_changes(self.flags, changes)

    def why_not_restarted(self, flags: list[str]) -> None:
        """Nothing speaks against it: the engine is the replay's own."""

    def restart(self, flags: list[str]) -> Endpoint:
        """Stops the process if it still runs and starts it with `flags`; raises `EngineStartError`."""
        # Announced first: a scrape may meet the new process before `restart` returns.
        data = {"flags": flags, "unexpected": False}
        self._store.events.add(self.name, "engine_restart", "drill engine restarted by the replay", data=data)
        if flags != self.flags:
            self._store.events.add(self.name, "flags_changed", " ".join(flags), data={"flags": flags})
        self.flags = list(flags)
        self._supervisor.restart(self.flags, timeout_s=START_TIMEOUT_S)
        return self._register()

    def _register(self) -> Endpoint:
        # Asked before the target is watched: a broken engine then leaves no half-known target behind.
        endpoint = describe(self.base_url)
        self._store.targets.upsert(
            self.name,
            url=self.base_url,
            kind="drill",
            engine="kvoncall",
            flags=self.flags,
            scrape_interval_s=self._scrape_interval_s,
            time_scale=self._time_scale,
        )
        self._registered = True
        return endpoint

    def facts(self) -> dict[str, Any]:
        """The engine's own account of itself: flags in force, model dimensions, memory plan."""
        response = httpx.get(f"{self.base_url}/debug/engine", timeout=10.0, trust_env=False)
        response.raise_for_status()
        facts: dict[str, Any] = response.json()
        return facts

    def freeze(self) -> None:
        """Stops the process where it stands (SIGSTOP): its port takes connections and answers nothing."""
        pid = self._supervisor.status().pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)

    def exits_since(self, ts: float) -> list[dict[str, Any]]:
        """Unasked exits from `ts` on, as JSON-ready data, oldest first."""
        return [exit_data(e) for e in self._exits if e.at >= ts and e.reason != "stopped"]

    def close(self) -> None:
        """Takes the target out of the watch (a wanted end is no missing target), then stops the process."""
        try:
            if self._registered:
                self._store.targets.deactivate(self.name)
        finally:
            self._supervisor.stop()

    def _on_exit(self, exit_: EngineExit) -> None:
        self._exits.append(exit_)
        if self._registered:
            severity = "info" if exit_.reason == "stopped" else "critical"
            data = exit_data(exit_)
            self._store.events.add(self.name, "engine_exit", exit_.message, severity=severity, data=data, ts=exit_.at)


def exit_data(exit_: EngineExit) -> dict[str, Any]:
    """An exit as JSON-ready data, with the failed allocation's size where the log names one."""
    return {
        "code": exit_.code,
        "reason": exit_.reason,
        "message": exit_.message,
        "uptime_s": round(exit_.uptime_s, 1),
        "at": exit_.at,
        "allocation_bytes": allocation_bytes(exit_.message),
    }


_ALLOCATION = re.compile(r"allocate (\d+(?:\.\d+)?) ?(bytes|[KMG]i?B)?", re.IGNORECASE)
_UNIT = {"bytes": 1, "kib": 2**10, "kb": 2**10, "mib": 2**20, "mb": 2**20, "gib": 2**30, "gb": 2**30}


def allocation_bytes(message: str) -> int | None:
    """Size of the allocation an out-of-memory message names; None when it names none."""
    match = _ALLOCATION.search(message)
    return int(float(match[1]) * _UNIT[(match[2] or "bytes").lower()]) if match else None
