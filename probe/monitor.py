"""The watch: collects, evaluates and writes alerts, in a thread of its own, for one store.

Any number of processes may run a monitor on a store; exactly one leads, by a lease row that it renews, and the
others stand by and take over when the lease runs out. The leader's alert writes check the lease inside their
transaction, and its scrapes wait while it cannot be sure to hold it, so that a process that was stopped for a
while and wakes up writes nothing beside its successor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from probe.alerts.rule import Rule
from probe.alerts.rules import DEFAULT_RULES
from probe.collect.leadership import Leadership, WatchStats
from probe.store import Lease, LeaseLostError, Store, StoreError, apply_retention

LEASE_NAME = "monitor"
LEASE_TTL_S = 8.0
TICK_S = 0.5
ROLL_UP_EVERY_S = 60.0
RETENTION_EVERY_S = 3_600.0

log = logging.getLogger("kvoncall.monitor")


@dataclass(frozen=True)
class MonitorStatus:
    """`leader`: whether this process collects. `last_tick`: when it last looked, Unix seconds.

    `leader_owner`: host:pid:id of the process that leads, as far as this one knows. `problem`: one sentence
    while something keeps it from watching or writing, else None.
    """

    running: bool
    leader: bool
    leader_owner: str | None
    last_tick: float | None
    targets: int
    problem: str | None


class Monitor:
    """`start` and `stop` it; with `in_background=False`, `start` runs the watch until `stop` is called elsewhere."""

    def __init__(
        self,
        store: Store,
        *,
        rules: Sequence[Rule] = DEFAULT_RULES,
        in_background: bool = True,
        lease_ttl_s: float = LEASE_TTL_S,
        tick_s: float = TICK_S,
    ) -> None:
        self._store = store
        self._rules = tuple(rules)
        self._in_background = in_background
        self._ttl_s = lease_ttl_s
        self._tick_s = tick_s
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stopping = threading.Event()
        self._lease: Lease | None = None
        self._leadership: Leadership | None = None
        self._renew_at = 0.0
        self._leader_owner: str | None = None
        self._last_tick: float | None = None
        self._problem: str | None = None
        self._roll_up_at = 0.0
        self._retention_at = 0.0
        self._retention: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch (leading or standing by)."""
        if not self._in_background:
            asyncio.run(self._run())
            return
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="kvoncall-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, give the lease back, and return when that is done. Safe to call twice."""
        self._stopping.set()
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            loop.call_soon_threadsafe(wake.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def status(self) -> MonitorStatus:
        """What the watch is doing."""
        leadership = self._leadership
        return MonitorStatus(
            running=self._loop is not None and not self._stopping.is_set(),
            leader=leadership is not None,
            leader_owner=self._leader_owner,
            last_tick=self._last_tick,
            targets=leadership.target_count if leadership else 0,
            problem=self._problem or self._store.notice,
        )

    def stats(self) -> WatchStats:
        """What this process did since it took the lead (zeros while it stands by)."""
        leadership = self._leadership
        return leadership.stats() if leadership else WatchStats()

    async def _run(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            while not self._stopping.is_set():
                try:
                    await self._tick()
                    self._problem = None
                    self._last_tick = time.time()
                except LeaseLostError:
                    self._renew_at = 0.0  # the next tick finds out whether it lapsed or another process has it
                except StoreError as error:
                    self._problem = str(error)
                except Exception as error:
                    log.exception("The watch failed and goes on.")
                    self._problem = f"The watch failed and goes on: {error!r}."
                await self._sleep(self._wake)
        finally:
            await self._finish()

    async def _sleep(self, wake: asyncio.Event) -> None:
        try:
            await asyncio.wait_for(wake.wait(), self._tick_s)
        except TimeoutError:
            return
        wake.clear()

    async def _tick(self) -> None:
        await self._hold_lease()
        if self._leadership is not None:
            await self._leadership.tick()
            self._start_retention()

    async def _hold_lease(self) -> None:
        """Take, renew or lose the lease; a quarter of its life between renewals leaves three tries."""
        now = time.monotonic()
        if now < self._renew_at:
            return
        try:
            lease = await asyncio.to_thread(self._store.leases.acquire, LEASE_NAME, self._owner, self._ttl_s)
        except StoreError:
            # Nobody can take the lease from a store that takes no writes: keep the samples coming.
            if self._leadership is not None and self._lease is not None:
                self._leadership.hold(self._lease, time.monotonic() + self._ttl_s)
            raise
        self._renew_at = now + self._ttl_s / 4
        if lease is None:
            await self._step_down()
            self._renew_at = now + min(self._ttl_s / 4, 1.0)
            held = await asyncio.to_thread(self._store.leases.get, LEASE_NAME)
            self._leader_owner = held.owner if held else None
            return
        if self._lease is not None and lease.token != self._lease.token:
            await self._step_down()  # another process led in between: begin again from the store
        self._lease, self._leader_owner = lease, self._owner
        if self._leadership is None:
            self._leadership = Leadership(self._store, self._rules)
        # Counted from before the call: this process never relies on the lease longer than its row says.
        self._leadership.hold(lease, now + self._ttl_s)

    async def _step_down(self) -> None:
        leadership, self._leadership, self._lease = self._leadership, None, None
        self._renew_at = 0.0
        if leadership is not None:
            await leadership.close()

    def _start_retention(self) -> None:
        """Rolls samples up every minute, and removes old ones every hour, one such task at a time."""
        now = time.monotonic()
        if now < self._roll_up_at or (self._retention and not self._retention.done()):
            return
        self._roll_up_at = now + ROLL_UP_EVERY_S
        prunes = now >= self._retention_at
        if prunes:
            self._retention_at = now + RETENTION_EVERY_S
        self._retention = asyncio.create_task(self._retain(prunes))

    async def _retain(self, prunes: bool) -> None:
        try:
            if prunes:
                await asyncio.to_thread(apply_retention, self._store)
            else:
                await asyncio.to_thread(self._store.rollups.advance, time.time())
        except StoreError as error:
            log.warning("Old samples were not rolled up or removed: %s", error)

    async def _finish(self) -> None:
        try:
            self._renew_at = 0.0
            if self._leadership is not None:
                await self._hold_lease()  # scrapes that waited for it are written
            if self._leadership is not None:
                await self._leadership.settle()
        except StoreError as error:
            log.warning("The watch stops with something left to write: %s", error)
        lease = self._lease
        await self._step_down()
        if self._retention is not None:
            await self._retention
        try:
            if lease is not None:
                await asyncio.to_thread(self._store.leases.release, lease)
            await asyncio.to_thread(self._store.flush)
        except StoreError as error:
            self._problem = str(error)
            log.warning("The watch stopped, but: %s", error)


def watch(store: Store, *, seconds: float | None = None, report: Callable[[str], None]) -> int:
    """Watch headless until SIGINT or SIGTERM, or for `seconds`; `report` gets a line for each thing that changes.

    Returns the exit status: 0. Call it from the main thread.
    """
    ended = threading.Event()
    handlers = {s: signal.signal(s, lambda *_: ended.set()) for s in (signal.SIGINT, signal.SIGTERM)}
    monitor = Monitor(store)
    monitor.start()
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    said: dict[str, str] = {}
    seen: dict[int, str] = {}
    try:
        while not ended.wait(TICK_S) and time.monotonic() < deadline:
            _report_status(monitor.status(), said, report)
            _report_alerts(store, seen, report)
    finally:
        monitor.stop()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _report_status(status: MonitorStatus, said: dict[str, str], report: Callable[[str], None]) -> None:
    role = f"watching {status.targets} target{'' if status.targets == 1 else 's'}"
    if not status.leader:
        role = f"standing by: {status.leader_owner} watches this store" if status.leader_owner else "starting"
    for topic, text in (("role", role), ("problem", status.problem or "")):
        if said.get(topic, "") != text:
            report(text or "the problem is over")
            said[topic] = text


def _report_alerts(store: Store, seen: dict[int, str], report: Callable[[str], None]) -> None:
    try:
        alerts = [a for a in reversed(store.alerts.history(limit=50)) if a.updated_at > time.time() - 60]
    except StoreError:
        return  # the status says so
    present = {alert.id for alert in alerts}
    for alert_id in [i for i, state in seen.items() if state == "pending" and i not in present]:
        report(f"cleared before it fired: alert {alert_id}")
        del seen[alert_id]
    for alert in alerts:
        if seen.get(alert.id) != alert.state:
            report(f"{alert.state}: {alert.rule} on {alert.target}: {alert.summary} [{alert.coverage}]")
            seen[alert.id] = alert.state
