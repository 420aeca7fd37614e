"""Retention: records are kept as long as the settings say, and the whole below a size; alerts and replays stay.

Samples are rolled up before they go. By size, the oldest raw samples go first, an hour at a time, but never those that
alert windows still need; then the oldest 1-minute rollups.
"""

from __future__ import annotations

import time

from probe.store.store import Store

DAY_S = 86_400.0
HOUR_S = 3_600.0
NEEDED_S = 6 * HOUR_S  # the longest window of a rule on raw samples
MB = 1_000_000


def apply_retention(store: Store, now: float | None = None) -> int:
    """Roll up what is complete and delete what is older or more than the settings allow.

    Returns the number of raw samples deleted.
    """
    now = time.time() if now is None else now
    store.rollups.advance(now)
    events_since = now - _days(store, "event_retention_days")
    store.events.prune(events_since)
    store.quality.prune(events_since)
    store.silences.prune(events_since)
    store.notifications.prune(events_since)
    store.imported.prune(events_since)
    raw_since = now - _days(store, "retention_days")
    store.alerts.prune_readings(raw_since)
    deleted = store.samples.prune(raw_since)
    store.rollups.prune(now - _days(store, "minute_retention_days"), now - _days(store, "hour_retention_days"))
    deleted += _trim(store, now)
    store.samples.prune_series()
    store.reclaim()
    return deleted


def _trim(store: Store, now: float) -> int:
    """Delete the oldest until the store is below its size; says so in an event."""
    limit = float(store.settings.get("max_size_mb")) * MB
    size = store.used_bytes()
    deleted, until = 0, None
    while size > limit:
        oldest = store.samples.oldest()
        if oldest is not None and oldest < now - NEEDED_S - HOUR_S:
            until = min(oldest + HOUR_S, now - NEEDED_S)
            deleted += store.samples.prune(until)
        elif not store.rollups.prune_oldest(now - NEEDED_S):
            break
        size = store.used_bytes()
    if until is not None:
        store.events.add(
            None,
            "store_trimmed",
            f"The store reached {limit / MB:.0f} MB: {deleted} raw samples older than the newest "
            f"{(now - until) / HOUR_S:.0f} h were removed early. Raise max_size_mb or lower retention_days.",
            severity="warning",
            data={"deleted": deleted, "kept_hours": (now - until) / HOUR_S, "size_mb": size / MB},
            ts=now,
        )
    return deleted


def _days(store: Store, key: str) -> float:
    return float(store.settings.get(key)) * DAY_S
