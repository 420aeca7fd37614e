"""What a user meets when the database cannot be used: one sentence, nothing lost, no traceback."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from probe.store import Store, StoreError
from probe.store.database import FILE_NAME


def sentence(location: Path | str, **options: float) -> str:
    with pytest.raises(StoreError) as caught:
        Store.open(location, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_locked(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert "is locked by another process" in sentence(tmp_path, busy_timeout_s=0.1)
    other.execute("ROLLBACK")
    other.close()
    Store.open(tmp_path).close()


def test_locked_while_in_use(tmp_path: Path) -> None:
    with Store.open(tmp_path, busy_timeout_s=0.1) as store:
        other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="is locked by another process"):
            store.events.add(None, "x", "y")
        assert store.events.recent() == []  # reading goes on
        other.execute("ROLLBACK")
        other.close()
        store.events.add(None, "x", "y")


def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"this is a diary, not a database" * 200)
    assert "is not a kvoncall database" in sentence(tmp_path)


def test_damaged(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for i in range(200):
            store.events.add(None, "x", "y" * 500, ts=float(i))
    file = tmp_path / FILE_NAME
    whole = bytearray(file.read_bytes())
    whole[4096:] = os.urandom(len(whole) - 4096)
    file.write_bytes(whole)
    for left_over in tmp_path.glob(f"{FILE_NAME}-*"):
        left_over.unlink()
    with pytest.raises(StoreError, match="is damaged"):
        Store.open(tmp_path).events.recent()


def test_newer_schema(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    file = sqlite3.connect(tmp_path / FILE_NAME)
    file.execute("UPDATE alembic_version SET version_num = '9999'")
    file.commit()
    file.close()
    assert "written by a newer kvoncall (schema 9999)" in sentence(tmp_path)


def test_read_only_for_this_user() -> None:
    """As an unprivileged user on a database that root (or another user) owns."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        Store.open(directory).close()
        for path in (directory, *directory.iterdir()):
            path.chmod(0o555 if path.is_dir() else 0o444)
        script = (
            "import os, sys\n"
            "from probe.store import Store, StoreError\n"
            "os.geteuid() == 0 and os.setuid(65534)\n"
            "try:\n    Store.open(sys.argv[1])\n"
            "except StoreError as error:\n    sys.exit(str(error))\n"
        )
        done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, timeout=240)
        directory.chmod(0o755)
    assert done.returncode == 1
    assert "is read-only: give this user write access" in done.stderr
    assert done.stderr.count("\n") == 1


def test_data_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert "is a file: choose another --data-dir" in sentence(tmp_path / "data")
    assert "choose another --data-dir" in sentence(tmp_path / "data" / "below")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://h/db", "use sqlite or postgresql"),
        ("nonsense://h/db", "use sqlite"),
        ("sqlite://", "needs a file"),
        ("://", "cannot be read"),
    ],
)
def test_urls_that_cannot_work(url: str, words: str) -> None:
    assert words in sentence(url)


def test_password_is_never_shown() -> None:
    text = sentence("postgresql://anna:geheim@127.0.0.1:1/db")
    assert "geheim" not in text
    assert "127.0.0.1" in text


def test_sqlite_url(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/other.db") as store:
        assert store.where == f"{tmp_path}/other.db"
    assert (tmp_path / "other.db").exists()
