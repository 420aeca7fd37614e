"""What an Alertmanager posts, real and malformed, and which runbook is put beside it."""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from probe.alerts.rules import DEFAULT_RULES
from probe.export.alerts import alert_name
from probe.notify.alertmanager import MAX_ALERTS, MAX_BYTES, PayloadError, parse_alertmanager
from probe.notify.matchers import LABELS, Matcher, narrowing
from probe.notify.message import Message, describe, payload
from probe.notify.muting import muted_by
from probe.notify.runbooks import WORDS, runbook_for
from probe.store import Alert, Silence, Store

from .conftest import ALERT, RULES, START, Alertmanager, Hook, move

Start = Callable[[str], Alertmanager]

ENTRY = {
    "status": "firing",
    "labels": {"alertname": "VLLMPreemptionsHigh", "job": "vllm", "severity": "page"},
    "annotations": {"summary": "many preemptions"},
    "startsAt": "2026-11-30T04:00:00.123456789Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "http://prometheus/graph?g0.expr=x",
    "fingerprint": "0a1b2c3d4e5f6a7b",
}


def post(**changes: Any) -> bytes:
    entry = {**ENTRY, **changes}
    return json.dumps({"version": "4", "receiver": "kv", "externalURL": "http://am", "alerts": [entry]}).encode()


def test_a_webhook_call_is_read() -> None:
    (alert,) = parse_alertmanager(post(), now=START)
    assert (alert.fingerprint, alert.status, alert.name) == ("0a1b2c3d4e5f6a7b", "firing", "VLLMPreemptionsHigh")
    assert (alert.starts_at, alert.ends_at, alert.received_at) == (1_796_011_200.123456, None, START)
    assert (alert.runbook, alert.receiver, alert.external_url) == ("eviction-storm", "kv", "http://am")
    (over,) = parse_alertmanager(post(status="resolved", endsAt="2026-11-30T05:00:00+01:00"), now=START)
    assert (over.status, over.ends_at) == ("resolved", 1_796_011_200.0)
    (nameless,) = parse_alertmanager(post(fingerprint=None), now=START)
    assert len(nameless.fingerprint) == 16


def test_links_that_are_not_http_and_control_characters_are_left_out() -> None:
    content = post(generatorURL="javascript:alert(1)", annotations={"summary": "a\x00b\ud800" + "x" * 9_000})
    (alert,) = parse_alertmanager(content, now=START)
    assert alert.generator_url == ""
    assert alert.annotations["summary"].startswith("a\ufffdb\ufffd")
    assert len(alert.annotations["summary"]) == 4_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "no list"),
        (b'{"alerts": {}}', "no list"),
        (b'{"alerts": [1]}', "is not an object"),
        (post(labels={}), "has no labels"),
        (post(labels=["a"]), "labels are not an object"),
        (post(labels={"a": 1}), "not all text"),
        (post(labels={str(n): "" for n in range(101)}), "more than 100"),
        (post(status="maybe"), "neither firing nor resolved"),
        (post(startsAt="yesterday"), "not RFC 3339"),
        (post(startsAt="2026-11-30T04:00:00"), "without a time zone"),
        (b'{"version": "5", "alerts": []}', "version is 5"),
        (json.dumps({"alerts": [ENTRY] * (MAX_ALERTS + 1)}).encode(), "more than 1000 alerts"),
        (b" " * (MAX_BYTES + 1), "larger than 1024 KiB"),
    ],
)
def test_what_is_no_webhook_is_refused_in_one_sentence(content: bytes, words: str) -> None:
    with pytest.raises(PayloadError, match=words) as refused:
        parse_alertmanager(content)
    assert str(refused.value).count(".") <= 2


def test_what_we_send_we_can_read(store: Store) -> None:
    alert = move(store, "oom", "firing", START)
    told = Message("kv", {"target": "a"}, [describe(alert, "firing", "http://kv")], "http://kv")
    (read,) = parse_alertmanager(json.dumps(payload(told)).encode(), now=START)
    assert (read.runbook, read.status, read.starts_at) == ("oom", "firing", START)
    assert read.labels["target"] == "a"


@pytest.mark.parametrize(
    ("labels", "annotations", "runbook"),
    [
        ({"alertname": "X", "kvoncall_rule": "kv-saturated"}, {}, "kv-saturated"),
        ({"alertname": "X"}, {"runbook_url": "https://wiki/runbooks/eviction-storm.md"}, "eviction-storm"),
        ({"alertname": "X"}, {"runbook_url": "http://kv/runbooks?runbook=oom&alert=3"}, "oom"),
        ({"alertname": "KvoncallTargetMissing"}, {}, "target-missing"),
        ({"alertname": "vLLMKVCacheUsageHigh"}, {}, "kv-saturated"),
        ({"alertname": "SGLangRetractions"}, {}, "eviction-storm"),
        ({"alertname": "LLMTargetsMissing"}, {}, "target-missing"),
        ({"alertname": "InstanceDown", "job": "vllm-prod"}, {}, "target-missing"),
        ({"alertname": "ContainerOOMKilled", "container": "sglang"}, {}, "oom"),
        ({"alertname": "InstanceDown", "job": "node"}, {}, None),
        ({"alertname": "KubePodNotReady", "pod": "web-1"}, {}, None),
        ({"alertname": "PodOOMKilled", "pod": "web-1"}, {}, None),
        ({"alertname": "ConsulKVUsageHigh"}, {}, None),
        ({"alertname": "VLLMCertificateExpires"}, {}, None),
    ],
)
def test_the_runbook_that_fits_or_none(
    labels: dict[str, str], annotations: dict[str, str], runbook: str | None
) -> None:
    assert runbook_for(labels, annotations) == runbook


