"""Opening the database: URL, connection settings, migrations, and errors in one sentence.

This is the only module that knows which database it talks to. SQLite runs in WAL mode so that pages read
while the writer writes; write transactions start with BEGIN IMMEDIATE, because a deferred one that turns
into a writer fails at once with SQLITE_BUSY_SNAPSHOT instead of waiting for `busy_timeout`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import platformdirs
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, exc, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session

from probe.store.records import StoreError

FILE_NAME = "kvoncall.db"
BUSY_TIMEOUT_MS = 5_000
CHEAP_VACUUM_BYTES = 64_000_000
PAGES_A_CALL = 2_000
POSTGRES_ROW_BYTES = 110  # of a sample or a 1-minute rollup with its place in the index, measured
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x6B766F6E  # any constant: serializes migrations of one PostgreSQL database

log = logging.getLogger("kvoncall.store")


def default_data_dir() -> Path:
    """`KVONCALL_DATA`, or the user's data directory of this platform."""
    configured = os.environ.get("KVONCALL_DATA")
    return Path(configured) if configured else Path(platformdirs.user_data_dir("kvoncall", appauthor=False))


class Database:
    """An engine for readers and one for writers over the same pool, with every error as `StoreError`."""

    def __init__(self, location: Path | str, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> None:
        url = _url_of(location)
        self.where = str(url.database) if url.drivername.startswith("sqlite") else url.render_as_string()
        with self.errors():
            self.readers = _create_engine(url, busy_timeout_ms)
        self.writers = self.readers.execution_options(kvoncall_writes=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading; it sees the state committed when its first query ran."""
        with self.errors(), Session(self.readers) as session:
            yield session

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what the driver raises inside the block into a `StoreError`."""
        try:
            yield
        except (exc.SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
            raise StoreError(self.sentence(error)) from error

    def sentence(self, error: BaseException) -> str:
        """One sentence for the user: what is wrong with the database and what to do."""
        if isinstance(error, ImportError):
            return f"The driver for {self.where} is not installed ({error}): pip install 'kvoncall[postgres]'."
        cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
        code = getattr(cause, "sqlite_errorname", "") or ""
        for prefix, words in _SQLITE_SENTENCES.items():
            if code.startswith(prefix):
                return words.format(where=self.where)
        if isinstance(cause, PermissionError):
            return _SQLITE_SENTENCES["SQLITE_READONLY"].format(where=self.where)
        return f"The database {self.where} refused: {' '.join(str(cause).split())}."

    def migrate(self) -> None:
        """Bring the schema to the newest revision; safe when several processes open an empty database."""
        with self.errors(), self.writers.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            script = ScriptDirectory(str(_MIGRATIONS))
            found = MigrationContext.configure(connection).get_current_revision()
            if found == script.get_current_head():
                return
            if found is not None and found not in {s.revision for s in script.walk_revisions()}:
                raise StoreError(
                    f"The database {self.where} was written by a newer kvoncall (schema {found}): "
                    "upgrade kvoncall or choose another --data-dir."
                )
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

    def give_space_back(self) -> None:
        """Make freed pages of an SQLite file of before return to the disk; one that takes long is left as it is."""
        if self.readers.dialect.name != "sqlite":
            return
        with self.errors(), self.readers.connect() as connection:
            driver = connection.connection.cursor()
            if driver.execute("PRAGMA auto_vacuum").fetchone() == (_INCREMENTAL,):
                return
            size = connection.scalar(text(_SQLITE_USED))
            if size > CHEAP_VACUUM_BYTES:
                log.info("%s keeps space once used; run VACUUM on it once, while nothing uses it.", self.where)
                return
            connection.rollback()
            try:
                driver.execute("VACUUM")  # `PRAGMA auto_vacuum` of this connection takes effect with it
            except sqlite3.OperationalError as error:
                log.info("%s keeps space once used, for now: %s.", self.where, error)

    def used_bytes(self) -> int:
        """Bytes that the records take; what was freed and not yet given back does not count.

        On PostgreSQL an estimate: samples and 1-minute rollups by their number, the rest by the size of its tables.
        """
        with self.errors(), self.readers.begin() as connection:
            if connection.dialect.name == "sqlite":
                return int(connection.execute(text(_SQLITE_USED)).scalar_one())
            connection.execute(text("ANALYZE samples, rollups_1m"))
            return int(connection.execute(text(_POSTGRES_USED), {"row": POSTGRES_ROW_BYTES}).scalar_one())

    def dispose(self) -> None:
        """Close every connection."""
        self.readers.dispose()


def give_pages_back(session: Session) -> bool:
    """Free some unused pages at the end of an SQLite file; False when there is nothing (more) to give back."""
    connection = session.connection()
    if connection.dialect.name != "sqlite":
        return False
    before = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    driver = connection.connection.cursor()
    driver.execute(f"PRAGMA incremental_vacuum({PAGES_A_CALL})").fetchall()
    after = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    return bool(0 < after < before)


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[dict[str, Any]],
    *,
    key: Sequence[str],
    keep: bool = False,
) -> None:
    """Insert rows (all with the same columns, no `key` twice).

    Where `key` exists already, overwrite the other columns, or leave the row alone with `keep`.
    """
    if not rows:
        return
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(table)
    if keep:
        connection.execute(statement.on_conflict_do_nothing(index_elements=list(key)), rows)
        return
    columns = {name: statement.excluded[name] for name in rows[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=columns), rows)


def upsert_tuples(
    connection: Connection,
    table: Table,
    rows: Sequence[tuple[float, ...]],
    *,
    key: Sequence[str],
    unless_older: str | None = None,
) -> None:
    """`upsert` for many narrow rows of numbers: tuples in the order of the table's columns, past the ORM's cost a row.

    With `unless_older`, a row whose value in that column is below the one that is there is left out.
    """
    if not rows:
        return
    names = [column.name for column in table.columns]
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key)
    if connection.dialect.name == "postgresql":
        types = [column.type.compile(connection.dialect) for column in table.columns]
        source = "SELECT * FROM unnest(" + ", ".join(f"%s::{type_}[]" for type_ in types) + ")"
        arguments: Any = tuple(list(values) for values in zip(*rows, strict=True))
    else:
        source = "VALUES (" + ", ".join("?" for _ in names) + ")"
        arguments = list(rows)
    statement = f"INSERT INTO {table.name} ({', '.join(names)}) {source}"
    statement += f" ON CONFLICT ({', '.join(key)}) DO " + (f"UPDATE SET {changes}" if changes else "NOTHING")
    if unless_older is not None:
        statement += f" WHERE excluded.{unless_older} >= {table.name}.{unless_older}"
    connection.exec_driver_sql(statement, arguments)


_INCREMENTAL = 2
_SQLITE_USED = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)
_POSTGRES_USED = (
    "SELECT sum(CASE WHEN relname IN ('samples', 'rollups_1m') THEN greatest(reltuples, 0) * :row "
    "ELSE pg_total_relation_size(oid) END) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
_SQLITE_SENTENCES = {
    "SQLITE_BUSY": "The database {where} is locked by another process: close what holds it, then try again.",
    "SQLITE_LOCKED": "The database {where} is locked by another process: close what holds it, then try again.",
    "SQLITE_READONLY": "The database {where} is read-only: give this user write access to it and its directory, "
    "or choose another --data-dir.",
    "SQLITE_CANTOPEN": "The database {where} cannot be opened: check that its directory exists and is writable, "
    "or choose another --data-dir.",
    "SQLITE_NOTADB": "The file {where} is not a kvoncall database: move it away or choose another --data-dir.",
    "SQLITE_CORRUPT": "The database {where} is damaged: restore a copy, or move it away to start afresh.",
    "SQLITE_FULL": "The disk that holds the database {where} is full: free space, then try again.",
    "SQLITE_IOERR": "The disk that holds the database {where} fails to read or write: check it, then try again.",
}


def _url_of(location: Path | str) -> URL:
    if isinstance(location, str) and "://" in location:
        try:
            url = make_url(location)
            url.get_dialect()
        except (exc.ArgumentError, exc.NoSuchModuleError) as error:
            raise StoreError("The database URL cannot be read: use sqlite:///FILE or postgresql://…") from error
        except ImportError:
            return make_url(location)  # the driver is missing; opening says so
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise StoreError(f"The database {url.get_backend_name()} is not supported: use sqlite or postgresql.")
        if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
            raise StoreError("The store needs a file that several connections can share: use sqlite:///FILE.")
        # Without a driver named, the one that the extra `postgres` installs.
        return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
    directory = Path(location)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StoreError(f"The data directory {directory} is a file: choose another --data-dir.") from error
    except OSError as error:
        raise StoreError(
            f"The data directory {directory} cannot be created ({error.strerror}): choose another --data-dir."
        ) from error
    return URL.create("sqlite", database=str(directory / FILE_NAME))


def _create_engine(url: URL, busy_timeout_ms: int) -> Engine:
    engine = create_engine(url, pool_size=8, max_overflow=32)
    if engine.dialect.name != "sqlite":
        return engine

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: object) -> None:
        connection.isolation_level = None  # BEGIN is ours, below
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={busy_timeout_ms}")
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file, so before anything that writes
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("kvoncall_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
