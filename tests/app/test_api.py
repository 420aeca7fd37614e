"""What programs ask of the app: alerts of another Alertmanager come in, bad ones are refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.api import ROUTES
from app.runtime import Runtime, set_runtime
from probe.notify.alertmanager import MAX_BYTES
from probe.store import Store

Use = Callable[..., Runtime]
ALERT = {
    "status": "firing",
    "labels": {"alertname": "VLLMPreemptionsHigh", "job": "vllm", "severity": "page"},
    "annotations": {"summary": "vLLM preempts a lot"},
    "startsAt": "2026-11-30T03:00:00Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "http://prometheus:9090/graph",
}


def payload(*alerts: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "receiver": "kvoncall", "alerts": list(alerts)}).encode()


@pytest.fixture
def client(seeded: Store, use: Use) -> TestClient:
    use(seeded)
    return TestClient(Starlette(routes=ROUTES))


def test_an_alert_is_kept_once_with_our_runbook(client: TestClient, seeded: Store) -> None:
    for _ in range(2):
        assert client.post("/api/alertmanager", content=payload(ALERT)).json() == {"received": 1}
    (kept,) = seeded.imported.list()
    assert (kept.name, kept.status, kept.runbook) == ("VLLMPreemptionsHigh", "firing", "eviction-storm")
    resolved = {**ALERT, "status": "resolved", "endsAt": "2026-11-30T03:10:00Z"}
    client.post("/api/alertmanager", content=payload(resolved))
    assert [alert.status for alert in seeded.imported.list()] == ["resolved"]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"not json", 400, "not JSON"),
        (b"[]", 400, "not an Alertmanager webhook"),
        (payload({"labels": {}}), 400, "label"),
        (b"x" * (MAX_BYTES + 1), 413, "larger than"),
    ],
)
def test_bad_payloads_are_refused(client: TestClient, seeded: Store, content: bytes, code: int, says: str) -> None:
    answer = client.post("/api/alertmanager", content=content)
    assert answer.status_code == code
    assert says in answer.json()["error"]
    assert seeded.imported.list() == []


def test_a_token_is_asked_for_where_one_is_set(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_WEBHOOK_TOKEN", "s3cret")
    assert client.post("/api/alertmanager", content=payload(ALERT)).status_code == 401
    wrong = {"Authorization": "Bearer other"}
    assert client.post("/api/alertmanager", content=payload(ALERT), headers=wrong).status_code == 401
    right = {"Authorization": "Bearer s3cret"}
    assert client.post("/api/alertmanager", content=payload(ALERT), headers=right).status_code == 200


def test_own_metrics_are_what_prometheus_reads(client: TestClient) -> None:
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        answer = client.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        assert 'kvoncall_targets{engine="kvoncall"} 1.0' in answer.text
        assert ("openmetrics" in answer.headers["content-type"]) == bool(accept)
    set_runtime(None)
    assert client.get("/metrics").status_code == 503


def test_without_a_runtime_the_sender_may_try_again(client: TestClient) -> None:
    set_runtime(None)
    assert client.post("/api/alertmanager", content=payload(ALERT)).status_code == 503
