"""What a diagnosis is made of: findings with their evidence, and what only would have looked the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]
Confidence = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low")


@dataclass(frozen=True)
class Evidence:
    """One figure of the window: what it is, as text and as numbers, and the window it is of."""

    name: str
    text: str
    value: float | None = None
    numerator: float | None = None
    denominator: float | None = None
    window_s: float | None = None


@dataclass(frozen=True)
class LookAlike:
    """Another cause that would have looked the same. `excluded`: True: `by` rules it out; False: `by` shows it is the
    case; None: nothing that was measured can tell, and `by` says what would."""

    name: str
    excluded: bool | None
    by: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `id` is an alert rule's, or one of the doctor's own; `runbook` a runbook's id.

    `explained_by`: the finding that this one may follow from. `next`: what to change, one line; `change` the same as
    data.
    """

    id: str
    severity: Severity
    title: str
    summary: str
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    why: str
    look_alikes: tuple[LookAlike, ...]
    runbook: str
    next: str = ""
    change: dict[str, Any] | None = None
    explained_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class NotJudged:
    """A rule that could not be judged, and what to collect for it."""

    id: str
    why: str


@dataclass(frozen=True)
class Examination:
    """Findings ranked, what was seen besides (`remarks`), what could not be judged, and why all of it may be thin."""

    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]
    not_judged: tuple[NotJudged, ...]
    thin: tuple[str, ...]  # why nothing can be said, and what to collect; empty: enough was seen
    judged: tuple[str, ...] = field(default_factory=tuple)

    @property
    def serious(self) -> tuple[Finding, ...]:
        """Findings that are more than a remark and follow from no other."""
        return tuple(f for f in self.findings if f.severity != "info" and f.explained_by is None)


def lower(confidence: Confidence) -> Confidence:
    """One step less sure."""
    return CONFIDENCES[min(CONFIDENCES.index(confidence) + 1, len(CONFIDENCES) - 1)]


def ranked(findings: list[Finding]) -> tuple[Finding, ...]:
    """What is explained by another comes last; else by severity, then by confidence."""
    return tuple(
        sorted(
            findings,
            key=lambda f: (f.explained_by is not None, SEVERITIES.index(f.severity), CONFIDENCES.index(f.confidence)),
        )
    )
