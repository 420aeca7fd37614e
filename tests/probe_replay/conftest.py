"""Fixtures: the fakes of fakes.py, a scripted server, a store in a temporary folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probe.store import Store

FAKES = Path(__file__).with_name("fakes.py")


def _load_fakes() -> Any:
    spec = importlib.util.spec_from_file_location("replay_fakes", FAKES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replay_fakes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fakes() -> Any:
    return _load_fakes()


@pytest.fixture
def server(fakes: Any) -> Iterator[Any]:
    fake = fakes.FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
        yield opened
