"""Rule groups for Prometheus: what it records and alerts on, as a rule file or as a PrometheusRule object.

Recorded are the values that the rules compare, only where there is traffic enough to judge them; alerts do not read
them, so that either group can be taken alone.
"""

from __future__ import annotations

from typing import Any

from probe.export.alerts import ExportedAlert, Recording, Selection
from probe.export.promql import duration
from probe.export.yaml_text import yaml_text

RULES_FILE = "kvoncall-rules.yaml"


def rule_groups(selection: Selection) -> list[dict[str, Any]]:
    """The groups, as YAML data."""
    engine = selection.names.dialect.engine
    groups = [
        (f"kvoncall-{engine}-values", [_recording(recording) for recording in selection.recordings]),
        (f"kvoncall-{engine}-alerts", [_alert(alert, selection) for alert in selection.alerts]),
    ]
    return [{"name": name, "rules": rules} for name, rules in groups if rules]


def rules_text(selection: Selection) -> str:
    """A Prometheus rule file."""
    return yaml_text({"groups": rule_groups(selection)}, header(selection))


def prometheusrule_text(selection: Selection, *, name: str = "kvoncall") -> str:
    """The same rules for the Prometheus Operator."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"{name}-{selection.names.dialect.engine}", "labels": {"app.kubernetes.io/name": name}},
        "spec": {"groups": rule_groups(selection)},
    }
    return yaml_text(document, header(selection))


def header(selection: Selection) -> list[str]:
    """What a reader of the file has to know: for which engine it is, what is assumed, what is not in it."""
    lines = [f"Rules of kvoncall for {selection.dialect}, by `kvoncall rules export`. For Prometheus 2.42 or newer."]
    lines += selection.notes
    if selection.left_out:
        lines += ["Left out:"]
        lines += [f"  {rule_id}: {reason}." for rule_id, reason in selection.left_out]
    return lines


def _recording(recording: Recording) -> dict[str, Any]:
    return {"record": recording.name, "expr": _block(recording.expr), "labels": {"kvoncall_rule": recording.rule_id}}


def _alert(alert: ExportedAlert, selection: Selection) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": _block(alert.expr)}
    if alert.hold_s:
        rule["for"] = duration(alert.hold_s)
    if alert.keep_firing_s:
        rule["keep_firing_for"] = duration(alert.keep_firing_s)
    rule["labels"] = alert.labels
    rule["annotations"] = annotation_templates(alert, selection)
    return rule


def annotation_templates(alert: ExportedAlert, selection: Selection) -> dict[str, str]:
    """The annotation templates of an alert."""
    return {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": alert.runbook_url,
        "dashboard_url": f"{selection.options.base_url}/alerts",
    }


def _block(expr: str) -> str:
    return expr + "\n" if "\n" in expr else expr