def test_our_own_rules_find_their_pages_under_their_exported_names() -> None:
    for rule in DEFAULT_RULES:
        assert runbook_for({"alertname": alert_name(rule.id)}) == rule.runbook
    assert {page for page, _ in WORDS} == {rule.id for rule in DEFAULT_RULES}


@pytest.mark.prometheus
def test_a_real_alertmanager_says_what_we_read_and_write(alertmanager: Start, hook: Hook, store: Store) -> None:
    """Its webhook call is parsed, and has the keys that ours has."""
    real = alertmanager(f"""
route: {{receiver: kv, group_by: [target], group_wait: 0s}}
receivers: [{{name: kv, webhook_configs: [{{url: "{hook.url}"}}]}}]
""")
    real.post("/api/v2/alerts", [{"labels": {"alertname": "KVCacheFull", "target": "a", "job": "vllm"}}])
    deadline = time.monotonic() + 60
    while not hook.posts:
        assert time.monotonic() < deadline, "Alertmanager sent nothing"
        time.sleep(0.05)
    theirs = hook.posts[0][1]
    (alert,) = parse_alertmanager(json.dumps(theirs).encode())
    assert (alert.name, alert.status, alert.runbook) == ("KVCacheFull", "firing", "kv-saturated")
    ours = payload(Message("kv", {"target": "a"}, [describe(move(store, "oom", "firing", START), "firing", "")]))
    assert ours.keys() == theirs.keys()
    assert ours["alerts"][0].keys() == theirs["alerts"][0].keys()


@pytest.mark.prometheus
def test_a_real_alertmanager_mutes_what_we_mute(alertmanager: Start) -> None:
    """150 random alerts, 12 random silences, our inhibitions: the same alerts are silenced and inhibited."""
    draw, now = random.Random(6), time.time()
    inhibitions = [
        {"source_matchers": [f'rule="{cause}"'], "target_matchers": [f'rule="{rule.id}"'], "equal": ["target"]}
        for rule in RULES
        for cause in rule.inhibited_by
    ]
    real = alertmanager(
        json.dumps({"route": {"receiver": "x"}, "receivers": [{"name": "x"}], "inhibit_rules": inhibitions})
    )
    alerts = random_alerts(draw)
    real.post("/api/v2/alerts", [{"labels": {k: v for k, v in a.labels.items() if v}} for a in alerts])
    silences = [Silence(i, random_matchers(draw), now - 60, now + 600, "ann", "x", now) for i in range(12)]
    for silence in silences:
        matchers = [
            {"name": m.name, "value": m.value, "isRegex": "~" in m.op, "isEqual": not m.op.startswith("!")}
            for m in silence.matchers
        ]
        times = {"startsAt": rfc3339(silence.starts_at), "endsAt": rfc3339(silence.ends_at)}
        real.post("/api/v2/silences", {"matchers": matchers, **times, "createdBy": "ann", "comment": "x"})
    ours = {}
    for alert in alerts:
        silenced, inhibited = (muted_by(alert, known, alerts, RULES, now) for known in (silences, []))
        key = tuple(sorted((k, v) for k, v in alert.labels.items() if v))
        ours[key] = (silenced is not None and silenced.kind == "silence", inhibited is not None)
    deadline = time.monotonic() + 60
    while (theirs := mutes_of(real)) != ours and time.monotonic() < deadline:
        time.sleep(0.2)  # its inhibitor takes alerts in by itself
    assert ours == theirs
    assert set(ours.values()) == {(False, False), (False, True), (True, False), (True, True)}


def mutes_of(real: Alertmanager) -> dict[tuple[tuple[str, str], ...], tuple[bool, bool]]:
    """Labels -> (silenced, inhibited)."""
    return {
        tuple(sorted(alert["labels"].items())): (
            len(alert["status"]["silencedBy"]) > 0,
            len(alert["status"]["inhibitedBy"]) > 0,
        )
        for alert in real.get("/api/v2/alerts")
    }


def random_alerts(draw: random.Random) -> list[Alert]:
    """Firing alerts, no two with the same labels."""
    rules, targets = [r.id for r in RULES] + ["ttft-slo-burn"], [f"prod-{n}" for n in range(60)] + ["test-1", "a.b"]
    labels = {
        (rule, target): (draw.choice(["warning", "critical"]), draw.choice(["", "llama"]), draw.choice(["", "vllm"]))
        for rule, target in sorted({(draw.choice(rules), draw.choice(targets)) for _ in range(300)})
    }
    return [
        replace(ALERT, id=number, rule=rule, target=target, severity=severity, model=model, engine=engine)
        for number, ((rule, target), (severity, model, engine)) in enumerate(sorted(labels.items())[:150])
    ]


def random_matchers(draw: random.Random) -> tuple[Matcher, ...]:
    """One to three conditions that together name something."""
    values = {
        "=": ["oom", "kv-saturated", "prod-1", "warning", "llama", "a.b", ""],
        "=~": ["prod-[1-3].?", "a.b", "oom|eviction-storm", "(lla)?ma", "warn", ".*-storm", ".+"],
    }
    while True:
        found = tuple(
            Matcher(draw.choice(LABELS), op, draw.choice(values["=~" if "~" in op else "="]))
            for op in draw.choices(["=", "!=", "=~", "!~"], k=draw.randint(1, 3))
        )
        if narrowing(found):
            return found


def rfc3339(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
