"""Writing the outbox inside the transaction of a transition: which receivers will have to be told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import cast

from sqlalchemy import Table, select
from sqlalchemy.orm import Session

from probe.store.database import upsert
from probe.store.lifecycle_models import NotificationRow
from probe.store.receivers import read_options, read_receivers
from probe.store.records import Alert


def enqueue(session: Session, alert: Alert, transition: str, now: float) -> None:
    """A firing goes to every receiver that takes the alert, a resolution to those that had a firing to be told."""
    if transition == "resolved":
        told = select(NotificationRow.receiver).where(NotificationRow.alert_id == alert.id).distinct()
        names = list(session.scalars(told))
    else:
        is_drill = alert.replay_id is not None
        names = [r.name for r in read_receivers(session)[0] if r.takes(alert.labels, is_drill=is_drill)]
    if names:
        insert(session, alert, transition, names, read_options(session).group_by, now)


def insert(
    session: Session, alert: Alert, transition: str, receivers: Iterable[str], group_by: Iterable[str], now: float
) -> None:
    """Outbox rows of one transition; those that are there already stay as they are."""
    group_key = json.dumps({label: alert.labels[label] for label in sorted(group_by)})
    rows = [
        {
            "alert_id": alert.id,
            "transition": transition,
            "receiver": receiver,
            "group_key": group_key,
            "state": "pending",
            "created_at": now,
            "due_at": now,
            "tries": 0,
            "unconfirmed": False,
        }
        for receiver in receivers
    ]
    table = cast("Table", NotificationRow.__table__)
    upsert(session.connection(), table, rows, key=("alert_id", "transition", "receiver"), keep=True)
