"""Starts, watches and restarts one engine process; outlives every way it can die. No torch here.

The child's stderr is a file, not a pipe, so a slow reader cannot block it and its last words survive.
Its stdin is a pipe that nobody writes to: when this process dies, however it dies, the pipe ends and the child
exits. A watcher thread per child waits on it, so there are no zombies and a death is noticed at once.
`start`, `stop` and `restart` may come from any thread; they run one at a time, but `stop` interrupts a start.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig

log = logging.getLogger("engine.supervisor")

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
KEPT_LOGS = 5
HEALTH_POLL_S = 0.05
STOP_TIMEOUT_S = 8.0  # SIGTERM to SIGKILL; the server gives its requests 3 s
PORT_RETRIES = 5
RESTART_DELAY_S = 1.0  # doubles with each restart in the window
MAX_RESTARTS = 3
RESTART_WINDOW_S = 300.0
# What allocators write when they abort or raise past engine.server: Rust, C++, torch, Python.
OUT_OF_MEMORY = re.compile(r"memory allocation of \d+ bytes failed|std::bad_alloc|can't allocate memory|MemoryError")
REASONS = {0: "stopped", 2: "config", 3: "port", 12: "oom"}  # by the exit codes of engine.server


@dataclass(frozen=True)
class EngineExit:
    """One end of an engine process. `code` is the exit status, negative for a signal."""

    code: int
    reason: str  # oom, killed, config, port, error or stopped
    message: str  # one sentence
    log_tail: tuple[str, ...]
    at: float  # Unix time
    uptime_s: float


@dataclass(frozen=True)
class SupervisorStatus:
    """A consistent view of a supervisor."""

    state: str  # stopped, starting, running, crashed or stopping
    pid: int | None
    base_url: str | None
    flags: tuple[str, ...]
    started_at: float | None  # Unix time of the present or last process
    restarts: int  # automatic ones, since the last explicit start
    last_exit: EngineExit | None


class EngineStartError(RuntimeError):
    """The engine did not come up; `exit` says how it ended."""

    def __init__(self, engine_exit: EngineExit) -> None:
        super().__init__(engine_exit.message)
        self.exit = engine_exit


@dataclass(eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    port: int
    started_at: float
    log_file: Path
    exited: threading.Event
    exit: EngineExit | None = None
    stop_asked: bool = False
    verdict: EngineExit | None = None  # set before killing a child that did not come up


class EngineSupervisor:
    """Owns one engine process. `on_exit` is told every end of it, asked for or not, from a watcher thread.

    The port is the one in `flags`, or a free one that is kept over restarts. With `auto_restart` an engine
    that dies unasked is started again, after 1, 2, 4 s, at most 3 times in 5 minutes. `threads`: how many it computes
    with (default: one a core).
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log_dir: Path,
        name: str = "embedded",
        on_exit: Callable[[EngineExit], None] | None = None,
        auto_restart: bool = False,
        threads: int | None = None,
    ) -> None:
        self._threads = threads
        self._flags = tuple(flags)
        self._log_file = Path(log_dir) / f"{name}.log"
        self._name = name
        self._on_exit = on_exit
        self._auto_restart = auto_restart
        self._operation = threading.RLock()  # one start, stop or restart at a time
        self._lock = threading.Lock()  # guards what follows
        self._state = "stopped"
        self._child: _Child | None = None
        self._port: int | None = None
        self._last_exit: EngineExit | None = None
        self._started_at: float | None = None
        self._restarts = 0
        self._restart_times: deque[float] = deque()
        self._cancel = threading.Event()  # set while a stop waits for its turn

    @property
    def base_url(self) -> str | None:
        """Where the engine listens, `None` before the first start."""
        return None if self._port is None else f"http://{_address(self._flags)}:{self._port}"

    @property
    def log_file(self) -> Path:
        """The present process's stderr; older ones are `.log.1`, `.log.2`, ..."""
        return self._log_file

    def status(self) -> SupervisorStatus:
        with self._lock:
            alive = self._child is not None and self._state in ("starting", "running", "stopping")
            return SupervisorStatus(
                state=self._state,
                pid=self._child.process.pid if alive and self._child else None,
                base_url=self.base_url,
                flags=self._flags,
                started_at=self._started_at,
                restarts=self._restarts,
                last_exit=self._last_exit,
            )

    def start(self, timeout_s: float = 90.0) -> None:
        """Starts the engine and returns when it answers `/health`; does nothing when it runs already.

        Raises `EngineStartError` when it exits, does not come up in time, or is stopped meanwhile, and
        `ConfigError` for flags that cannot be parsed.
        """
        with self._operation:
            if self.status().state == "running":
                return
            self._cancel.clear()
            with self._lock:
                self._restarts = 0
                self._restart_times.clear()
            self._start(timeout_s)

    def stop(self) -> None:
        """Ends the engine: SIGTERM, then SIGKILL. Returns when it is gone; does nothing when there is none."""
        self._cancel.set()
        with self._operation:
            with self._lock:
                child = self._child
                if child is not None and not child.exited.is_set():
                    child.stop_asked = True
                    self._state = "stopping"
                else:
                    self._state = "stopped"
            if child is not None:
                self._end(child)

    def restart(self, flags: Sequence[str] | None = None, timeout_s: float = 90.0) -> None:
        """Stops the engine and starts it with other flags (`None`: the same ones); raises as `start`."""
        with self._operation:
            self.stop()
            if flags is not None:
                with self._lock:
                    self._flags = tuple(flags)
                    given = _given_port(self._flags)
                    self._port = given if given is not None else self._port
            self.start(timeout_s)

    # Starting. The caller holds _operation.

    def _start(self, timeout_s: float) -> None:
        given_port = _given_port(self._flags)
        deadline = time.monotonic() + timeout_s
        attempt = 0
        while True:
            with self._lock:
                self._port = given_port if given_port is not None else self._port or _free_port(self._flags)
                port = self._port
            try:
                self._start_on(port, deadline, timeout_s)
                return
            except EngineStartError as error:
                attempt += 1
                if error.exit.reason != "port" or given_port is not None or attempt > PORT_RETRIES:
                    raise
                log.warning("%s: port %d was taken, trying another", self._name, port)
                with self._lock:
                    self._port = None

    def _start_on(self, port: int, deadline: float, timeout_s: float) -> None:
        child = self._spawn(port)
        while not child.exited.wait(HEALTH_POLL_S):
            if self._cancel.is_set():
                self._give_up(child, "stopped", "the engine was stopped while it was starting")
            elif time.monotonic() > deadline:
                self._give_up(child, "error", f"the engine did not answer /health within {timeout_s:g} s")
            elif _is_healthy(_address(self._flags), port, child.process.pid):
                with self._lock:
                    if not child.exited.is_set():
                        self._state = "running"
                        return
        assert child.exit is not None
        raise EngineStartError(child.exit)

    def _give_up(self, child: _Child, reason: str, message: str) -> None:
        child.verdict = EngineExit(0, reason, message, (), 0.0, 0.0)
        self._end(child)

    def _spawn(self, port: int) -> _Child:
        _rotate(self._log_file)
        with self._log_file.open("wb") as log_stream:
            process = subprocess.Popen(
                self._command(port),
                stdin=subprocess.PIPE,
                stdout=log_stream,
                stderr=subprocess.STDOUT,
                env=_environment(self._threads),
                start_new_session=True,  # Ctrl-C in the parent's terminal is the parent's to handle
            )
        child = _Child(process, port, time.time(), self._log_file, threading.Event())
        with self._lock:
            self._child = child
            self._state = "starting"
            self._started_at = child.started_at
        threading.Thread(target=self._watch, args=(child,), name=f"{self._name}-watch", daemon=True).start()
        return child

    def _command(self, port: int) -> list[str]:
        """What is started; the later --port wins over one in the flags."""
        return [sys.executable, "-m", "engine.server", *self._flags, "--port", str(port), "--exit-with-parent"]

    def _end(self, child: _Child) -> None:
        for kill, timeout_s in ((child.process.terminate, STOP_TIMEOUT_S), (child.process.kill, None)):
            if child.exited.is_set():
                return
            kill()
            child.exited.wait(timeout_s)

    # Watching. One thread per child.

    def _watch(self, child: _Child) -> None:
        code = child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()
        with self._lock:
            child.exit = _describe_exit(child, code)
            self._last_exit = child.exit
            was_running = self._state == "running"
            asked = child.exit.reason == "stopped"
            if self._child is child:
                self._state = "stopped" if asked else "crashed"
            child.exited.set()
        log.log(logging.INFO if asked else logging.ERROR, "%s: %s", self._name, child.exit.message)
        if self._on_exit is not None:
            try:
                self._on_exit(child.exit)
            except Exception:
                log.exception("%s: on_exit failed", self._name)
        if self._auto_restart and was_running and not asked:
            self._restart_after_crash(child)

    def _restart_after_crash(self, child: _Child) -> None:
        """Tries until the engine runs, somebody else acts, or the limit is reached."""
        while True:
            with self._lock:
                now = time.monotonic()
                while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
                    self._restart_times.popleft()
                if len(self._restart_times) >= MAX_RESTARTS:
                    log.error("%s: restarted %d times in 5 minutes, giving up", self._name, MAX_RESTARTS)
                    return
                delay_s = RESTART_DELAY_S * 2 ** len(self._restart_times)
                self._restart_times.append(now)
            if self._cancel.wait(delay_s):
                return
            with self._operation:
                with self._lock:
                    if self._child is not child or self._state != "crashed" or self._cancel.is_set():
                        return
                    self._restarts += 1
                try:
                    self._start(timeout_s=90.0)
                    return
                except EngineStartError:
                    with self._lock:
                        assert self._child is not None
                        child = self._child


