"""What is known of an isolation breach when advice is computed: which part of a block's identity failed to count.

`kind_of` reads it off the evidence: breaches the engine counted, by kind, and checks of the isolation probe that
leaked. Where the evidence names several kinds, or none, the kind is None: then everything has to be closed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

COLLISION = "collision"  # two texts, one key
ADAPTER = "adapter"  # blocks of another LoRA adapter
IMAGE = "image"  # blocks of another image
STALE_WEIGHTS = "stale-weights"  # blocks from before a weight update
PARTIAL_BLOCK = "partial-block"  # two choices write into one block
TIMING = "timing"  # no foreign block is served; what is cached can be told from outside
KINDS = (COLLISION, ADAPTER, IMAGE, STALE_WEIGHTS, PARTIAL_BLOCK, TIMING)

# The engine's kinds of breaches -> kind. A hit across namespaces, or on other tokens, is two prompts with one key.
_COUNTED = {
    "namespace": COLLISION,
    "tokens": COLLISION,
    "adapter": ADAPTER,
    "image": IMAGE,
    "weights": STALE_WEIGHTS,
}


@dataclass(frozen=True)
class IsolationFacts:
    """One breach. `kind` is one of KINDS, None where it is not known.

    `breaches` were counted while `requests` requests were served. `lost_hit_rate`: share of the prompt tokens
    that would have been hits had everybody shared, where it was measured.
    """

    kind: str | None = None
    breaches: int = 0
    requests: int = 0
    lost_hit_rate: float | None = None

    @property
    def seen(self) -> str:
        """How often it happened, in words; empty where nothing was counted."""
        return f"{self.breaches} in {self.requests} requests" if self.requests else ""


def read_isolation(entry: Any) -> IsolationFacts | None:
    """The facts from a dict with the names of the fields; more keys may be there. A kind unknown here is None."""
    if not isinstance(entry, Mapping):
        return None
    lost = entry.get("lost_hit_rate")
    return IsolationFacts(
        kind=entry["kind"] if entry.get("kind") in KINDS else None,
        breaches=int(entry.get("breaches") or 0),
        requests=int(entry.get("requests") or 0),
        lost_hit_rate=None if lost is None else float(lost),
    )


def kind_of(breaches: Mapping[str, float], leaking_checks: Collection[str]) -> str | None:
    """The kind that breaches (engine's kind -> count) and leaking checks of the probe point to; None: not just one.

    A side channel is open wherever a cache is shared, so it counts only where no foreign block was served.
    """
    counted = {_COUNTED.get(kind) for kind, count in breaches.items() if count > 0}
    if counted:
        return counted.pop() if len(counted) == 1 else None
    timing = bool(leaking_checks) and all(check.startswith("side-channel") for check in leaking_checks)
    return TIMING if timing else None
