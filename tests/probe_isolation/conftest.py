"""Fixtures: a fake server with a prefix cache, the same without a network, and rounds over it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probe.isolation.options import IsolationOptions, Setting
from probe.isolation.round import Round


def _load_fake() -> Any:
    spec = importlib.util.spec_from_file_location("isolation_fakes", Path(__file__).with_name("fake_cache.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["isolation_fakes"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache() -> Any:
    return _load_fake().FakeCache()


@pytest.fixture
def server() -> Iterator[Any]:
    fake = _load_fake().FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def make_round(cache: Any) -> Callable[..., Round]:
    """`make_round(probes=…, fault=…)`: a round over the fake cache; `.client.asked` tells what was sent."""

    def make(fault: Callable[[int], str] = lambda n: "", prefix_tokens: int = 64, **options: Any) -> Round:
        client = sys.modules["isolation_fakes"].StubClient(cache, fault)
        made = Round(client, IsolationOptions(**options), Setting("testbed", prefix_tokens))
        made.rng.seed(7)
        return made

    return make
