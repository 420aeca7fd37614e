"""The one object behind all pages: store, monitor, embedded engine, canary, running replays and measurements.

`streamlit run app` opens it in the lifespan of `st.App` and closes it when the server stops; it works with no
browser open. Pages reach it with `get_runtime()`. This module is always imported as `app.runtime`, never as
`runtime` (Streamlit puts the folder `app` on `sys.path`), so there is exactly one.
"""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.canary import CanaryWatch
from app.embedded import NAME, EmbeddedEngine
from app.history import History
from app.isolating import Isolating
from app.measuring import Measuring
from engine.config import ConfigError
from probe.isolation.options import IsolationOptions
from probe.monitor import Monitor
from probe.quality.suite import SuiteSpec
from probe.replay.runner import ReplayRunner, close_interrupted
from probe.replay.scenario import ReplayError, get_scenario
from probe.store import Store, StoreError, Target, default_data_dir

log = logging.getLogger("kvoncall.app")


class AppError(RuntimeError):
    """Something the operator has to put right; the message is one sentence."""


@dataclass(frozen=True)
class RuntimeOptions:
    """What the environment asks for; see `from_env`."""

    data: Path | str
    engine_flags: tuple[str, ...] = ()
    engine_enabled: bool = True
    load_rps: float = 1.0
    canary_s: float = 0.0

    @property
    def log_dir(self) -> Path:
        """Where engine logs go: beside the store, or in the temporary folder when the store is a server."""
        return (self.data if isinstance(self.data, Path) else Path(tempfile.gettempdir()) / "kvoncall") / "logs"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RuntimeOptions:
        """Reads KVONCALL_DATA (folder or database URL), KVONCALL_ENGINE_FLAGS, KVONCALL_NO_ENGINE=1,
        KVONCALL_LOAD_RPS (0 = no traffic) and KVONCALL_CANARY_S (seconds between rounds, 0 = no canary).

        Raises `AppError` on a value that cannot be read.
        """
        data = environ.get("KVONCALL_DATA")
        try:
            flags = tuple(shlex.split(environ.get("KVONCALL_ENGINE_FLAGS", "")))
        except ValueError as error:
            raise AppError(f"KVONCALL_ENGINE_FLAGS cannot be split into flags: {error}.") from None
        return cls(
            data=data if data and "://" in data else default_data_dir(),
            engine_flags=flags,
            engine_enabled=environ.get("KVONCALL_NO_ENGINE", "") not in {"1", "true", "yes"},
            load_rps=_number(environ, "KVONCALL_LOAD_RPS", 1.0, 1000, "requests per second"),
            canary_s=_number(environ, "KVONCALL_CANARY_S", 0.0, 86400, "seconds between two rounds"),
        )


def _number(environ: Mapping[str, str], name: str, default: float, most: int, unit: str) -> float:
    text = environ.get(name)
    try:
        value = default if text is None else float(text)
        if not 0 <= value <= most:
            raise ValueError
    except ValueError:
        raise AppError(f"{name} is {text!r}; give {unit}, 0 to {most}.") from None
    return value


