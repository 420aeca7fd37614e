"""Targets, samples, events, alerts, replays, quality runs and team notes, in SQLite by default or PostgreSQL by URL.

`Store.open(data_dir)` migrates the schema and starts the one writer thread of this process.
"""

from probe.store.database import default_data_dir
from probe.store.records import (
    ABOUT,
    ACK_KINDS,
    Acknowledgement,
    Alert,
    AlertUpdate,
    Event,
    ImportedAlert,
    JournalEntry,
    Lease,
    LeaseLostError,
    Note,
    NoteVersion,
    Notification,
    QualityItem,
    QualityRun,
    Reading,
    Replay,
    Sample,
    Silence,
    StoreError,
    Target,
    Tick,
)
from probe.store.retention import apply_retention
from probe.store.store import Store

__all__ = [
    "ABOUT",
    "ACK_KINDS",
    "Acknowledgement",
    "Alert",
    "AlertUpdate",
    "Event",
    "ImportedAlert",
    "JournalEntry",
    "Lease",
    "LeaseLostError",
    "Note",
    "NoteVersion",
    "Notification",
    "QualityItem",
    "QualityRun",
    "Reading",
    "Replay",
    "Sample",
    "Silence",
    "Store",
    "StoreError",
    "Target",
    "Tick",
    "apply_retention",
    "default_data_dir",
]
