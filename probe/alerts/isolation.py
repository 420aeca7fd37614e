"""Rounds of the isolation probe: what each check found the last time it ran, and how to say it.

A round is the samples of one moment, by check. It does not go stale with the scrape interval, and a clean round of
one check says nothing about another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from probe.alerts.rule import BreachSignal
from probe.alerts.window import Window

ROUND_EVENT = "isolation_round"
"""The kind of event that says a round is in the store."""

# Whose block was served, by the counter's label `kind`.
_WHOSE = {
    "namespace": "of another tenant or session",
    "adapter": "of another adapter",
    "image": "of another image",
    "weights": "of other weights",
    "tokens": "of another text",
}


@dataclass(frozen=True)
class CheckReading:
    """The newest reading of one check. `leaks` of a side channel is 1 where it was shown."""

    check: str
    ts: float
    probes: int
    leaks: int

    @property
    def sentence(self) -> str:
        """What it found, for people."""
        if self.check == "leak-canary":
            answers = "answer" if self.leaks == 1 else "answers"
            return f"{self.leaks} {answers} with another session's text in {self.probes} probes"
        if self.check == "side-channel-tokens":
            return f"cached_tokens tells what another tenant has cached ({self.probes} probes)"
        if self.check == "side-channel-ttft":
            return f"time to first token tells what another tenant has cached ({self.probes} probes)"
        if self.check == "cache-salt":
            return f"cache_salt not honoured {self.leaks} of {self.probes} times"
        return f"{self.check}: {self.leaks} leaks in {self.probes} probes"


def newest(window: Window, signal: BreachSignal, since: float) -> list[CheckReading]:
    """The newest complete reading of each check from `since` on; one without probes found nothing and is none."""
    counts: dict[tuple[str, float], dict[str, float]] = {}
    for name in (signal.probes, signal.leaks):
        for series in window.series(name):
            for ts, value in series.points:
                if ts >= since:
                    counts.setdefault((series.labels.get("check", ""), ts), {})[name] = value
    found: dict[str, CheckReading] = {}
    for (check, ts), values in sorted(counts.items()):
        if len(values) == 2 and values[signal.probes] > 0:
            found[check] = CheckReading(check, ts, round(values[signal.probes]), round(values[signal.leaks]))
    return list(found.values())


def whose(kind: str) -> str:
    """Whose blocks the engine's label `kind` means."""
    return _WHOSE.get(kind, f"of another {kind or 'identity'}")


def what_was_seen(hits: Mapping[str, float], seen: Sequence[CheckReading]) -> str:
    """Breaches counted by the engine, by kind, and leaks the probe has shown."""
    parts = [reading.sentence for reading in seen if reading.leaks]
    for kind, count in hits.items():
        if count:
            parts.append(f"{count:g} block{'' if count == 1 else 's'} {whose(kind)} served")
    return "; ".join(parts) or "nothing seen"


def coverage(seen: Sequence[CheckReading], now: float, rounds_s: float) -> str:
    """Which checks speak, and how old the newest of them is."""
    if not seen:
        return f"no isolation probe ran in the last {rounds_s / 3600:.0f} h"
    probes = sum(reading.probes for reading in seen)
    last = max(reading.ts for reading in seen)
    checks = ", ".join(reading.check for reading in seen)
    return f"isolation probe {now - last:.0f} s ago: {probes} probes ({checks})"
