"""What a replay's phase measured, and the conditions judged on it. Data and pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from probe.load.generator import LoadOptions
from probe.load.report import LoadReport
from probe.load.traces import LoadRequest


@dataclass(frozen=True)
class LoadPlan:
    """What a scenario sends: `smoke` first (must pass, or the incident is another one), then `requests`.

    quiet_s: how long nothing is sent afterwards, where that is when the incident shows.
    """

    requests: tuple[LoadRequest, ...]
    options: LoadOptions
    description: str
    smoke: tuple[LoadRequest, ...] = ()
    quiet_s: float = 0.0

    @property
    def longest_request_tokens(self) -> int:
        """Prompt + output tokens of the longest request."""
        return max(r.prompt_tokens + r.max_tokens for r in self.requests)


@dataclass(frozen=True)
class Observation:
    """What one phase (before or after the remedy) measured. Times are Unix seconds.

    `metrics` are increases and peaks of the target's own samples in the window. `alert` is the scenario's alert as
    JSON data, or None when it did not fire in the phase; `refired` tells whether it fired in the phase at all.
    `quality` is the result of a quality run (`probe.quality.score.summarize`), with that of full precision beside it.
    `isolation` counts what an attack got (`probe.replay.isolation`).
    """

    started_at: float
    ended_at: float
    smoke: LoadReport | None = None
    load: LoadReport | None = None
    engine_exit: Mapping[str, Any] | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    alert: Mapping[str, Any] | None = None
    refired: bool = False
    quality: Mapping[str, Any] | None = None
    isolation: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "window": [self.started_at, self.ended_at],
            "load": self.load.to_dict() if self.load else None,
            "metrics": dict(self.metrics),
            "engine_exit": dict(self.engine_exit) if self.engine_exit else None,
        }


@dataclass(frozen=True)
class Check:
    """One condition of "reproduced" or "verified", with what was measured."""

    name: str
    ok: bool
    measured: Any
    expected: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def alert_fired(observation: Observation, rule: str) -> Check:
    """The monitor's own evaluation made the alert fire."""
    alert = observation.alert
    measured = "did not fire" if alert is None else f"fired: {alert['summary']}"
    return Check(f"alert {rule} fired", alert is not None, measured, "firing")


def alert_resolved(observation: Observation, rule: str) -> Check:
    """The alert of the incident resolved by itself and did not fire again under the same load."""
    state = observation.alert["state"] if observation.alert else "never fired"
    ok = state == "resolved" and not observation.refired
    return Check(f"alert {rule} resolved", ok, "fired again" if observation.refired else state, "resolved")


def all_completed(observation: Observation) -> Check:
    """Every request of the load was sent and ended properly."""
    load = observation.load
    if load is None:
        return Check("no failed requests", False, "the load was not sent", "0 failed")
    measured = f"{load.failed} failed, {load.not_sent} not sent, {load.completed} of {load.total} completed"
    ok = load.total > 0 and load.failed == 0 and load.not_sent == 0
    return Check("no failed requests", ok, measured, "0 failed")
