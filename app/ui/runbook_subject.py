"""What a note or a checklist on a runbook's page is about: the alert or the drill that led there, or the page."""

from __future__ import annotations

from dataclasses import dataclass

from probe.store import Alert, Replay
from runbooks.load import Runbook


@dataclass(frozen=True)
class Subject:
    """`about` and `key` as `store.notes` takes them; `words` for people."""

    about: str
    key: str
    words: str


def of_runbook(runbook: Runbook) -> Subject:
    """The page itself, whoever reads it next."""
    return Subject("runbook", runbook.id, "this runbook")


def of_incident(alert: Alert | None, replay: Replay | None) -> Subject | None:
    """The incident at hand; None when the page was opened without one."""
    if alert is not None:
        return Subject("alert", str(alert.id), f"alert {alert.id}")
    return Subject("replay", replay.id, "this drill") if replay is not None else None
