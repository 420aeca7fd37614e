"""The schema comes from the migrations, and matches the models on both databases."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from probe.store import Store
from probe.store.database import FILE_NAME
from probe.store.models import Base, SampleRow, TargetRow


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
