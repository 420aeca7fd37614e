"""Acknowledgements, silences, the outbox and imported alerts on both databases."""

from __future__ import annotations

from probe.store import AlertUpdate, ImportedAlert, Reading, Store
from probe.store.notifications import Outcome

NOW = 1_800_000_000.0


def update(state: str, at: float, *transitions: tuple[str, str]) -> AlertUpdate:
    reading = Reading("oom", "a", "breach", state, 1.0, 0.0, None, None, 60.0, "died", "1 of 1", at)
    return AlertUpdate(reading, "critical", 0.0, "oom", 0.0, transitions)


def test_an_alert_from_firing_to_resolved(store: Store) -> None:
    store.targets.upsert("a", url="http://x", kind="external", facts={"model": "llama"})
    for name in ("one", "two"):
        store.receivers.save({"name": name, "kind": "webhook", "url": "env:HOOK"})
    store.alerts.save([update("firing", NOW, ("inactive", "pending"), ("pending", "firing"))])
    (alert,) = store.alerts.active()
    assert (alert.model, alert.engine) == ("llama", "vllm")
    rows = store.notifications.relevant()
    assert [(n.receiver, n.transition, n.state) for n in rows] == [
        ("one", "firing", "pending"),
        ("two", "firing", "pending"),
    ]
    ids = [n.id for n in rows]
    store.notifications.add([(alert, "firing", "one")], NOW)  # is there already
    assert store.notifications.claim(ids, "me", NOW, 60.0) == frozenset(ids)
    assert store.notifications.claim(ids, "other", NOW + 30, 60.0) == frozenset()
    store.notifications.finish({ids[0]: Outcome("sent")}, "other", NOW + 1)  # not theirs
    store.notifications.finish({ids[0]: Outcome("sent")}, "me", NOW + 1)
    assert store.notifications.claim(ids, "other", NOW + 61, 60.0) == {ids[1]}
    store.notifications.finish({ids[1]: Outcome("pending", "HTTP 503", NOW + 90, True)}, "other", NOW + 62)
    again = store.notifications.list(receiver="two")[0]
    assert (again.state, again.tries, again.unconfirmed, again.due_at) == ("pending", 2, True, NOW + 90)
    store.alerts.acknowledge(alert.id, author="ann", reason="restarting", now=NOW + 2)
    store.alerts.save([update("resolved", NOW + 100, ("firing", "resolved"))])
    assert len(store.notifications.relevant()) == 4
    assert store.notifications.flushed() == {("one", '{"target": "a"}'): NOW + 1}
    store.notifications.drop({ids[1]: "resolved before it was sent"}, NOW + 101)
    assert store.notifications.counts() == {"one": {"sent": 1, "pending": 1}, "two": {"dropped": 1, "pending": 1}}
    store.notifications.prune(NOW + 500)
    assert {n.state for n in store.notifications.list()} == {"pending"}


def test_silences_and_imported_alerts(store: Store) -> None:
    silence = store.silences.add('target=~"a|b"', ends_at=NOW + 60, author="ann", reason="upgrade", now=NOW)
    store.silences.expire(silence.id, author="bob", now=NOW + 1)
    assert [s.expired_by for s in store.silences.list(expired=True)] == ["bob"]
    store.silences.prune(NOW + 1_000)
    assert store.silences.list(expired=True) == []
    told = ImportedAlert("f1", "firing", {"alertname": "X"}, {"summary": "é"}, NOW, None, "", "", "kv", NOW, None)
    store.imported.save([told])
    store.imported.save([told])
    assert store.imported.list() == [told]
    store.imported.prune(NOW + 1)
    assert store.imported.get("f1") is None
