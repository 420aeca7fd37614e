"""A recommended flag change, a refused one, and the gate every change must pass.

The gate refuses what does not exist for the target, what changes nothing, and what points the wrong way for the
runbook at hand; each refusal says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runbooks.facts import TargetFacts
from runbooks.flags import needs_version_check, why_absent, why_value_absent
from runbooks.isolation_flags import why_weaker
from runbooks.kv_dtypes import why_worse
from runbooks.wrong_way import WRONG_WAY


@dataclass(frozen=True)
class FlagChange:
    """One flag, from its value in force to a computed one. `to` None means: remove the flag (back to its default).

    `why` holds the arithmetic; `verify` is a query in PromQL over the engine's own metric names, or a command where no
    metric of an engine can tell.
    """

    flag: str
    from_: Any
    to: Any
    why: str
    expected: str
    cost: str
    verify: str
    restart: bool = True

    @property
    def rollback(self) -> str:
        """How to undo it."""
        if self.from_ is None:
            return f"restart without {self.flag}"
        if isinstance(self.from_, bool):
            return f"restart with {self.flag if self.from_ else self.flag.replace('--', '--no-', 1)}"
        return f"restart with {self.flag} {self.from_}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the key `from`."""
        return {
            "flag": self.flag,
            "from": self.from_,
            "to": self.to,
            "why": self.why,
            "expected": self.expected,
            "cost": self.cost,
            "restart": self.restart,
            "verify": self.verify,
            "rollback": self.rollback,
        }


@dataclass(frozen=True)
class Refusal:
    """A change that was considered and is not recommended."""

    flag: str
    to: Any
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"flag": self.flag, "to": self.to, "reason": self.reason}


@dataclass(frozen=True)
class Recommendation:
    """What to change, what not and why, and which facts were missing to say more.

    `steps`: what has to be done besides, that is no flag of the engine.
    """

    runbook: str
    changes: tuple[FlagChange, ...]
    refused: tuple[Refusal, ...]
    missing: tuple[str, ...]
    summary: str
    steps: tuple[str, ...] = ()

    def flag_values(self) -> dict[str, Any]:
        """`{"--flag": new value or None}`, as `engine.config.apply_changes` takes it."""
        return {change.flag: change.to for change in self.changes}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "runbook": self.runbook,
            "summary": self.summary,
            "changes": [c.to_dict() for c in self.changes],
            "refused": [r.to_dict() for r in self.refused],
            "missing": list(self.missing),
            "steps": list(self.steps),
        }


def refusal_reason(runbook: str, facts: TargetFacts, flag: str, to: Any) -> str | None:
    """Why this change must not be recommended for this target (None: it may).

    Also the check of an operator's own idea: "would lowering --gpu-memory-utilization help?".
    """
    absent = why_absent(facts.engine, facts.version, flag)
    if absent is None and to is not None:
        absent = why_value_absent(facts.engine, facts.version, flag, to)
    if absent is not None:
        return absent
    now = facts.flags.get(flag)
    if flag in facts.flags and now == to:
        return f"no change: {flag} is {'unset' if now is None else now} already"
    wrong = WRONG_WAY.get((runbook, flag))
    if wrong is not None and isinstance(now, int | float) and isinstance(to, int | float):
        direction, reason = wrong
        if (to > now) == (direction > 0):
            return reason
    if (runbook, flag) == ("kv-quality-drop", "--kv-cache-dtype") and not _measured_to_hold(facts, flag, to):
        return why_worse(now, to)
    return why_weaker(flag, now, to) if runbook == "prefix-isolation-breach" else None


def _measured_to_hold(facts: TargetFacts, flag: str, to: Any) -> bool:
    """A measurement on the target's own model outweighs what is known of formats in general."""
    return any(c.holds and c.flags.get(flag) == to for c in facts.quality_candidates)


@dataclass
class Draft:
    """Collects changes through the gate while a runbook's arithmetic runs."""

    runbook: str
    facts: TargetFacts
    changes: list[FlagChange] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def propose(self, flag: str, to: Any, *, why: str, expected: str, cost: str, verify: str) -> bool:
        """Adds the change unless the gate refuses it; tells whether it was added."""
        reason = refusal_reason(self.runbook, self.facts, flag, to)
        if reason is not None:
            self.refuse(flag, to, reason)
            return False
        caution = needs_version_check(self.facts.engine, self.facts.version, flag, to)
        cost = f"{cost}; {caution}" if caution else cost
        self.changes.append(FlagChange(flag, self.facts.flags.get(flag), to, why, expected, cost, verify))
        return True

    def refuse(self, flag: str, to: Any, reason: str) -> None:
        """Notes a change that is not recommended."""
        self.refused.append(Refusal(flag, to, reason))

    def step(self, what: str) -> None:
        """Notes what has to be done besides, that is no flag."""
        self.steps.append(what)

    def lacks(self, what: str) -> None:
        """Notes a fact that would have allowed more advice."""
        if what not in self.missing:
            self.missing.append(what)

    def done(self, summary: str) -> Recommendation:
        """The finished recommendation; one without changes says what was missing."""
        if not self.changes and self.missing:
            summary = f"{summary}. Missing: {'; '.join(self.missing)}"
        return Recommendation(
            self.runbook, tuple(self.changes), tuple(self.refused), tuple(self.missing), summary, tuple(self.steps)
        )
