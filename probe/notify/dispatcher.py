"""Delivers the outbox: called by the leading monitor, sends beside it, so that no receiver holds up the watch.

A row is claimed in the database before it is sent and marked after. A process that dies between the two leaves a row
that its successor sends again once the claim ran out: delivery is at least once, and exactly once without crashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from probe.alerts.rules import DEFAULT_RULES
from probe.notify.grouping import MAX_TRIES, Batch, Outbox, Plan, plan
from probe.notify.message import Message, MessageAlert, describe, try_out
from probe.notify.muting import Inhibitable, muted_by
from probe.notify.receivers import Receiver
from probe.notify.senders import Send, Sender, Sent
from probe.store import Alert, Lease, LeaseLostError, Notification, Store, StoreError
from probe.store.notifications import Outcome

BACKOFF_S = (10.0, 30.0, 120.0, 600.0)  # after the first, second, … try
CLAIM_S = 60.0
START_WITHIN_S = 20.0  # a claim older than this is not used: another process may be about to take it
MARK_TRIES = 3
PERIOD_S = 1.0  # ticks in between decide nothing: a decision costs several queries

log = logging.getLogger("kvoncall.notify")


class Dispatcher:
    """`await tick(now, lease)` often while leading; `await close()` before the event loop ends."""

    def __init__(self, store: Store, rules: Iterable[Inhibitable] = DEFAULT_RULES, *, send: Send | None = None) -> None:
        self._store = store
        self._rules = tuple(rules)
        self._send = send or Sender(store.where)
        self._owner = uuid.uuid4().hex
        self._decided_at = float("-inf")
        self._tasks: dict[str, asyncio.Task[None]] = {}  # one message at a time for each receiver

    async def tick(self, now: float, lease: Lease | None = None) -> None:
        """Decide what is to be sent and begin to send it; returns without waiting for receivers. Raises `StoreError`.

        With `lease`, nothing is claimed or written unless it is held (`LeaseLostError`).
        """
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        if 0 <= now - self._decided_at < PERIOD_S:
            return
        self._decided_at = now
        todo = await asyncio.to_thread(self._plan, now)
        await asyncio.to_thread(self._tidy, todo, now, lease)
        for batch in todo.batches:
            if batch.receiver.name not in self._tasks:
                task = asyncio.create_task(self._deliver(batch, now, lease))
                self._tasks[batch.receiver.name] = task

    async def drain(self) -> None:
        """Return once every message begun is sent and marked."""
        await asyncio.gather(*self._tasks.values())

    async def close(self, within_s: float = 5.0) -> None:
        """Wait a little for messages on their way; what is not marked by then may be sent again."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=within_s)
        for task in self._tasks.values():
            task.cancel()

    def _plan(self, now: float) -> Plan:
        store = self._store
        receivers = {receiver.name: receiver for receiver in store.receivers.list()}
        rows = store.notifications.relevant()
        active = store.alerts.active() if receivers else []
        firing = [alert for alert in active if alert.state == "firing"]
        if not firing and not rows:
            return Plan()
        alerts = {alert.id: alert for alert in active}
        for alert_id in {row.alert_id for row in rows} - set(alerts):
            if (over := store.alerts.get(alert_id)) is not None:
                alerts[alert_id] = over
        silences = store.silences.list(now=now)
        muted = {a.id: why for a in firing if (why := muted_by(a, silences, active, self._rules, now)) is not None}
        options, flushed = store.receivers.options(), store.notifications.flushed()
        return plan(Outbox(rows, alerts, muted, receivers, options, flushed), now)

    def _tidy(self, todo: Plan, now: float, lease: Lease | None) -> None:
        notifications = self._store.notifications
        if todo.drop:
            notifications.drop(todo.drop, now, lease)
        if todo.delete:
            notifications.delete(todo.delete, lease)
        if todo.add:
            notifications.add(todo.add, now, lease)

    async def _deliver(self, batch: Batch, now: float, lease: Lease | None) -> None:
        begun = time.monotonic()
        try:
            await self._claim_and_send(batch, now, lease, begun)
        except LeaseLostError:
            pass  # the monitor notices by itself
        except StoreError as error:
            log.warning("Notifications for %s wait: %s", batch.receiver.name, error)

    async def _claim_and_send(self, batch: Batch, now: float, lease: Lease | None, begun: float) -> None:
        ids = [row.id for row in batch.rows]
        claimed = await asyncio.to_thread(self._store.notifications.claim, ids, self._owner, now, CLAIM_S, lease)
        rows = [row for row in batch.rows if row.id in claimed]
        if not rows:
            return
        message = await asyncio.to_thread(self._message, batch, rows)
        if time.monotonic() - begun > START_WITHIN_S:
            return  # this process slept; the rows are taken up again when the claim runs out
        sent = await _beside(lambda: self._send(batch.receiver, message))
        done = now + (time.monotonic() - begun)
        await self._mark({row.id: _outcome(row, sent, done) for row in rows}, done)
        if not sent.ok:
            log.warning("Receiver %s: %s", batch.receiver.name, sent.error)

    async def _mark(self, outcomes: dict[int, Outcome], now: float) -> None:
        for attempt in range(MARK_TRIES):
            try:
                await asyncio.to_thread(self._store.notifications.finish, outcomes, self._owner, now)
                return
            except StoreError:
                if attempt == MARK_TRIES - 1:
                    raise
                await asyncio.sleep(1.0)

    def _message(self, batch: Batch, rows: Sequence[Notification]) -> Message:
        base_url = self._store.receivers.options().base_url
        parts: list[MessageAlert] = []
        for row in sorted(rows, key=lambda row: (row.transition != "resolved", row.id)):
            alert = self._store.alerts.get(row.alert_id)
            if alert is not None:
                parts.append(describe(alert, "resolved" if row.transition == "resolved" else "firing", base_url))
        parts += [describe(alert, "firing", base_url, is_news=False) for alert in batch.still_firing]
        return Message(batch.receiver.name, json.loads(batch.group_key), parts, base_url)


