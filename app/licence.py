"""The licence notice of a model that has one, and who accepted it: an event in the store, kept like every other.

Until it is accepted the embedded engine gets no background traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine import gemma
from engine.config import EngineConfig
from probe.store import Store

ACCEPTED = "licence_accepted"


def notice(flags: Sequence[str]) -> str | None:
    """What has to be shown before an engine with these flags is used; None when there is nothing."""
    return gemma.NOTICE if EngineConfig.from_args(list(flags)).model == gemma.NAME else None


def pending_notice(store: Store, flags: Sequence[str]) -> str | None:
    """The notice while nobody accepted it in this store."""
    text = notice(flags)
    return text if text is not None and not store.events.recent(limit=1, kinds=[ACCEPTED]) else None


def accept(store: Store, target: str, text: str) -> None:
    """Keeps that the operator accepted this notice."""
    store.events.add(target, ACCEPTED, f"licence notice accepted: {text}")