def _describe_exit(child: _Child, code: int) -> EngineExit:
    at = time.time()
    tail = read_tail(child.log_file)
    if child.verdict is not None:
        reason, message = child.verdict.reason, child.verdict.message
    elif child.stop_asked:
        reason, message = "stopped", "the engine was stopped"
    elif code in (-signal.SIGKILL, -signal.SIGTERM):
        reason, message = "killed", _killed_by(-code)
    else:
        reason = REASONS.get(code, "error")
        message = _last_words(tail, reason, code)
        if reason == "error" and (found := OUT_OF_MEMORY.search("\n".join(tail))):
            reason, message = "oom", f"engine died: out of memory: {found[0]}"
    return EngineExit(code, reason, message, tail, at, at - child.started_at)


def _killed_by(signum: int) -> str:
    if signum == signal.SIGKILL:
        return "killed by SIGKILL: the kernel's OOM killer or an operator"
    return f"killed by {signal.Signals(signum).name}"


def _last_words(tail: Sequence[str], reason: str, code: int) -> str:
    """The sentence with which the engine explained its exit."""
    if reason == "stopped":
        return "the engine stopped by itself or was asked to by somebody else"
    for line in reversed(tail):
        match = re.search(r"(engine died: .*)" if reason in ("oom", "error") else r"kvoncall serve: (.*)", line)
        if match:
            return match[1]
    if code < 0:
        return f"the engine died of {signal.Signals(-code).name}"
    last = next((line for line in reversed(tail) if line.strip()), "it wrote no log")
    return f"the engine exited with code {code}: {last.strip()}"


