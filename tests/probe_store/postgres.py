"""A PostgreSQL cluster of one test process: on a socket of its own, without a port, gone at the end."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

from probe.store import Store

DEBIAN = Path("/usr/lib/postgresql")
MEMORY, ROOM_BYTES = Path("/dev/shm"), 1_000_000_000


def programs() -> Path | None:
    """The directory of initdb and pg_ctl, or None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    installed = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parent.parent.name))
    return installed[-1].parent if installed else None


class Cluster:
    """`start`, then `new_database()` as often as needed, then `stop`. Nothing is synced: it outlives no crash."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        # A socket's path is limited to 107 bytes: not below pytest's directories. In memory where there is room.
        has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES
        self._home = Path(tempfile.mkdtemp(prefix="kvpg-", dir=MEMORY if has_room else None))
        self._data = self._home / "data"
        self._numbers = itertools.count()

    def start(self) -> None:
        if os.geteuid() == 0:  # the server refuses root
            names = {user.pw_name for user in pwd.getpwall()}
            shutil.chown(self._home, "postgres" if "postgres" in names else "nobody")
        self._run("initdb", "-U", "kv", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D", str(self._data))
        options = f"-F -k {self._home} -c listen_addresses= -c max_connections=200 -c autovacuum=off"
        options += " -c wal_level=minimal -c max_wal_senders=0 -c max_wal_size=64MB"
        log = str(self._home / "log")
        self._run("pg_ctl", "-w", "-t", "240", "-D", str(self._data), "-l", log, "-o", options, "start")
        self._execute("CREATE DATABASE template_kv")
        Store.open(self._url("template_kv")).close()

    def new_database(self) -> str:
        """The URL of a fresh database with the newest schema."""
        name = f"kv{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE template_kv")
        return self._url(name)

    def empty_database(self) -> str:
        """The URL of a database without any table."""
        name = f"empty{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Remove a database, whoever is still connected to it."""
        self._execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-D", str(self._data), "-m", "immediate", "stop")
        shutil.rmtree(self._home, ignore_errors=True)

    def _url(self, name: str) -> str:
        return f"postgresql+psycopg://kv@/{name}?host={self._home}"

    def _execute(self, statement: str) -> None:
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()

    def _run(self, program: str, *arguments: str) -> None:
        user = None
        if os.geteuid() == 0:
            user = self._home.stat().st_uid
        done = subprocess.run(
            [self._binaries / program, *arguments],
            user=user,
            group=None if user is None else pwd.getpwuid(user).pw_gid,
            extra_groups=None if user is None else [],
            cwd=self._home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{program} failed: {done.returncode}"
