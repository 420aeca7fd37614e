"""Stores on SQLite and on PostgreSQL: what takes `store` or `store_location` runs on both."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from probe.store import Store

HERE = Path(__file__).parent


def _module(name: str) -> ModuleType:
    """A module beside this one: test directories are no packages."""
    spec = importlib.util.spec_from_file_location(f"probe_store_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def postgres() -> Iterator[object]:
    """A cluster with `new_database()` and `empty_database()`."""
    server = _module("postgres")
    binaries = server.programs()
    if binaries is None:
        if os.environ.get("CI") == "true":
            pytest.fail("PostgreSQL is not installed: CI needs it")
        pytest.skip("PostgreSQL is not installed")
    cluster = server.Cluster(binaries)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A data directory or a database URL, empty but for the schema."""
    if request.param == "sqlite":
        yield str(tmp_path / "data")
        return
    cluster = request.getfixturevalue("postgres")
    url = cluster.new_database()
    yield url
    cluster.drop(url)


@pytest.fixture
def store(store_location: str) -> Iterator[Store]:
    with Store.open(store_location) as opened:
        yield opened


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, what)` returns once it holds, and fails after a time that only a hang exceeds."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for: {what}"
            time.sleep(0.02)

    return wait


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`child(role, location, argument)` starts `store_child.py`; whatever still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(role: str, location: Path | str, argument: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "store_child.py"), role, str(location), argument]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=120)
