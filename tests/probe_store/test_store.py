"""Round trips of every kind of record."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from probe.store import Sample, Store, StoreError, apply_retention, default_data_dir

Child = Callable[..., subprocess.Popen[str]]
NOW = 1_800_000_000.0


def add_target(store: Store, name: str = "e") -> None:
    store.targets.upsert(name, url="http://127.0.0.1:1", kind="external")


def test_target_upsert_keeps_facts_and_reactivates(store: Store) -> None:
    first = store.targets.upsert("e", url="http://a", kind="embedded", engine="kvoncall", flags=["--seed", "1"])
    store.targets.set_facts("e", {"version": "1", "plan": {"blocks": 3}})
    store.targets.set_facts("e", {"version": "2"})
    store.targets.deactivate("e")
    assert store.targets.list() == []
    again = store.targets.upsert("e", url="http://b", kind="embedded", engine="kvoncall", time_scale=0.05)
    assert (again.id, again.created_at, again.active) == (first.id, first.created_at, True)
    assert again.facts == {"version": "2", "plan": {"blocks": 3}}
    assert (again.url, again.flags, again.time_scale) == ("http://b", [], 0.05)
    assert store.targets.get("e") == again
    assert store.targets.list() == [again]
    assert store.targets.get("other") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [({"kind": "pet"}, "embedded, drill or external"), ({"scrape_interval_s": 0}, "above 0"), ({"name": ""}, "name")],
)
def test_target_refuses_nonsense(store: Store, change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {"name": "e", "url": "http://a", "kind": "drill", **change}
    with pytest.raises(StoreError, match=words):
        store.targets.upsert(arguments.pop("name"), **arguments)  # type: ignore[arg-type]


def test_samples_round_trip_in_milliseconds(store: Store) -> None:
    add_target(store)
    labels = {"engine": "0", "model_name": "m"}
    store.samples.write(
        [
            Sample("e", "kv_usage_ratio", labels, NOW + 0.0014, 0.25),
            Sample("e", "kv_usage_ratio", labels, NOW + 1, math.nan),
            Sample("e", "kv_usage_ratio", {**labels, "engine": "1"}, NOW, math.inf),
            Sample("e", "kv_usage_ratio", labels, NOW + 2, 0.5),
            Sample("e", "kv_usage_ratio", labels, NOW + 2, 0.75),  # the same time again: the last one holds
        ]
    )
    store.samples.flush()
    frame = store.samples.range("e", "kv_usage_ratio", NOW - 1, labels={"engine": "0"})
    assert list(frame.columns) == ["ts", "value", "engine", "model_name"]
    assert frame["ts"].tolist() == [NOW + 0.001, NOW + 2]
    assert frame["value"].tolist() == [0.25, 0.75]
    assert store.samples.range("e", "kv_usage_ratio", NOW, until=NOW + 1)["value"].tolist() == [0.25, math.inf]
    empty = store.samples.range("e", "nothing", 0)
    assert (list(empty.columns), len(empty)) == (["ts", "value"], 0)


def test_latest_leaves_out_series_of_a_dead_process(store: Store) -> None:
    add_target(store)
    store.samples.write(
        [
            Sample("e", "requests_running", {"model_name": "old"}, NOW, 9.0),
            Sample("e", "requests_running", {"model_name": "new"}, NOW + 60, 1.0),
            Sample("e", "quality_score", {}, NOW - 500, 0.9),
        ]
    )
    store.samples.flush()
    latest = store.samples.latest("e")
    assert [(s.labels, s.ts, s.value) for s in latest["requests_running"]] == [({"model_name": "new"}, NOW + 60, 1.0)]
    assert latest["quality_score"][0].ts == NOW - 500


def test_samples_of_unknown_target_are_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no target named 'ghost'"):
        store.samples.write([Sample("ghost", "up", {}, NOW, 1.0)])


def test_events_newest_first_with_filters(store: Store) -> None:
    store.events.add("a", "engine_exit", "died", severity="critical", data={"reason": "oom"}, ts=NOW)
    store.events.add("b", "scrape_error", "gone", ts=NOW + 1)
    store.events.add(None, "store_error", "late", ts=NOW + 2)
    assert [e.kind for e in store.events.recent()] == ["store_error", "scrape_error", "engine_exit"]
    assert [e.kind for e in store.events.recent(limit=1)] == ["store_error"]
    assert [e.message for e in store.events.recent(target="a")] == ["died"]
    assert [e.target for e in store.events.recent(kinds=["scrape_error"], since=NOW + 1)] == ["b"]
    exit_ = store.events.recent(kinds=["engine_exit"])[0]
    assert (exit_.severity, exit_.data, exit_.ts) == ("critical", {"reason": "oom"}, NOW)


def test_replay_life(store: Store) -> None:
    replay = store.replays.create("oom", "drill-1", {"remedy": True})
    assert (replay.status, replay.owner_pid, replay.result) == ("running", os.getpid(), None)
    store.replays.set_step(replay.id, "inject")
    store.replays.append(replay.id, "hypothesis", "the pool is too large")
    store.replays.append(replay.id, "inject", "sent", {"requests": 40})
    store.replays.set_status(replay.id, "waiting_apply")
    assert not store.replays.apply_requested(replay.id)
    store.replays.request_apply(replay.id)
    assert store.replays.apply_requested(replay.id)
    store.replays.finish(replay.id, "done", {"verified": True})
    journal = store.replays.journal(replay.id)
    assert [(e.seq, e.step, e.data) for e in journal] == [(1, "hypothesis", None), (2, "inject", {"requests": 40})]
    found = store.replays.get(replay.id)
    assert found is not None
    assert (found.status, found.step, found.result, found.options) == (
        "done",
        "inject",
        {"verified": True},
        {"remedy": True},
    )
    assert found.ended_at is not None
    assert store.replays.list() == [found]
    with pytest.raises(StoreError, match="no replay 'nope'"):
        store.replays.append("nope", "inject", "x")


def test_replays_of_dead_processes_are_marked_interrupted(store_location: str, child: Child) -> None:
    dead = child("replay_and_die", store_location)
    # It is reaped only afterwards: a zombie counts as dead.
    assert dead.stdout is not None
    assert dead.stdout.read() == ""
    with Store.open(store_location) as store:
        mine = store.replays.create("oom", "drill-2", {})
        marked = store.replays.mark_interrupted()
        assert [(r.target, r.status) for r in marked] == [("drill-1", "interrupted")]
        assert [e.message for e in store.replays.journal(marked[0].id)] == ["sent"]
        assert store.replays.mark_interrupted() == []
        still = store.replays.get(mine.id)
        assert still is not None
        assert still.status == "running"


def test_lease_has_one_holder(store: Store) -> None:
    mine = store.leases.acquire("monitor", "a", 60)
    assert mine is not None
    assert store.leases.acquire("monitor", "b", 60) is None
    renewed = store.leases.acquire("monitor", "a", 60)
    assert renewed is not None
    assert renewed.token == mine.token
    store.leases.release(mine)
    theirs = store.leases.acquire("monitor", "b", 60)
    assert theirs is not None
    assert theirs.token == mine.token + 1
    store.leases.release(mine)  # of no effect: it is another's by now
    assert store.leases.acquire("monitor", "a", 60) is None


def test_lease_expires(store: Store) -> None:
    store.leases.acquire("monitor", "a", 0.0)
    taken = store.leases.acquire("monitor", "b", 60)
    assert taken is not None
    assert taken.owner == "b"


def test_retention_removes_old_samples_and_empty_series(store: Store) -> None:
    add_target(store)
    store.samples.write(
        [
            Sample("e", "up", {}, NOW - 3 * 86_400, 1.0),
            Sample("e", "up", {}, NOW - 3_600, 0.0),
            Sample("e", "gone", {}, NOW - 8 * 86_400, 1.0),
        ]
    )
    store.events.add("e", "scrape_error", "old", ts=NOW - 100 * 86_400)
    store.events.add("e", "scrape_error", "new", ts=NOW)
    store.flush()
    past = NOW - 100 * 86_400
    store.silences.add('target="e"', ends_at=past + 60, author="ann", reason="upgrade", now=past)
    assert store.settings.get("retention_days") == 7.0
    assert apply_retention(store, NOW) == 1
    assert store.silences.list(expired=True) == []
    assert [e.message for e in store.events.recent()] == ["new"]
    store.settings.set("retention_days", 0.5)
    assert apply_retention(store, NOW) == 1
    assert store.samples.range("e", "up", 0)["value"].tolist() == [0.0]
    assert set(store.samples.latest("e")) == {"up"}
    # A series removed by retention is registered anew when it comes back.
    store.samples.write([Sample("e", "gone", {}, NOW, 2.0)])
    store.flush()
    assert store.samples.range("e", "gone", 0)["value"].tolist() == [2.0]


def test_settings_refuse_nonsense(store: Store) -> None:
    for key, value, words in (
        ("retention_days", 0, "above 0 days"),
        ("max_size_mb", 1, "at least 16 MB"),
        ("series_in_store", "some", "all or alerts-only"),
    ):
        with pytest.raises(StoreError, match=words):
            store.settings.set(key, value)
    with pytest.raises(StoreError, match="no setting"):
        store.settings.get("colour")


def test_data_survives_reopening(store_location: str) -> None:
    with Store.open(store_location) as store:
        add_target(store)
        store.samples.write([Sample("e", "up", {}, NOW, 1.0)])  # not flushed: closing does it
    with Store.open(store_location) as store:
        assert store.samples.range("e", "up", 0)["value"].tolist() == [1.0]


def test_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.events.add(None, "x", "y", ts=time.time())


def test_default_data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path / "here"))
    assert default_data_dir() == tmp_path / "here"
    monkeypatch.delenv("KVONCALL_DATA")
    assert default_data_dir().name == "kvoncall"