class Runtime:
    """Everything this process runs besides pages. Built by `open`, ended by `close`; thread-safe.

    A store that cannot be opened does not stop the app: `problem` then says why, `store` raises it, and every
    page shows the sentence.
    """

    def __init__(
        self,
        options: RuntimeOptions,
        *,
        store: Store | None = None,
        engine: EmbeddedEngine | None = None,
        problem: str | None = None,
    ) -> None:
        """Takes what is already open; `open` is the usual way."""
        self.options = options
        self.started_at = time.time()
        self.problem = problem
        self.monitor: Monitor | None = None
        self.engine = engine
        self._store = store
        self._history = History(store) if store is not None else None
        self._measuring = Measuring(store, options.log_dir, self._load_held) if store is not None else None
        self._isolating = Isolating(store, self._load_held) if store is not None else None
        self._canary = CanaryWatch(store, self._engine_url, self.busy) if store is not None else None
        self.replay_threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @classmethod
    def open(cls, options: RuntimeOptions) -> Runtime:
        """Opens the store, notes replays a crash left behind, starts the monitor and the embedded engine."""
        try:
            store = Store.open(options.data)
        except StoreError as error:
            return cls(options, problem=str(error))
        runtime = cls(options, store=store)
        close_interrupted(store)
        runtime.monitor = Monitor(store)
        runtime.monitor.start()
        if options.engine_enabled:
            runtime._start_engine(store)
        elif store.targets.get(NAME) is not None:
            store.targets.deactivate(NAME)
        return runtime

    @classmethod
    def from_env(cls) -> Runtime:
        """`open` with the environment's options; a bad variable becomes `problem`, never an exception."""
        try:
            options = RuntimeOptions.from_env()
        except AppError as error:
            return cls(RuntimeOptions(default_data_dir(), engine_enabled=False), problem=str(error))
        return cls.open(options)

    def health(self) -> dict[str, object]:
        """Facts for /healthz; raises `AppError` when the store is not open or nobody collects."""
        self.store.targets.list()
        monitor = self.monitor.status() if self.monitor is not None else None
        if monitor is None:
            raise AppError("The monitor is not running.")
        return {
            "leader": monitor.leader,
            "last_tick": monitor.last_tick,
            "engine": self.engine.snapshot().status.state if self.engine is not None else "disabled",
        }

    def _start_engine(self, store: Store) -> None:
        try:
            self.engine = EmbeddedEngine(
                store, self.options.engine_flags, log_dir=self.options.log_dir, load_rps=self.options.load_rps
            )
            self.engine.start("the app started")
            if self.options.canary_s > 0:
                self.canary.start(self.options.canary_s)
        except ConfigError as error:
            self.problem = f"The embedded engine was not started: {error} (KVONCALL_ENGINE_FLAGS)."

    @property
    def is_open(self) -> bool:
        """Whether there is a store to read."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """The store; raises `AppError` when it could not be opened."""
        if self._store is None:
            raise AppError(self.problem or "The store is closed.")
        return self._store

    @property
    def history(self) -> History:
        """Samples of the last hours; raises as `store` does."""
        if self._history is None:
            raise AppError(self.problem or "The store is closed.")
        return self._history

    @property
    def measuring(self) -> Measuring:
        """Measurements of cache formats; raises as `store` does."""
        if self._measuring is None:
            raise AppError(self.problem or "The store is closed.")
        return self._measuring

    @property
    def isolating(self) -> Isolating:
        """Rounds of the isolation probe; raises as `store` does."""
        if self._isolating is None:
            raise AppError(self.problem or "The store is closed.")
        return self._isolating

    @property
    def canary(self) -> CanaryWatch:
        """The embedded engine's canary; raises as `store` does."""
        if self._canary is None:
            raise AppError(self.problem or "The store is closed.")
        return self._canary

    def start_replay(self, scenario_id: str, variant: str | None = None) -> str:
        """Starts an interactive replay (in one of its variants) in a thread and returns its id; one at a time.

        The embedded engine's background traffic pauses meanwhile, so that the drill has the processor.
        """
        scenario = get_scenario(scenario_id, variant)
        with self._lock:
            self._refuse_when_busy()
            self.replay_threads = [thread for thread in self.replay_threads if thread.is_alive()]
            runner = ReplayRunner(self.store, scenario, interactive=True, log_dir=self.options.log_dir)
            name = f"replay-{scenario_id}"
            thread = threading.Thread(target=self._run_replay, args=(runner,), name=name, daemon=True)
            thread.start()
            self.replay_threads.append(thread)
        return runner.replay_id

    def _run_replay(self, runner: ReplayRunner) -> None:
        try:
            with self._load_held():
                runner.run()
        except ReplayError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("replay %s failed", runner.replay_id)  # its result has the sentence for people

    def replay_running(self) -> bool:
        """Whether a replay of this process is under way (waiting for its change included)."""
        return any(thread.is_alive() for thread in list(self.replay_threads))

    def start_measuring(self, formats: Sequence[str], spec: SuiteSpec) -> None:
        """Measures formats of the KV cache on engines of their own, with the embedded engine's other flags.

        One at a time, and not beside a replay; the background traffic pauses meanwhile.
        """
        measuring = self.measuring
        if self.engine is not None and self.engine.pending_notice() is not None:
            raise AppError("Accept the licence of the served model on the Engine page first.")
        flags = self.engine.snapshot().status.flags if self.engine is not None else self.options.engine_flags
        with self._lock:
            self._refuse_when_busy()
            measuring.start(flags, formats, spec)

    def start_isolation(self, target: Target, options: IsolationOptions, api_key_env: str | None = None) -> None:
        """One round of the isolation probe against a watched target; one at a time, and beside nothing else.

        `api_key_env` names the environment variable that holds the server's API key, if it wants one.
        """
        isolating = self.isolating
        if target.name == NAME and self._engine_url() is None:
            raise AppError("The embedded engine is away, or its licence is not accepted yet; see the Engine page.")
        api_key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not api_key:
            raise AppError(f"The environment variable {api_key_env} is not set where this app was started.")
        with self._lock:
            self._refuse_when_busy()
            isolating.start(target, options, api_key)

    def busy(self) -> bool:
        """Whether a replay, a measurement or a probe has the processor."""
        return self.replay_running() or self._is_measuring() or self._is_isolating()

    def _is_measuring(self) -> bool:
        return self._measuring is not None and self._measuring.status().running

    def _is_isolating(self) -> bool:
        return self._isolating is not None and self._isolating.status().running

    def _refuse_when_busy(self) -> None:
        if self.replay_running():
            raise AppError("A replay is running already; wait for it to end or apply its change.")
        if self._is_measuring():
            raise AppError("A measurement of formats is running already; wait for it to end or stop it.")
        if self._is_isolating():
            raise AppError("A probe of isolation is running already; wait for it to end or stop it.")

    @contextmanager
    def _load_held(self) -> Iterator[None]:
        """Without the embedded engine's background traffic."""
        engine = self.engine
        if engine is not None:
            engine.hold_load()
        try:
            yield
        finally:
            if engine is not None:
                engine.release_load()

    def _engine_url(self) -> str | None:
        """Where the embedded engine answers; None while it does not run or its licence is not accepted yet."""
        if self.engine is None or self.engine.pending_notice() is not None:
            return None
        status = self.engine.snapshot().status
        return status.base_url if status.state == "running" else None

    def close(self) -> None:
        """Stops load, engine and monitor and closes the store; drill engines end with this process."""
        if self._canary is not None:
            self._canary.stop(timeout_s=10.0)
        if self._measuring is not None:
            self._measuring.stop()
        if self._isolating is not None:
            self._isolating.stop()
        if self.engine is not None:
            self.engine.close()
        if self.monitor is not None:
            self.monitor.stop()
        if self._store is not None:
            self._store.close()
            self._store = None


_runtime: Runtime | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """Makes `runtime` this process's; the lifespan and tests call it."""
    global _runtime
    _runtime = runtime


def get_runtime() -> Runtime:
    """This process's runtime; raises `AppError` when the app was not started through `app`."""
    if _runtime is None:
        raise AppError("The runtime is not started; start the app with `streamlit run app`.")
    return _runtime
