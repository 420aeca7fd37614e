"""The life of an alert on one target: inactive -> pending -> firing -> resolved (and inactive again).

Times that count are times *seen*: the hold time passes only between two observations that both breach, the
time to resolve only between two that are both clear. As in Prometheus, what is pending ends when it is not seen to
hold, for want of data too. What fires stays without data, frozen: missing data is no recovery. (An exported rule
resolves then, after `keep_firing_for`.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from probe.alerts.evaluate import Verdict
from probe.alerts.rule import Rule
from probe.store import Alert

State = Literal["inactive", "pending", "firing"]
Transition = tuple[str, str]


@dataclass(frozen=True)
class Progress:
    """Where one rule stands on one target.

    `progress_s`: seconds seen in breach while pending, seen clear while firing. `seen_at`: the observation
    from which it goes on counting, None after a break. `active_since`: when it became pending.
    """

    state: State = "inactive"
    progress_s: float = 0.0
    seen_at: float | None = None
    active_since: float | None = None


def restore(alert: Alert) -> Progress:
    """The progress of an alert found in the store; the time nobody watched does not count."""
    state: State = "firing" if alert.state == "firing" else "pending"
    return Progress(state, alert.progress_s, None, alert.pending_at)


def step(
    rule: Rule, before: Progress, verdict: Verdict, now: float, max_gap_s: float
) -> tuple[Progress, tuple[Transition, ...]]:
    """One observation: the new progress, and the changes of state it caused, in order.

    `max_gap_s` bounds what counts between two observations.
    """
    if verdict == "no_data" and before.state != "pending":
        return replace(before, seen_at=None), ()
    if verdict == "breach":
        return _breach(rule, before, now, max_gap_s)
    if before.state == "pending":
        return Progress(), (("pending", "inactive"),)
    if before.state == "inactive":
        return Progress(), ()
    cleared = before.progress_s + _counted(before, now, max_gap_s)
    if cleared >= rule.keep_firing_s:
        return Progress(), (("firing", "resolved"),)
    return replace(before, progress_s=cleared, seen_at=now), ()


def _breach(rule: Rule, before: Progress, now: float, max_gap_s: float) -> tuple[Progress, tuple[Transition, ...]]:
    if before.state == "firing":
        return replace(before, progress_s=0.0, seen_at=None), ()
    changes: tuple[Transition, ...] = ()
    if before.state == "inactive":
        before = Progress("pending", 0.0, now, now)
        changes = (("inactive", "pending"),)
    held = before.progress_s + _counted(before, now, max_gap_s)
    if held >= rule.hold_s:
        return Progress("firing", 0.0, None, before.active_since), (*changes, ("pending", "firing"))
    return replace(before, progress_s=held, seen_at=now), changes


def _counted(before: Progress, now: float, max_gap_s: float) -> float:
    if before.seen_at is None:
        return 0.0
    return min(max(0.0, now - before.seen_at), max_gap_s)
