"""What a scrape tells besides its values: that a target stopped answering, came back, or began anew.

One `ChangeDetector` per target turns observations into findings, each reported once, not once a scrape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from probe.collect.scrape import Scrape
from probe.store import Sample, Target

START_TIME = "process_start_time_seconds"
START_TOLERANCE_S = 1.0  # exporters round the start time


@dataclass(frozen=True)
class Finding:
    """An event to write about a target."""

    kind: str
    message: str
    severity: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """One attempt to read a target, at `ts`: either `scrape` or the sentence in `error`.

    `duration_s`: how long reading took. `known` False: nothing is known of the target itself, because the Prometheus
    server that scrapes it did not answer; then there is no sample, not even `up`. `extra` and `found` are samples and
    findings of other sources at the same moment (NVML).
    """

    target: Target
    ts: float
    scrape: Scrape | None
    error: str | None = None
    duration_s: float = 0.0
    known: bool = True
    extra: tuple[Sample, ...] = ()
    found: tuple[Finding, ...] = ()

    @property
    def samples(self) -> list[Sample]:
        """What to store: what was read, and about the attempt itself what Prometheus writes: `up` and its company."""
        if not self.known:
            return list(self.extra)
        name, ts, read = self.target.name, self.ts, self.scrape
        return [
            *(read.samples if read else ()),
            *self.extra,
            *([Sample(name, "required_metrics_missing", {}, ts, float(len(read.missing)))] if read else []),
            Sample(name, "scrape_duration_seconds", {}, ts, self.duration_s),
            Sample(name, "scrape_samples", {}, ts, float(read.exposed if read else 0)),
            Sample(name, "up", {}, ts, 0.0 if read is None else 1.0),
        ]


class ChangeDetector:
    """Remembers the last values of one target's counters, its start time, and what went wrong since."""

    def __init__(self, counters: frozenset[str]) -> None:
        self._counters = counters
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._started: float | None = None
        self._errors: set[str] = set()  # said since the last good scrape
        self._missing: tuple[str, ...] = ()
        self._refused: frozenset[str] = frozenset()
        self.last_good: float | None = None  # time of the last successful scrape

    def seed(self, samples: Iterable[Sample]) -> None:
        """The newest stored samples, so that a restart while nobody watched is seen too."""
        found = [s for s in samples if s.metric in self._counters or s.metric == START_TIME]
        self._remember(found)
        self.last_good = max((s.ts for s in found), default=None)

    def observe(self, seen: Observation) -> list[Finding]:
        """Findings of one observation."""
        return [*seen.found, *self._findings(seen)]

    def _findings(self, seen: Observation) -> list[Finding]:
        if seen.scrape is None:
            error = seen.error or "The scrape failed."
            if error in self._errors:
                return []
            self._errors.add(error)
            return [Finding("scrape_error", error, "warning")]
        findings = []
        if self._errors:
            findings.append(Finding("scrape_recovered", f"{seen.target.url} answers again.", "info"))
            self._errors.clear()
        findings += self._restarts(seen.scrape.samples)
        findings += self._missing_metrics(seen.scrape)
        findings += self._refused_samples(seen.scrape)
        self._remember(seen.scrape.samples)
        self.last_good = seen.ts
        return findings

    def _restarts(self, samples: list[Sample]) -> list[Finding]:
        findings = []
        now = next((s.value for s in samples if s.metric == START_TIME), None)
        before = self._started
        if now is not None and before is not None and abs(now - before) > START_TOLERANCE_S:
            data: dict[str, Any] = {"unexpected": True, "started_before": before, "started_now": now}
            message = "The engine's process was replaced by a new one that nobody announced."
            findings.append(Finding("engine_restart", message, "critical", data))
        resets: dict[str, list[float]] = {}
        for sample in samples:
            old = self._values.get(_key(sample))
            if old is not None and sample.metric in self._counters and sample.value < old:
                sums = resets.setdefault(sample.metric, [0.0, 0.0])
                sums[0] += old
                sums[1] += sample.value
        if resets:
            shown = [m for m in sorted(resets) if not m.endswith(("_bucket", "_sum", "_count"))] or sorted(resets)
            words = ", ".join(f"{m} {resets[m][0]:g} to {resets[m][1]:g}" for m in shown[:4])
            more = f" and {len(resets) - len(shown[:4])} more" if len(resets) > len(shown[:4]) else ""
            message = f"Counters started again from 0 ({words}{more})."
            changes = {m: {"from": old, "to": new} for m, (old, new) in sorted(resets.items())}
            findings.append(Finding("counter_reset", message, "info", {"metrics": changes}))
        return findings

    def _missing_metrics(self, scrape: Scrape) -> list[Finding]:
        if scrape.missing == self._missing:
            return []
        self._missing = scrape.missing
        if not scrape.missing:
            return []
        names = ", ".join(scrape.missing)
        message = f"The target answers but does not expose {names}: alerts that need them have no data."
        return [Finding("metrics_missing", message, "warning", {"missing": list(scrape.missing)})]

    def _refused_samples(self, scrape: Scrape) -> list[Finding]:
        new = {why: count for why, count in scrape.refused.items() if why not in self._refused}
        self._refused = frozenset(scrape.refused)
        if not new:
            return []
        message = f"Samples of the target were left out: {'; '.join(sorted(new))}."
        return [Finding("samples_refused", message, "warning", {"refused": new})]

    def _remember(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.metric in self._counters:
                self._values[_key(sample)] = sample.value
            elif sample.metric == START_TIME:
                self._started = sample.value


def _key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.metric, tuple(sorted(sample.labels.items()))
