"""Why nobody is told of an alert: a silence, an acknowledgement, or another alert that explains it.

Muting says nothing about the alert's state: it goes pending, firing and resolved as any other. As in Alertmanager,
an alert inhibits from the moment it fires, even while it is muted itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from probe.notify.matchers import matches
from probe.store.records import Alert, Silence


class Inhibitable(Protocol):
    """What muting reads of a rule."""

    @property
    def id(self) -> str: ...
    @property
    def inhibited_by(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Muting:
    """`by`: the author, or the rule that explains the alert. `until`: Unix seconds, None where no time is set."""

    kind: Literal["silence", "acknowledgement", "inhibition"]
    by: str
    reason: str
    until: float | None = None
    silence_id: int | None = None

    @property
    def text(self) -> str:
        """One line for a table or a log."""
        if self.kind == "inhibition":
            return f"explained by {self.by}"
        if self.kind == "acknowledgement":
            return f"acknowledged by {self.by}: {self.reason}"
        return f"silenced by {self.by}: {self.reason}"


def muted_by(
    alert: Alert,
    silences: Iterable[Silence],
    active_alerts: Iterable[Alert],
    rules: Iterable[Inhibitable],
    now: float,
) -> Muting | None:
    """What mutes the alert at `now`, or None; a silence is named before an acknowledgement, that before inhibition."""
    covering = [s for s in silences if s.state(now) == "active" and matches(s.matchers, alert.labels)]
    if covering:
        last = max(covering, key=lambda s: s.ends_at)
        return Muting("silence", last.author, last.reason, last.ends_at, last.id)
    if alert.acknowledgement is not None:
        return Muting("acknowledgement", alert.acknowledgement.author, alert.acknowledgement.reason)
    inhibitors = next((rule.inhibited_by for rule in rules if rule.id == alert.rule), ())
    firing = {a.rule: a for a in active_alerts if a.target == alert.target and a.state == "firing" and a.id != alert.id}
    for rule in inhibitors:
        if rule in firing:
            return Muting("inhibition", rule, firing[rule].summary)
    return None
