"""Alertmanager's part: who is told, in which groups, and which alerts explain others.

It loads as it is: receivers to fill in that tell nobody yet, and one that shows the alerts in this app. Inhibition is
that of the rules. It works between alerts with the same job and instance, so those that kvoncall itself exposes are in
none.
"""

from __future__ import annotations

from typing import Any

from probe.alerts.rules import DEFAULT_RULES
from probe.export.alerts import ALL_MISSING, Selection, alert_name
from probe.export.naming import RULE_BREACH, TARGET_LABELS
from probe.export.yaml_text import yaml_text

WEBHOOK_PATH = "/api/alertmanager"


def alertmanager_text(selection: Selection) -> str:
    """A configuration file that `amtool check-config` accepts."""
    comment = [
        f"Alertmanager configuration of kvoncall for {selection.dialect}, by `kvoncall rules export`.",
        "Give the receivers pager and chat your own configuration: as they are, they tell nobody. kvoncall shows the",
        "alerts with their runbooks. Where it was started with KVONCALL_WEBHOOK_TOKEN, its webhook needs",
        "http_config: {authorization: {credentials_file: …}}.",
    ]
    return yaml_text(_document(selection), comment)


def _document(selection: Selection) -> dict[str, Any]:
    grouping = {
        "group_by": list(TARGET_LABELS),
        "group_wait": "10s",
        "group_interval": "5m",
        "repeat_interval": "4h",
    }
    ours = 'kvoncall_rule=~".+"'
    routes = [
        {"matchers": [ours], "receiver": "kvoncall", "continue": True},
        {"matchers": [ours, 'severity="critical"'], "receiver": "pager"},
        {"matchers": [ours], "receiver": "chat"},
    ]
    webhook = {"url": selection.options.base_url + WEBHOOK_PATH, "send_resolved": True}
    return {
        "route": {"receiver": "chat", **grouping, "routes": routes},
        "inhibit_rules": inhibit_rules(selection),
        "receivers": [{"name": "pager"}, {"name": "chat"}, {"name": "kvoncall", "webhook_configs": [webhook]}],
    }


def inhibit_rules(selection: Selection) -> list[dict[str, Any]]:
    """One inhibition for each rule that explains others, of those that are exported."""
    exported = {a.rule_id for a in selection.alerts if RULE_BREACH not in a.rule.metrics}
    found: list[dict[str, Any]] = []
    for source in DEFAULT_RULES:
        explained = [r.id for r in DEFAULT_RULES if source.id in r.inhibited_by and r.id in exported]
        if source.id not in exported or not explained:
            continue
        found.append(
            {
                "source_matchers": [f'kvoncall_rule="{source.id}"'],
                "target_matchers": [f'kvoncall_rule=~"{"|".join(explained)}"'],
                "equal": list(TARGET_LABELS),
            }
        )
    if any(alert.name == ALL_MISSING for alert in selection.alerts):
        target = f'alertname="{alert_name("target-missing")}"'
        found.append({"source_matchers": [f'alertname="{ALL_MISSING}"'], "target_matchers": [target], "equal": ["job"]})
    return found