@dataclass(frozen=True)
class ReceiverState:
    """A receiver as a page shows it. `problem`: why it cannot be used now (a missing secret), else None.

    `last`: its newest closed notification (state, error, when), None before the first. `counts`: rows by state.
    """

    receiver: Receiver
    problem: str | None
    last: Notification | None
    counts: dict[str, int]


def receiver_states(store: Store) -> list[ReceiverState]:
    """Every receiver, by name, with what became of its notifications."""
    counts, sender = store.notifications.counts(), Sender(store.where)
    found = []
    for receiver in store.receivers.list():
        closed = store.notifications.list(1, receiver=receiver.name, states=("sent", "failed"))
        last = closed[0] if closed else None
        found.append(ReceiverState(receiver, sender.problem(receiver), last, counts.get(receiver.name, {})))
    return found


def send_test(store: Store, name: str, *, send: Send | None = None) -> Sent:
    """Send a test message now, in this thread (10 s at most, longer for some services); raises `StoreError`."""
    receiver = store.receivers.get(name)
    if receiver is None:
        raise StoreError(f"There is no receiver named {name!r}.")
    message = try_out(name, store.receivers.options().base_url, time.time())
    return (send or Sender(store.where))(receiver, message)


def mutings(store: Store, alerts: Iterable[Alert], rules: Iterable[Inhibitable] = DEFAULT_RULES) -> dict[int, str]:
    """Alert id -> why nobody is told of it, as one line, for those of `alerts` that are active and muted."""
    now, rules = time.time(), tuple(rules)
    silences, active = store.silences.list(now=now), store.alerts.active()
    shown = [alert for alert in alerts if alert.state in ("pending", "firing")]
    return {a.id: why.text for a in shown if (why := muted_by(a, silences, active, rules, now)) is not None}


async def _beside(work: Callable[[], Sent]) -> Sent:
    """Run `work` in a thread of its own: a hanging receiver takes none that the watch needs, nor delays its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Sent] = loop.create_future()

    def settle(sent: Sent | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if sent is not None:
            done.set_result(sent)
        elif error is not None:
            done.set_exception(error)

    def run() -> None:
        sent: Sent | None = None
        failure: BaseException | None = None
        try:
            sent = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, sent, failure)

    threading.Thread(target=run, name="kvoncall-notify", daemon=True).start()
    return await done


def _outcome(row: Notification, sent: Sent, now: float) -> Outcome:
    tries = row.tries + 1
    if sent.ok:
        return Outcome("sent")
    if not sent.again or tries >= MAX_TRIES:
        return Outcome("failed", sent.error, unconfirmed=sent.unconfirmed)
    return Outcome("pending", sent.error, now + BACKOFF_S[tries - 1], sent.unconfirmed)
