"""Silences, acknowledgements, receivers, options and imported alerts in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from probe.store import AlertUpdate, ImportedAlert, Reading, Store, StoreError

from .conftest import START, move


@pytest.fixture(scope="module")
def untouched(empty_store: Path) -> Iterator[Store]:
    """One store for all tests that write nothing."""
    with Store.open(empty_store.parent) as opened:
        yield opened


def test_silences_expire_by_time_or_by_hand(store: Store) -> None:
    first = store.silences.add("target=a", ends_at=START + 60, author=" ann ", reason="upgrade", now=START)
    later = store.silences.add(
        'rule=~"ttft.*"', starts_at=START + 50, ends_at=START + 90, author="ann", reason="load test", now=START
    )
    assert (first.author, str(first.matchers[0])) == ("ann", 'target="a"')
    assert [s.id for s in store.silences.list(now=START)] == [first.id, later.id]
    assert [s.state(START + 55) for s in store.silences.list(now=START)] == ["active", "active"]
    assert later.state(START) == "pending"
    ended = store.silences.expire(later.id, author="bob", now=START + 10)
    assert (ended.state(START + 10), ended.expired_by, ended.starts_at) == ("expired", "bob", START + 10)
    assert store.silences.list(now=START + 61) == []
    assert [s.id for s in store.silences.list(expired=True)] == [first.id, later.id]
    kinds = [e.kind for e in store.events.recent(since=START)]
    assert sorted(kinds) == ["silence_added", "silence_added", "silence_expired"]
    (event,) = store.events.recent(kinds=["silence_expired"])
    assert (event.data["author"], event.message) == ("bob", 'bob ended the silence of rule=~"ttft.*"')
    for silence_id, words in ((later.id, "has expired already"), (99, "no silence 99")):
        with pytest.raises(StoreError, match=words):
            store.silences.expire(silence_id, author="bob", now=START + 20)
    store.silences.prune(START + 60)
    assert [s.id for s in store.silences.list(expired=True)] == [first.id]


def test_a_silence_of_another_version_mutes_nothing_and_stops_nothing(store: Store) -> None:
    store.silences.add("target=a", ends_at=START + 60, author="ann", reason="x", now=START)
    file = sqlite3.connect(store.where)
    file.execute("UPDATE silences SET matchers = '[\"pod=x\"]'")
    file.commit()
    file.close()
    assert store.silences.list(now=START) == []


@pytest.mark.parametrize(
    ("matchers", "changes", "words"),
    [
        ("", {}, "needs a matcher"),
        ('target=~".*"', {}, "mute every alert"),
        ("pod=x", {}, "cannot be read"),
        ("target=a", {"author": "  "}, "needs an author"),
        ("target=a", {"reason": ""}, "needs a reason"),
        ("target=a", {"ends_at": START - 1}, "must end after it starts"),
        ("target=a", {"ends_at": START + 400 * 86_400}, "within a year"),
        ("target=a", {"starts_at": START + 70}, "must end after it starts"),
    ],
)
def test_a_silence_that_makes_no_sense_is_refused(
    untouched: Store, matchers: str, changes: dict[str, object], words: str
) -> None:
    given: dict[str, object] = {"ends_at": START + 60, "author": "ann", "reason": "x", "now": START, **changes}
    with pytest.raises(StoreError, match=words):
        untouched.silences.add(matchers, **given)  # type: ignore[arg-type]
    assert untouched.silences.list(now=START) == []


def test_acknowledgements_last_until_the_alert_is_over(store: Store) -> None:
    store.targets.upsert("a", url="http://x", kind="external", engine="vllm", facts={"model": "llama"})
    alert = move(store, "oom", "firing", START)
    assert (alert.engine, alert.model, alert.acknowledgement) == ("vllm", "llama", None)
    assert alert.labels["model"] == "llama"
    taken = store.alerts.acknowledge(alert.id, author="ann", reason="restarting", now=START + 1)
    assert taken.acknowledgement is not None
    assert (taken.acknowledgement.author, taken.acknowledgement.kind) == ("ann", "investigating")
    store.alerts.acknowledge(alert.id, author="bob", reason="known bug", kind="known", now=START + 2)
    (active,) = store.alerts.active()
    assert active.acknowledgement is not None
    assert active.acknowledgement.reason == "known bug"
    assert [a.author for a in store.alerts.acknowledgements(alert.id)] == ["ann", "bob"]
    assert store.alerts.unacknowledge(alert.id, author="bob", now=START + 3).acknowledgement is None
    with pytest.raises(StoreError, match="is not acknowledged"):
        store.alerts.unacknowledge(alert.id, author="bob")
    events = store.events.recent(since=START, target="a")
    assert [e.kind for e in events] == ["alert_unacknowledged", "alert_acknowledged", "alert_acknowledged"]
    for kind, reason, words in (
        ("maybe", "x", "An acknowledgement is investigating"),
        ("known", " ", "needs a reason"),
    ):
        with pytest.raises(StoreError, match=words):
            store.alerts.acknowledge(alert.id, author="ann", reason=reason, kind=kind)
    move(store, "oom", "resolved", START + 10)
    with pytest.raises(StoreError, match="is resolved"):
        store.alerts.acknowledge(alert.id, author="ann", reason="late")
    with pytest.raises(StoreError, match="no alert 99"):
        store.alerts.acknowledge(99, author="ann", reason="x")
    assert move(store, "oom", "firing", START + 20).acknowledgement is None


def test_a_pending_alert_that_clears_takes_its_acknowledgement_along(store: Store) -> None:
    alert = move(store, "oom", "pending", START)
    store.alerts.acknowledge(alert.id, author="ann", reason="seen", now=START)
    reading = Reading("oom", "a", "ok", "inactive", 0.0, 0.5, None, None, 60.0, "fine", "1 of 1", START + 1)
    store.alerts.save([AlertUpdate(reading, "warning", 0.0, "oom", 0.0, (("pending", "inactive"),))])
    assert store.alerts.active() == []
    assert store.alerts.acknowledgements(alert.id) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "webhook", "url": "http://user:pw@host/x"}, "holds a credential"),
        ({"kind": "webhook", "url": "https://hooks.slack.com/services/T1/B1/x"}, "holds a credential"),
        ({"kind": "webhook", "url": "https://host/x?token=abc"}, "holds a credential"),
        ({"kind": "webhook", "url": "https://host/hook/9f8a7b6c5d4e3f2a1b0c"}, "holds a credential"),
        ({"kind": "apprise", "url": "slack://TokenA/TokenB/TokenC"}, "holds a credential"),
        ({"kind": "apprise", "url": "mailto://me:pw@example.com"}, "holds a credential"),
        ({"kind": "webhook", "url": "ftp://host/x"}, "must be http"),
        ({"kind": "webhook", "url": "env:"}, "is no reference"),
        ({"kind": "pager", "url": "env:X"}, "must be of kind"),
        ({"kind": "webhook", "url": "env:X", "severities": ["info"]}, "severities"),
        ({"kind": "webhook", "url": "env:X", "matchers": ["pod=x"]}, "cannot be read"),
        ({"kind": "webhook", "url": "env:X", "bearer": "abc"}, "must be env:NAME"),
        (
            {"kind": "webhook", "url": "http://host/x", "bearer": "env:ANY_SECRET"},
            "With a bearer token",
        ),
        ({"kind": "webhook", "url": "env:X", "colour": "red"}, "no option 'colour'"),
        ({"kind": "webhook", "url": "env:X", "name": "a/b"}, "name must have"),
    ],
)
def test_receivers_are_checked_and_never_hold_a_secret(untouched: Store, given: dict[str, object], words: str) -> None:
    with pytest.raises(StoreError, match=words) as refused:
        untouched.receivers.save({"name": "r", **given})
    assert "pw" not in str(refused.value)
    assert untouched.receivers.list() == []


def test_receivers_and_options_are_kept(store: Store) -> None:
    store.receivers.save({"name": "pager", "kind": "apprise", "url": "secret:pager.url", "severities": ["critical"]})
    store.receivers.save({"name": "hook", "kind": "webhook", "url": "http://127.0.0.1:9/alerts-of-kvoncall"})
    store.receivers.save({"name": "hook", "kind": "webhook", "url": "env:HOOK", "matchers": 'target=~"a.*"'})
    assert [(r.name, r.url, r.severities) for r in store.receivers.list()] == [
        ("hook", "env:HOOK", ("warning", "critical")),
        ("pager", "secret:pager.url", ("critical",)),
    ]
    assert str(store.receivers.list()[0].matchers[0]) == 'target=~"a.*"'
    store.receivers.remove("pager")
    with pytest.raises(StoreError, match="no receiver named 'pager'"):
        store.receivers.remove("pager")
    assert store.receivers.options().group_wait_s == 10.0
    store.receivers.set_options(group_wait_s=1)
    assert store.receivers.set_options(group_by=["rule", "target"]).group_wait_s == 1.0
    for changes, words in (
        ({"group_by": ["pod"]}, "grouped by"),
        ({"group_wait_s": -1}, "number of seconds"),
        ({"repeat_interval_s": 1}, "at least 60"),
        ({"base_url": "http://u:p@h"}, "without credentials"),
        ({"loudness": 3}, "no notification option"),
    ):
        with pytest.raises(StoreError, match=words):
            store.receivers.set_options(**changes)
    assert store.receivers.options().group_by == ("rule", "target")


def imported(fingerprint: str, status: str, starts_at: float, received_at: float) -> ImportedAlert:
    labels = {"alertname": fingerprint}
    return ImportedAlert(fingerprint, status, labels, {}, starts_at, None, "", "", "kvoncall", received_at, "oom")


def test_imported_alerts_are_one_row_a_fingerprint(store: Store) -> None:
    store.imported.save([imported("x", "firing", START, START), imported("y", "firing", START + 1, START)])
    store.imported.save(
        [imported("x", "resolved", START, START + 60), imported("y", "resolved", START - 9, START + 60)]
    )
    assert [(a.fingerprint, a.status) for a in store.imported.list()] == [("y", "firing"), ("x", "resolved")]
    assert [a.fingerprint for a in store.imported.list(firing=True)] == ["y"]
    found = store.imported.get("x")
    assert found is not None
    assert (found.name, found.runbook) == ("x", "oom")
    store.imported.prune(START + 30)
    assert [a.fingerprint for a in store.imported.list()] == ["x"]


def test_closed_notifications_are_pruned_but_not_those_of_what_fires(store: Store) -> None:
    store.receivers.save({"name": "hook", "kind": "webhook", "url": "env:HOOK"})
    move(store, "oom", "firing", START)
    move(store, "oom", "firing", START, target="b")
    ids = [n.id for n in store.notifications.list()]
    store.notifications.drop(dict.fromkeys(ids, "x"), START)
    move(store, "oom", "resolved", START + 1, target="b")
    store.notifications.drop({n.id: "x" for n in store.notifications.list(states=["pending"])}, START + 1)
    store.notifications.prune(START + 100)
    assert [n.target for n in store.notifications.list()] == ["a"]
    assert store.notifications.counts() == {"hook": {"dropped": 1}}
