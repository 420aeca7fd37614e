"""Quality runs: round trips, resuming, pruning, and stores of the schema before."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import alembic.command
import pytest
from alembic.config import Config

from probe.store import QualityItem, QualityRun, Store, StoreError
from probe.store import database as database_module
from probe.store.database import FILE_NAME, Database


def start(store: Store, label: str = "auto", baseline_id: str | None = None) -> QualityRun:
    facts = {"kv_cache_dtype": "float32"}
    return store.quality.start("lab", label, "m", {"kind": "testbed"}, "k", facts, baseline_id)


def item(turn: int, right: bool) -> QualityItem:
    return QualityItem(f"add/7/{turn}", "add", turn, right, True, {"answer": "73", "expected": "73"})


def test_a_run_keeps_its_items_and_its_result(store: Store) -> None:
    run = start(store)
    assert (run.status, run.result, run.ended_at) == ("running", None, None)
    text = QualityItem("text/7", "text", None, None, None, {"logprobs": [-0.5]})
    store.quality.add(run.id, [item(1, False), text])
    store.quality.add(run.id, [item(1, True), item(2, False)])  # the first one was asked again
    assert store.quality.items(run.id) == [item(1, True), item(2, False), text]
    done = store.quality.finish(run.id, "done", {"overall": {"items": 2}})
    assert (done.status, done.result) == ("done", {"overall": {"items": 2}})
    assert done.ended_at is not None
    assert store.quality.get(run.id) == done
    assert store.quality.get("nothing") is None


def test_an_incomplete_run_goes_on(store: Store) -> None:
    run = start(store)
    store.quality.add(run.id, [item(1, True)])
    assert store.quality.finish(run.id, "incomplete", None, "the server went away").error == "the server went away"
    again = store.quality.reopen(run.id)
    assert (again.status, again.error, again.ended_at, again.id) == ("running", None, None, run.id)
    assert store.quality.items(run.id) == [item(1, True)]


def test_listing_is_newest_first_and_filters(store: Store) -> None:
    first, second = start(store, "a"), start(store, "b")
    store.quality.finish(first.id, "done", {})
    assert [r.label for r in store.quality.list()] == ["b", "a"]
    assert [r.id for r in store.quality.list(status="running")] == [second.id]
    assert store.quality.list(target="other") == []
    assert [r.label for r in store.quality.list(limit=1)] == ["b"]


def test_nonsense_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no quality run 'x'"):
        store.quality.add("x", [item(1, True)])
    with pytest.raises(StoreError, match="not 'won'"):
        store.quality.finish(start(store).id, "won", None)


def test_pruning_keeps_the_baseline_of_a_kept_run(store: Store) -> None:
    baseline, alone = start(store), start(store)
    store.quality.add(baseline.id, [item(1, True)])
    store.quality.add(alone.id, [item(1, True)])
    kept = start(store, "int4", baseline.id)
    assert store.quality.prune(before=kept.started_at) == 1
    assert {r.id for r in store.quality.list()} == {baseline.id, kept.id}
    assert store.quality.items(baseline.id)
    assert store.quality.items(alone.id) == []


def test_a_store_of_the_first_schema_is_migrated_and_keeps_its_data(tmp_path: Path) -> None:
    database = Database(tmp_path)
    config = Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    with database.writers.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0001")
    database.dispose()
    file = sqlite3.connect(tmp_path / FILE_NAME)
    file.execute("INSERT INTO settings (key, value) VALUES ('retention_days', '3')")
    file.commit()
    file.close()
    with Store.open(tmp_path) as store:
        assert store.settings.get("retention_days") == 3
        assert store.quality.get(start(store).id) is not None
