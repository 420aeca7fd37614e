"""Size and space: the oldest goes first, the file shrinks, and a full disk loses nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection

from probe.store import Sample, Store, StoreError, apply_retention
from probe.store import database as database_module
from probe.store.database import FILE_NAME

T0 = 1_800_000_000.0 - 1_800_000_000.0 % 3600
HOUR = 3600.0
Wait = Callable[..., None]


def fill(store: Store, hours: int, a_minute: int) -> int:
    """A sample of `a_minute` series every minute; returns the number of samples."""
    store.targets.upsert("e", url="http://x", kind="external")
    store.samples.write(
        Sample("e", "kv_blocks", {"state": str(i)}, T0 + 60 * minute, minute + i / 7)
        for minute in range(hours * 60)
        for i in range(a_minute)
    )
    store.flush()
    return hours * 60 * a_minute


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store, float], None]:
    """Limits below what `settings.set` takes."""

    def limit(store: Store, megabytes: float) -> None:
        get = store.settings.get
        monkeypatch.setattr(store.settings, "get", lambda key: megabytes if key == "max_size_mb" else get(key))

    return limit


def test_above_its_size_the_store_drops_the_oldest_raw_samples_first(
    store: Store, small_limit: Callable[[Store, float], None]
) -> None:
    written = fill(store, hours=8, a_minute=12)
    now = T0 + 8 * HOUR
    apply_retention(store, now)
    full = store.used_bytes()
    small_limit(store, (full - 30_000) / 1e6)
    deleted = apply_retention(store, now)
    assert 0 < deleted < written
    assert store.used_bytes() < full - 15_000
    left = store.samples.range("e", "kv_blocks", 0)
    assert len(left) == written - deleted
    assert left["ts"].max() == T0 + 8 * HOUR - 60  # the newest are there
    assert left["ts"].min() > T0
    assert store.samples.range("e", "kv_blocks", 0, step_s=60)["count"].sum() == written  # nothing of the rollups went
    (said,) = store.events.recent(kinds=["store_trimmed"])
    assert said.data["deleted"] == deleted
    assert apply_retention(store, now) == 0
    # What alert windows need stays, whatever the limit: then the 1-minute rollups of gone samples go.
    small_limit(store, 0.001)
    apply_retention(store, now)
    assert store.samples.range("e", "kv_blocks", 0)["ts"].min() <= now - 6 * HOUR
    coarse = store.samples.range("e", "kv_blocks", 0, step_s=60)
    assert set(coarse["resolution_s"]) == {60, 3600}
    assert coarse["count"].sum() == written


def test_space_goes_back_to_the_disk(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        fill(store, hours=8, a_minute=40)
    size = (tmp_path / FILE_NAME).stat().st_size
    with Store.open(tmp_path) as store:
        apply_retention(store, T0 + 40 * 24 * HOUR)
    assert (tmp_path / FILE_NAME).stat().st_size < size / 2


def test_a_file_of_before_learns_to_shrink_when_that_is_cheap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Store.open(tmp_path).close()
    file = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    file.execute("PRAGMA auto_vacuum=NONE")
    file.execute("VACUUM")
    assert file.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    monkeypatch.setattr(database_module, "CHEAP_VACUUM_BYTES", 1)
    with caplog.at_level("INFO"):
        Store.open(tmp_path).close()
    assert "run VACUUM on it once" in caplog.text
    assert file.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    file.close()
    monkeypatch.undo()
    Store.open(tmp_path).close()
    file = sqlite3.connect(tmp_path / FILE_NAME)
    assert file.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    file.close()


def test_a_full_disk_delays_samples_and_says_so(tmp_path: Path, wait_until: Wait) -> None:
    """The quota is SQLite's own: no page beyond those that the file has."""
    Store.open(tmp_path).close()
    quota = {"pages": 200}
    with Store.open(tmp_path) as store:
        store.targets.upsert("e", url="http://x", kind="external")

        @event.listens_for(store._database.readers, "checkout")
        def limit(connection: DBAPIConnection, _record: object, _proxy: object) -> None:
            connection.cursor().execute(f"PRAGMA max_page_count={quota['pages']}")

        written = 0
        while store.notice is None and written < 100_000:
            store.samples.write(Sample("e", "up", {"n": str(i)}, T0 + written, 1.0 + i / 3) for i in range(500))
            written += 500
            try:
                store.flush()
            except StoreError as error:
                assert "is full: free space, then try again" in str(error)  # noqa: PT017
        assert "is full" in (store.notice or "")
        stored = len(store.samples.range("e", "up", 0))
        assert 0 < stored < written
        with pytest.raises(StoreError, match="is full"):
            store.events.add(None, "note", "x" * 500_000)
        quota["pages"] = 1_000_000
        store.flush()
        assert len(store.samples.range("e", "up", 0)) == written
        (said,) = store.events.recent(kinds=["store_error"])
        assert said.data["lost"] == 0
