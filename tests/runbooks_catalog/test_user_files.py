"""Where a user's own catalog and pages lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbooks.catalog_data import overlay_dir
from runbooks.load import user_folder
from runbooks.user_files import own_folder


def test_a_variable_wins_then_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path))
    monkeypatch.delenv("KVONCALL_CATALOG", raising=False)
    monkeypatch.delenv("KVONCALL_RUNBOOKS", raising=False)
    assert (overlay_dir(), user_folder()) == (tmp_path / "catalog", tmp_path / "runbooks")
    monkeypatch.setenv("KVONCALL_CATALOG", str(tmp_path / "own"))
    assert overlay_dir() == tmp_path / "own"


def test_a_database_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_DATA", "postgresql+psycopg://db/kvoncall")
    assert "postgresql" not in str(own_folder("KVONCALL_NOT_SET", "catalog"))
