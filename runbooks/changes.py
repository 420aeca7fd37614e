"""A recommended flag change, a refused one, and the draft that collects both while a runbook's arithmetic runs.

Every change passes `gate.refusal_reason`; what it refuses is kept with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runbooks.engine_names import query_for, vllm_flag
from runbooks.facts import TargetFacts
from runbooks.flags import needs_version_check
from runbooks.gate import needs_restart, refusal_reason, spelled
from runbooks.risks import risk_of

__all__ = ["Draft", "FlagChange", "Recommendation", "Refusal", "refusal_reason"]


@dataclass(frozen=True)
class FlagChange:
    """One flag, from its value in force to a computed one. `to` None means: remove the flag (back to its default).

    `why` holds the arithmetic; `verify` is a query in PromQL over the engine's own metric names, or a command where no
    metric of an engine can tell. `expected` is the effect with its size, `risk` what may go wrong and how it shows.
    """

    flag: str
    from_: Any
    to: Any
    why: str
    expected: str
    cost: str
    verify: str
    restart: bool = True
    risk: str = ""

    @property
    def rollback(self) -> str:
        """How to undo it."""
        if not self.flag.startswith("--"):
            return f"restart with {self.flag}: {self.from_} in the YAML, or without it where it was not there"
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
            "risk": self.risk,
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

    `changes` belong together, in this order. `alternatives` are single changes in their place, each valid alone.
    `steps`: what has to be done besides, that is no flag of the engine.
    """

    runbook: str
    changes: tuple[FlagChange, ...]
    refused: tuple[Refusal, ...]
    missing: tuple[str, ...]
    summary: str
    steps: tuple[str, ...] = ()
    alternatives: tuple[FlagChange, ...] = ()

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
            "alternatives": [c.to_dict() for c in self.alternatives],
        }


@dataclass
class Draft:
    """Collects changes through the gate while a runbook's arithmetic runs."""

    runbook: str
    facts: TargetFacts
    changes: list[FlagChange] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    alternatives: list[FlagChange] = field(default_factory=list)

    @property
    def planned(self) -> dict[str, Any]:
        """Flags in force once the changes proposed so far are made."""
        return {**self.facts.flags, **{change.flag: change.to for change in self.changes}}

    def propose(
        self, flag: str, to: Any, *, why: str, expected: str, cost: str, verify: str, risk: str | None = None
    ) -> bool:
        """Adds the change unless the gate refuses it; tells whether it was added."""
        change = self._through_gate(flag, to, self.planned, why, expected, cost, verify, risk)
        if change is not None:
            self.changes.append(change)
        return change is not None

    def offer(
        self, flag: str, to: Any, *, why: str, expected: str, cost: str, verify: str, risk: str | None = None
    ) -> bool:
        """Adds it as something to do in place of the changes, unless the gate refuses it."""
        change = self._through_gate(flag, to, self.facts.flags, why, expected, cost, verify, risk)
        if change is not None:
            self.alternatives.append(change)
        return change is not None

    def _through_gate(
        self, flag: str, to: Any, flags: Mapping[str, Any], why: str, expected: str, cost: str, verify: str,
        risk: str | None,
    ) -> FlagChange | None:  # fmt: skip
        facts = self.facts
        to = spelled(facts, flag, to)
        reason = refusal_reason(self.runbook, facts, flag, to, planned=flags)
        if reason is not None:
            self.refuse(flag, to, reason)
            return None
        caution = needs_version_check(facts.engine, facts.version, flag, to)
        return FlagChange(
            flag=flag,
            from_=facts.flags.get(flag),
            to=to,
            why=why,
            expected=expected,
            cost=f"{cost}; {caution}" if caution else cost,
            verify=query_for(facts.engine, facts.version, verify),
            restart=needs_restart(facts, flag),
            risk=risk if risk is not None else risk_of(vllm_flag(facts.engine, flag), to),
        )

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
            self.runbook, tuple(self.changes), tuple(self.refused), tuple(self.missing), summary, tuple(self.steps),
            tuple(self.alternatives),
        )  # fmt: skip
