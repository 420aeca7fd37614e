"""The canary of the embedded engine: rounds of a small fixed set of questions, one every so many seconds.

The first complete round is the baseline of the later ones, also after the app or the engine came back, until the
operator asks for a new one. A round waits while the engine is away and while a drill or a measurement has the
processor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from app.embedded import NAME
from probe.alerts.quality import ROUND_EVENT
from probe.quality.canary import Canary, canary_spec
from probe.quality.suite import QualityError
from probe.store import QualityRun, Store, StoreError

LOOK_S = 1.0  # how soon a stop, or an engine that came back, is seen
log = logging.getLogger("kvoncall.app")


@dataclass(frozen=True)
class CanaryStatus:
    """`waiting` says why no round runs though one is due; `problem` is how the last round failed."""

    running: bool
    every_s: float
    rounds: int
    asking: bool
    baseline_id: str | None
    waiting: str | None
    problem: str | None


class CanaryWatch:
    """Owns the thread; thread-safe. `base_url` answers None while there is no engine to ask."""

    def __init__(self, store: Store, base_url: Callable[[], str | None], busy: Callable[[], bool]) -> None:
        self._store = store
        self._base_url = base_url
        self._busy = busy
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._baseline: QualityRun | None = None
        self._status = CanaryStatus(False, 0.0, 0, False, None, None, None)

    def start(self, every_s: float, *, new_baseline: bool = False) -> None:
        """Starts the rounds; does nothing when they run."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._stop = threading.Event()
            self._baseline = None if new_baseline else self._last_baseline()
            self._status = CanaryStatus(True, every_s, 0, False, self._baseline_id(), None, None)
            self._thread = threading.Thread(target=self._main, args=(self._stop, every_s), name="canary", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the rounds; one that is under way is finished (waited for, when `timeout_s` is given)."""
        self._stop.set()
        thread = self._thread
        if thread is not None and timeout_s is not None:
            thread.join(timeout_s)

    def status(self) -> CanaryStatus:
        """A consistent view."""
        with self._lock:
            return self._status

    def _main(self, stop: threading.Event, every_s: float) -> None:
        due = time.monotonic()
        while not stop.is_set():
            waiting, problem = None, self._status.problem
            if time.monotonic() >= due:
                try:
                    waiting = self._round()
                    problem = None
                except (QualityError, StoreError) as error:
                    problem = str(error)
                except Exception as error:
                    log.exception("a canary round failed")
                    problem = f"The round failed: {type(error).__name__}: {error}"
                due = due if waiting else time.monotonic() + every_s
            self._note(asking=False, waiting=waiting, problem=problem)
            stop.wait(LOOK_S)
        self._note(running=False, waiting=None)

    def _round(self) -> str | None:
        """One round; answers why there is none now."""
        url = self._base_url()
        if url is None:
            return "the engine is away, or its licence is not accepted yet"
        if self._busy():
            return "a drill or a measurement has the processor"
        self._note(asking=True, waiting=None)
        canary = Canary(self._store, NAME, url, canary_spec(), self._baseline)
        canary.round()
        self._baseline = canary.baseline
        self._note(rounds=self._status.rounds + 1, baseline_id=self._baseline_id())
        return None

    def _note(self, **changed: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changed)

    def _baseline_id(self) -> str | None:
        return self._baseline.id if self._baseline is not None else None

    def _last_baseline(self) -> QualityRun | None:
        """What the newest round of this target was compared with."""
        events = self._store.events.recent(limit=1, target=NAME, kinds=[ROUND_EVENT])
        return self._store.quality.get(str(events[0].data["baseline_id"])) if events else None
