"""Retention: raw samples, events and quality runs are kept as long as the settings say; alerts and replays stay."""

from __future__ import annotations

import time

from probe.store.store import Store

DAY_S = 86_400.0


def apply_retention(store: Store, now: float | None = None) -> int:
    """Delete what is older than the settings allow; returns the number of samples deleted."""
    now = time.time() if now is None else now
    events_since = now - float(store.settings.get("event_retention_days")) * DAY_S
    store.events.prune(events_since)
    store.quality.prune(events_since)
    raw_since = now - float(store.settings.get("retention_days")) * DAY_S
    store.alerts.prune_readings(raw_since)
    return store.samples.prune(raw_since)
