"""What an Alertmanager posts, real and malformed, and which runbook is put beside it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from probe.alerts.rules import DEFAULT_RULES
from probe.export.alerts import alert_name
from probe.notify.alertmanager import MAX_ALERTS, MAX_BYTES, PayloadError, parse_alertmanager
from probe.notify.message import Message, describe, payload
from probe.notify.runbooks import WORDS, runbook_for
from probe.store import Store

from .conftest import START, Hook, move

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.prometheus
def test_a_real_alertmanager_says_what_we_read_and_write(tmp_path: Path, hook: Hook, store: Store) -> None:
    """Its webhook call is parsed, and has the keys that ours has."""
    program = shutil.which("prometheus-alertmanager")
    if program is None and os.environ.get("CI") != "true":
        pytest.skip("prometheus-alertmanager is not installed")
    assert program is not None
    config = f"""
route: {{receiver: kv, group_by: [target], group_wait: 0s}}
receivers: [{{name: kv, webhook_configs: [{{url: "{hook.url}"}}]}}]
"""
    (tmp_path / "am.yml").write_text(config)
    port = free_port()
    arguments = [f"--config.file={tmp_path / 'am.yml'}", f"--storage.path={tmp_path / 'data'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deliver(port, [{"labels": {"alertname": "KVCacheFull", "target": "a", "job": "vllm"}, "annotations": {}}])
        deadline = time.monotonic() + 60
        while not hook.posts:
            assert process.poll() is None
            assert time.monotonic() < deadline, "Alertmanager sent nothing"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(30)
    theirs = hook.posts[0][1]
    (alert,) = parse_alertmanager(json.dumps(theirs).encode())
    assert (alert.name, alert.status, alert.runbook) == ("KVCacheFull", "firing", "kv-saturated")
    ours = payload(Message("kv", {"target": "a"}, [describe(move(store, "oom", "firing", START), "firing", "")]))
    assert ours.keys() == theirs.keys()
    assert ours["alerts"][0].keys() == theirs["alerts"][0].keys()


def deliver(port: int, alerts: list[dict[str, Any]]) -> None:
    """Post alerts to an Alertmanager as soon as it listens."""
    url, deadline = f"http://127.0.0.1:{port}/api/v2/alerts", time.monotonic() + 60
    request = urllib.request.Request(url, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "Alertmanager does not listen"
            time.sleep(0.05)
