"""An alert's id closes the circle: rule, runbook and, where one exists, the replay that makes it fire."""

from __future__ import annotations

import pytest

from probe.alerts.rule import Rule
from probe.alerts.rules import DEFAULT_RULES
from probe.replay.scenario import list_scenarios
from runbooks.load import get_runbook, list_runbooks


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.id)
def test_every_rule_has_its_runbook(rule: Rule) -> None:
    runbook = get_runbook(rule.runbook)
    assert runbook.id == rule.id
    assert runbook.alert == rule.id
    assert runbook.severity == rule.severity
    assert set(runbook.meta["inhibited_by"]) == set(rule.inhibited_by)


def test_every_runbook_has_its_rule_or_is_for_incidents_no_rule_can_see() -> None:
    assert {runbook.id for runbook in list_runbooks() if runbook.alert} == {rule.id for rule in DEFAULT_RULES}
    assert all(runbook.incidents for runbook in list_runbooks() if runbook.alert is None)


def test_every_replay_names_a_rule_and_its_runbook() -> None:
    rules = {rule.id for rule in DEFAULT_RULES}
    for scenario in list_scenarios():
        assert scenario.rule in rules
        assert scenario.rule == scenario.runbook
        assert get_runbook(scenario.runbook).meta["drill"]["replay"] == scenario.id


def test_a_drill_named_by_a_runbook_exists() -> None:
    replays = {scenario.id for scenario in list_scenarios()}
    for runbook in list_runbooks():
        drill = runbook.meta.get("drill") or {}
        assert drill.get("replay") is None or drill["replay"] in replays
