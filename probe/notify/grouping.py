"""What to send now: a pure decision over the outbox, the alerts, and who is muted.

As in Alertmanager: the first alert of a group waits `group_wait_s` for company, later ones `group_interval_s` after
the group was last sent anything, and a firing alert is repeated after `repeat_interval_s`. Unlike there, one transition
is one outbox row, so what was sent survives a restart, and a resolution follows every delivered firing, muted or not:
whoever was called must learn that it is over. A deadline farther away than its own length means that the clock was
set back; it counts as reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from probe.notify.muting import Muting
from probe.notify.receivers import NotifyOptions, Receiver
from probe.store.records import Alert, Notification

MAX_TRIES = 5
MAX_BACKOFF_S = 600.0
DIED = "given up: every try ended with the process that made it"
NOT_DELIVERED = "its firing was not delivered"
OVERTAKEN = "resolved before it was sent"


@dataclass(frozen=True)
class Outbox:
    """What is known when the decision is made. `muted` holds the mutings of firing alerts, by alert id."""

    rows: Sequence[Notification]
    alerts: Mapping[int, Alert]
    muted: Mapping[int, Muting]
    receivers: Mapping[str, Receiver]
    options: NotifyOptions
    flushed: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Batch:
    """One message: the outbox rows it delivers, and alerts of the group that fire still."""

    receiver: Receiver
    group_key: str
    rows: tuple[Notification, ...]
    still_firing: tuple[Alert, ...] = ()


@dataclass
class Plan:
    """`add`: rows that are missing (alert, transition, receiver). `drop`: row id -> why it is needless."""

    add: list[tuple[Alert, str, str]] = field(default_factory=list)
    drop: dict[int, str] = field(default_factory=dict)
    delete: list[int] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


def plan(outbox: Outbox, now: float) -> Plan:
    """Everything that is to be done at `now`."""
    result = Plan()
    by_pair: dict[tuple[int, str], list[Notification]] = defaultdict(list)
    for row in outbox.rows:
        by_pair[row.alert_id, row.receiver].append(row)
    groups: dict[tuple[str, str], list[Notification]] = defaultdict(list)
    on_their_way: set[tuple[str, str]] = set()
    for row in outbox.rows:
        if in_flight(row, now):
            on_their_way.add((row.receiver, row.group_key))
        elif row.state in ("pending", "sending") and _is_ready(row, outbox, by_pair, result, now):
            groups[row.receiver, row.group_key].append(row)
    for key, rows in groups.items():
        live = _live_alerts(key, outbox)
        if key not in on_their_way and _is_due(rows, bool(live), outbox.flushed.get(key), outbox.options, now):
            sent = {row.alert_id for row in rows}
            still = tuple(a for a in live if a.state == "firing" and a.id not in sent and a.id not in outbox.muted)
            result.batches.append(Batch(outbox.receivers[key[0]], key[1], tuple(rows), still))
    result.add = _missing(outbox, by_pair, now)
    return result


def in_flight(row: Notification, now: float) -> bool:
    """Whether somebody is sending the row right now; a claim that ran out is nobody's."""
    return row.state == "sending" and row.claimed_until is not None and row.claimed_until > now


def reached(deadline: float, now: float, length: float) -> bool:
    """Whether a deadline that was set `length` seconds ahead has come."""
    return now >= deadline or deadline - now > length


def _is_ready(
    row: Notification,
    outbox: Outbox,
    by_pair: Mapping[tuple[int, str], Sequence[Notification]],
    result: Plan,
    now: float,
) -> bool:
    """Whether the row may be sent; one that never will be goes to `result`."""
    receiver, alert = outbox.receivers.get(row.receiver), outbox.alerts.get(row.alert_id)
    if row.state == "sending" and row.tries >= MAX_TRIES:
        result.drop[row.id] = DIED
        return False
    if receiver is None or alert is None:
        result.delete.append(row.id)
        return False
    if row.transition == "resolved":
        told = [r for r in by_pair[row.alert_id, row.receiver] if r.transition != "resolved"]
        if any(in_flight(r, now) for r in told):
            return False
        if not any(_knows(r) for r in told):
            result.drop[row.id] = NOT_DELIVERED
            return False
        return True
    if alert.state != "firing":
        result.drop[row.id] = OVERTAKEN
        return False
    if not receiver.takes(alert.labels, is_drill=alert.replay_id is not None):
        result.delete.append(row.id)
        return False
    return alert.id not in outbox.muted


def _knows(row: Notification) -> bool:
    """Whether the receiver may know of it: sent, or left half sent by a process that died."""
    return row.delivered or row.state == "sending"


def _live_alerts(key: tuple[str, str], outbox: Outbox) -> list[Alert]:
    """Alerts of the group of which the receiver knows as firing."""
    found = {
        row.alert_id: outbox.alerts[row.alert_id]
        for row in outbox.rows
        if (row.receiver, row.group_key) == key
        and row.transition != "resolved"
        and row.delivered
        and row.alert_id in outbox.alerts
    }
    return list(found.values())


def _is_due(
    rows: Sequence[Notification], is_live: bool, flushed_at: float | None, options: NotifyOptions, now: float
) -> bool:
    first = min(row.created_at for row in rows)
    if not reached(first + options.group_wait_s, now, options.group_wait_s):
        return False
    if is_live and flushed_at is not None:
        interval = options.group_interval_s
        if not reached(flushed_at + interval, now, interval):
            return False
    return all(reached(row.due_at, now, MAX_BACKOFF_S) for row in rows)


def _missing(
    outbox: Outbox, by_pair: Mapping[tuple[int, str], Sequence[Notification]], now: float
) -> list[tuple[Alert, str, str]]:
    """Firings of receivers that came later than the alert, and repeats."""
    found: list[tuple[Alert, str, str]] = []
    for alert in outbox.alerts.values():
        if alert.state != "firing":
            continue
        for receiver in outbox.receivers.values():
            if not receiver.takes(alert.labels, is_drill=alert.replay_id is not None):
                continue
            rows = by_pair.get((alert.id, receiver.name), ())
            if not rows:
                found.append((alert, "firing", receiver.name))
            elif alert.id not in outbox.muted and all(row.done_at is not None for row in rows):
                last = max(row.done_at or 0.0 for row in rows)
                if now - last >= outbox.options.repeat_interval_s:
                    repeats = sum(row.transition.startswith("repeat") for row in rows)
                    found.append((alert, f"repeat-{repeats + 1}", receiver.name))
    return found
