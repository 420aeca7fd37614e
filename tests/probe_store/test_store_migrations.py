"""The schema comes from the migrations, and matches the models on both databases."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import alembic.command
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from probe.store import Sample, Store, apply_retention
from probe.store import database as database_module
from probe.store.database import FILE_NAME, Database
from probe.store.models import Base, SampleRow, SeriesRow, TargetRow


def test_migrations_from_empty_match_the_models(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    engine = create_engine(f"sqlite:///{tmp_path / FILE_NAME}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_sqlite_is_set_up_for_one_writer_and_many_readers(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    file = sqlite3.connect(tmp_path / FILE_NAME)
    (sql,) = file.execute("SELECT sql FROM sqlite_master WHERE name = 'samples'").fetchone()
    assert "WITHOUT ROWID" in sql
    assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    file.close()


def test_many_processes_may_open_an_empty_directory(tmp_path: Path) -> None:
    # Each `Store.open` has its own connections, so threads race for the file as processes do.
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: Store.open(tmp_path), range(6)))
    for index, store in enumerate(stores):
        store.targets.upsert(f"t{index}", url="http://x", kind="external")
    assert len(stores[0].targets.list()) == 6
    for store in stores:
        store.close()


def test_schema_compiles_for_postgresql() -> None:
    dialect = postgresql.dialect()
    for table in Base.metadata.sorted_tables:
        sql = str(CreateTable(table).compile(dialect=dialect))
        assert "ROWID" not in sql
        for index in table.indexes:
            assert str(CreateIndex(index).compile(dialect=dialect))
    unique = next(i for i in Base.metadata.tables["alerts"].indexes if i.name == "uq_alerts_active")
    assert "WHERE state IN ('pending', 'firing')" in str(CreateIndex(unique).compile(dialect=dialect))
    assert "DOUBLE PRECISION" in str(CreateTable(SampleRow.__table__).compile(dialect=dialect))  # type: ignore[arg-type]
    assert "SERIAL" in str(CreateTable(TargetRow.__table__).compile(dialect=dialect))  # type: ignore[arg-type]


def test_migrations_from_empty_match_the_models_on_postgresql(postgres: Any) -> None:
    url = postgres.empty_database()
    Store.open(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place without any table."""
    return str(tmp_path) if request.param == "sqlite" else str(request.getfixturevalue("postgres").empty_database())


def test_samples_of_before_are_kept_and_rolled_up(empty_location: str) -> None:
    database = Database(empty_location)
    config = Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    with database.writers.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0003")
        connection.execute(
            text(
                "INSERT INTO targets (name, url, kind, engine, flags, facts, scrape_interval_s, time_scale, active, "
                "created_at) VALUES ('e', 'http://x', 'external', 'vllm', '[]', '{}', 2, 1, true, 0)"
            )
        )
        for number, metric in enumerate(("c_total", "not_a_totally"), start=7):
            connection.execute(text(f"INSERT INTO series VALUES ({number}, 1, '{metric}', '{{}}')"))
            for k in range(4):
                ts_ms = 1_800_000_000_123 + 40_000 * k
                connection.execute(text(f"INSERT INTO samples VALUES ({number}, {ts_ms}, {k * 2.5})"))
    database.dispose()
    with Store.open(empty_location) as store:
        assert store.samples.range("e", "c_total", 0)["ts"].tolist() == [1_800_000_000.123 + 40 * k for k in range(4)]
        assert [(s.ts, s.value) for s in store.samples.latest("e")["c_total"]] == [(1_800_000_120.123, 7.5)]
        store.rollups.advance(1_800_001_000.0)
        assert store.samples.range("e", "c_total", 0, step_s=60)["increase"].sum() == 7.5
        assert store.samples.range("e", "not_a_totally", 0, step_s=3600)["value"].tolist() == [3.75]
        # New series get ids of their own, also where the newest was removed.
        store.samples.write([Sample("e", "up", {}, 1_800_000_500.0, 1.0)])
        store.flush()
        assert store.samples.latest("e")["up"][0].value == 1.0


def test_ids_of_removed_series_are_never_used_again(store: Store) -> None:
    """Another process may still hold the id of a series that was removed, and write by it."""
    store.targets.upsert("e", url="http://x", kind="external")
    store.samples.write([Sample("e", "gone", {}, 0.0, 1.0)])
    store.flush()

    def ids() -> list[int]:
        with store._database.read() as session:
            return list(session.scalars(select(SeriesRow.id)))

    (removed,) = ids()
    apply_retention(store, 1e9)
    assert ids() == []
    store.samples.write([Sample("e", "new", {}, 1e9, 2.0), Sample("e", "gone", {}, 1e9, 3.0)])
    store.flush()
    assert removed not in ids()
    assert {m: s[0].value for m, s in store.samples.latest("e").items()} == {"new": 2.0, "gone": 3.0}
