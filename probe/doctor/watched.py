"""What the watch of a stored target knows beyond the doctor's short window: the alerts in force.

A rule that compares with a day before, or counts an exit, cannot be judged in seconds; the watch did it over the whole
window.
"""

from __future__ import annotations

import dataclasses
import time

from probe.alerts.rules import DEFAULT_RULES
from probe.doctor.finding import Evidence, Finding, ranked
from probe.doctor.observed import Observed

_CAUSES = {"target-missing": ("oom",)}  # a finding, and what explains it though no rule inhibits it


def with_alerts(found: tuple[Finding, ...], observed: Observed) -> tuple[Finding, ...]:
    """The findings with those of alerts that fire on the target."""
    serious = {one.id for one in found if one.severity != "info"}
    added = [one for one in _of_alerts(observed) if one.id not in serious]
    ids = serious | {one.id for one in added}
    kept = [_explained(one, ids) for one in found if one.id not in ids - serious]
    return ranked([*kept, *added])


def _explained(finding: Finding, ids: set[str]) -> Finding:
    cause = next((cause for cause in _CAUSES.get(finding.id, ()) if cause in ids), None)
    return finding if cause is None else dataclasses.replace(finding, explained_by=cause)


def _of_alerts(observed: Observed) -> list[Finding]:
    rules = {rule.id: rule for rule in DEFAULT_RULES}
    firing = {alert.rule for alert in observed.firing}
    found = []
    for alert in observed.firing:
        rule = rules.get(alert.rule)
        if rule is None:
            continue
        age = time.time() - (alert.firing_at or alert.pending_at)
        found.append(
            Finding(
                id=rule.id,
                severity=rule.severity,
                title=rule.title,
                summary=alert.summary,
                evidence=(
                    Evidence(rule.id, alert.summary, alert.value, alert.numerator, alert.denominator, alert.window_s),
                ),
                confidence="high",
                why=f"the watch judges it over its whole window of {alert.window_s:g} s; it has fired for {age:.0f} s",
                look_alikes=(),
                runbook=rule.runbook,
                explained_by=next((other for other in rule.inhibited_by if other in firing), None),
            )
        )
    return found
