"""Fixtures: a fake OpenAI server and a store in a temporary folder."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probe.store import Store


def _load_fake() -> Any:
    spec = importlib.util.spec_from_file_location("quality_fakes", Path(__file__).with_name("fake_openai.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality_fakes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def servers() -> Iterator[Callable[[], Any]]:
    """`servers()` serves one more fake."""
    module = _load_fake()
    running: list[Any] = []

    def start() -> Any:
        running.append(module.FakeOpenAI())
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def server(servers: Callable[[], Any]) -> Any:
    return servers()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
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
