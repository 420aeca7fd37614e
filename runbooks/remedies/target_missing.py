"""Target missing: nobody answers. No flag repairs that, so none is recommended."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts


def advise(facts: TargetFacts) -> Recommendation:
    """No changes: the `target-missing` runbook is about finding out why nobody answers."""
    return Draft("target-missing", facts).done(
        "No flag change helps: find out whether the process, the network or the discovery is gone"
    )
