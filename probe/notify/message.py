"""One message to one receiver, as Alertmanager's webhook payload (version 4) and as plain text."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from probe.store.records import Alert

NEVER = "0001-01-01T00:00:00Z"  # Alertmanager's way to say that an alert has no end yet


@dataclass(frozen=True)
class MessageAlert:
    """`status`: "firing" or "resolved". `is_news`: whether the message is sent because of it."""

    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: float
    ends_at: float | None
    link: str
    is_news: bool = True

    @property
    def fingerprint(self) -> str:
        """The same for the same labels, whatever the incident."""
        return fingerprint(self.labels)


@dataclass(frozen=True)
class Message:
    """Alerts of one group for one receiver; news first."""

    receiver: str
    group_labels: Mapping[str, str]
    alerts: Sequence[MessageAlert]
    base_url: str = ""

    @property
    def status(self) -> str:
        """ "firing" while any of its alerts fires."""
        return "firing" if any(alert.status == "firing" for alert in self.alerts) else "resolved"


def fingerprint(labels: Mapping[str, str]) -> str:
    """16 hexadecimal digits that stand for a set of labels."""
    return hashlib.sha256(json.dumps(sorted(labels.items())).encode()).hexdigest()[:16]


def describe(alert: Alert, status: str, base_url: str, *, is_news: bool = True) -> MessageAlert:
    """An alert of ours in the words of a message."""
    labels = {"alertname": alert.rule, "kvoncall_rule": alert.rule, "target": alert.target, "severity": alert.severity}
    labels |= {name: value for name, value in (("model_name", alert.model), ("engine", alert.engine)) if value}
    annotations = {"summary": alert.summary, "description": alert.coverage}
    if alert.replay_id is not None:
        annotations["drill"] = f"provoked by replay {alert.replay_id}"
    link = ""
    if base_url:
        link = f"{base_url}/alerts?{urlencode({'alert': alert.id})}"
        annotations["runbook_url"] = f"{base_url}/runbooks?{urlencode({'runbook': alert.runbook, 'alert': alert.id})}"
    ends_at = alert.resolved_at if status == "resolved" else None
    return MessageAlert(status, labels, annotations, alert.firing_at or alert.pending_at, ends_at, link, is_news)


def try_out(receiver: str, base_url: str, now: float) -> Message:
    """The message that a test sends."""
    labels = {"alertname": "kvoncall-test", "severity": "info"}
    annotations = {"summary": "This is a test of kvoncall's notifications; nothing is wrong."}
    return Message(receiver, {}, [MessageAlert("firing", labels, annotations, now, None, base_url)], base_url)


def payload(message: Message) -> dict[str, Any]:
    """What Alertmanager would post to a webhook."""
    return {
        "version": "4",
        "groupKey": f"{{}}:{json.dumps(dict(message.group_labels), sort_keys=True)}",
        "truncatedAlerts": 0,
        "status": message.status,
        "receiver": message.receiver,
        "groupLabels": dict(message.group_labels),
        "commonLabels": _shared([alert.labels for alert in message.alerts]),
        "commonAnnotations": _shared([alert.annotations for alert in message.alerts]),
        "externalURL": message.base_url,
        "alerts": [
            {
                "status": alert.status,
                "labels": dict(alert.labels),
                "annotations": dict(alert.annotations),
                "startsAt": _rfc3339(alert.starts_at),
                "endsAt": NEVER if alert.ends_at is None else _rfc3339(alert.ends_at),
                "generatorURL": alert.link,
                "fingerprint": alert.fingerprint,
            }
            for alert in message.alerts
        ],
    }


def title(message: Message) -> str:
    """One line: state, number of alerts, which, and where."""
    firing = [alert for alert in message.alerts if alert.status == "firing"]
    shown = firing or message.alerts
    names = list(dict.fromkeys(alert.labels.get("alertname", "") for alert in shown))
    where = ", ".join(value for value in message.group_labels.values() if value)
    head = f"[FIRING:{len(firing)}]" if firing else "[RESOLVED]"
    return f"{head} {', '.join(names)}{f' on {where}' if where else ''}"


def body(message: Message) -> str:
    """A paragraph for each alert."""
    parts = []
    for alert in message.alerts:
        word = alert.status if alert.is_news or alert.status != "firing" else "still firing"
        target = alert.labels.get("target", "")
        severity = alert.labels.get("severity", "")
        head = f"{word}: {alert.labels.get('alertname', '')}{f' on {target}' if target else ''} ({severity})"
        lines = [head, alert.annotations.get("summary", ""), alert.annotations.get("drill", "")]
        lines += [alert.link, alert.annotations.get("runbook_url", "")]
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(parts)


def _shared(mappings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first = mappings[0] if mappings else {}
    return {key: value for key, value in first.items() if all(m.get(key) == value for m in mappings)}


def _rfc3339(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
