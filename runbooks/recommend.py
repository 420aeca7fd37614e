"""Flag changes for a runbook, computed from a target's own numbers. Pure: facts in, recommendation out."""

from __future__ import annotations

from collections.abc import Callable

from runbooks.changes import FlagChange, Recommendation, Refusal, refusal_reason
from runbooks.facts import TargetFacts, TrafficFacts, from_facts
from runbooks.isolation_facts import IsolationFacts
from runbooks.load import RunbookError
from runbooks.quality_candidates import QualityCandidate
from runbooks.remedies import (
    eviction_storm,
    kv_quality_drop,
    kv_saturated,
    oom,
    prefix_isolation_breach,
    target_missing,
)

__all__ = [
    "FlagChange",
    "IsolationFacts",
    "QualityCandidate",
    "Recommendation",
    "Refusal",
    "TargetFacts",
    "TrafficFacts",
    "from_facts",
    "recommend",
    "refusal_reason",
]

_ADVISE: dict[str, Callable[[TargetFacts], Recommendation]] = {
    "eviction-storm": eviction_storm.advise,
    "kv-quality-drop": kv_quality_drop.advise,
    "kv-saturated": kv_saturated.advise,
    "oom": oom.advise,
    "prefix-isolation-breach": prefix_isolation_breach.advise,
    "target-missing": target_missing.advise,
}


def recommend(runbook_id: str, facts: TargetFacts) -> Recommendation:
    """The changes a runbook advises for this target; raises `RunbookError` for a runbook that computes none."""
    if runbook_id not in _ADVISE:
        raise RunbookError(
            f"runbook {runbook_id!r} computes no recommendation; there are: {', '.join(sorted(_ADVISE))}"
        )
    return _ADVISE[runbook_id](facts)
