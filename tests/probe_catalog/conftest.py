"""The small releases of releases.py, and a catalog without the additions of whoever runs the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def releases() -> Any:
    """The module releases.py."""
    spec = importlib.util.spec_from_file_location("small_releases", Path(__file__).with_name("releases.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def own_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's catalog folder, empty."""
    folder = tmp_path / "own"
    monkeypatch.setenv("KVONCALL_CATALOG", str(folder))
    return folder