def read_tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])


def _rotate(log_file: Path) -> None:
    """Makes room for a new log, keeping the last ones as `.log.1` (newest) and so on."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    for number in range(KEPT_LOGS - 1, -1, -1):
        older = log_file.with_name(f"{log_file.name}.{number}") if number else log_file
        with contextlib.suppress(FileNotFoundError):
            older.replace(log_file.with_name(f"{log_file.name}.{number + 1}"))


def _given_port(flags: Sequence[str]) -> int | None:
    """The port in the flags; `None` for no flag or 0. Raises `ConfigError` for flags that cannot be parsed."""
    port = EngineConfig.from_args(flags).port
    return port if port and any(flag.partition("=")[0] == "--port" for flag in flags) else None


def _address(flags: Sequence[str]) -> str:
    """Where to reach an engine with these flags from this machine."""
    host = EngineConfig.from_args(flags).host
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host


def _free_port(flags: Sequence[str]) -> int:
    host = EngineConfig.from_args(flags).host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def _is_healthy(address: str, port: int, pid: int) -> bool:
    """Whether it is our child that answers on the port, and well."""
    connection = http.client.HTTPConnection(address, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == http.client.OK and response.headers.get("X-Engine-Pid") == str(pid)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _environment(threads: int | None) -> dict[str, str]:
    """The child's environment: this source tree first, unbuffered, few malloc arenas (each would count
    against the memory limit)."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    set_here = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        set_here["OMP_NUM_THREADS"] = str(threads)
    return {"MALLOC_ARENA_MAX": "2"} | os.environ | set_here
