"""The writer thread: batches, trouble, clean close, kill -9, several processes."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from probe.store import Sample, Store, StoreError
from probe.store.database import FILE_NAME
from probe.store.writer import PendingSample, SeriesKey, Writer

NOW = 1_800_000_000.0
Child = Callable[..., subprocess.Popen[str]]
Wait = Callable[..., None]


def scrape(target: str, at: float, series: int = 50) -> list[Sample]:
    return [Sample(target, "kv_blocks", {"state": str(i)}, at, float(i)) for i in range(series)]


def lock(directory: Path) -> sqlite3.Connection:
    other = sqlite3.connect(directory / FILE_NAME, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    return other


def test_locked_database_delays_samples_and_says_so(tmp_path: Path, wait_until: Wait) -> None:
    with Store.open(tmp_path, busy_timeout_s=0.05) as store:
        store.targets.upsert("e", url="http://x", kind="external")
        other = lock(tmp_path)
        store.samples.write(scrape("e", NOW))
        wait_until(lambda: store.notice, "the notice")
        assert "is locked by another process" in (store.notice or "")
        with pytest.raises(StoreError, match="locked"):
            store.flush()
        store.samples.write(scrape("e", NOW + 1))
        other.execute("ROLLBACK")
        other.close()
        store.flush()
        assert store.notice is None
        assert len(store.samples.range("e", "kv_blocks", 0)) == 100
        (event,) = store.events.recent(kinds=["store_error"])
        assert event.severity == "warning"
        assert event.data["late"] == 100
        assert event.data["lost"] == 0
        assert "is locked by another process" in event.message


def test_close_waits_for_what_is_queued_and_reports_what_it_cannot_write(tmp_path: Path) -> None:
    store = Store.open(tmp_path, busy_timeout_s=0.05)
    store.targets.upsert("e", url="http://x", kind="external")
    other = lock(tmp_path)
    store.samples.write(scrape("e", NOW))
    with pytest.raises(StoreError, match=r"50 samples were not written: .*locked"):
        store.close()
    other.close()


def test_refused_samples_do_not_block_later_ones(store: Store, wait_until: Wait) -> None:
    """Rows the database will never take (here: of no target) are counted as lost, in an event."""
    store.targets.upsert("e", url="http://x", kind="external")
    writer: Writer = store._writer
    writer.add([PendingSample(SeriesKey(999, "up", "{}"), 1, 1.0)])
    with pytest.raises(StoreError, match=r"(?i)foreign key"):
        store.flush()
    with pytest.raises(StoreError):
        store.flush()
    store.samples.write(scrape("e", NOW))
    wait_until(lambda: store.events.recent(kinds=["store_error"]), "the event")
    (event,) = store.events.recent(kinds=["store_error"])
    assert (event.severity, event.data["lost"]) == ("error", 1)
    store.flush()
    assert len(store.samples.range("e", "kv_blocks", 0)) == 50


def test_threads_may_share_a_store(store: Store) -> None:
    store.targets.upsert("e", url="http://x", kind="external")
    replay = store.replays.create("oom", "drill", {})

    def work(index: int) -> None:
        for i in range(20):
            store.samples.write(scrape("e", NOW + index * 100 + i, series=3))
            store.replays.append(replay.id, "inject", f"{index}/{i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    store.flush()
    assert [e.seq for e in store.replays.journal(replay.id)] == list(range(1, 81))
    assert len(store.samples.range("e", "kv_blocks", 0)) == 4 * 20 * 3


def test_two_processes_write_one_store(store_location: str, child: Child) -> None:
    children = [child("write_much", store_location, name) for name in ("a", "b")]
    assert [process.wait(240) for process in children] == [0, 0]
    with Store.open(store_location) as store:
        for name in ("a", "b"):
            assert len(store.samples.range(name, "kv_blocks", 0)) == 30 * 50
            assert len(store.events.recent(limit=None, target=name)) == 30


def test_kill_9_loses_nothing_committed(store_location: str, child: Child) -> None:
    writer = child("write_for_ever", store_location)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 10:
            break
    writer.kill()
    rest, _ = writer.communicate(timeout=240)
    last = 10 + len(rest.splitlines())
    if "://" not in store_location:
        file = sqlite3.connect(Path(store_location) / FILE_NAME)
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        file.close()
    with Store.open(store_location) as store:
        (replay,) = store.replays.mark_interrupted()
        journal = store.replays.journal(replay.id)
        assert len(journal) >= last + 1
        assert [e.seq for e in journal] == list(range(1, len(journal) + 1))
        assert len(store.samples.range("e", "kv_blocks", 0)) >= (last + 1) * 50
