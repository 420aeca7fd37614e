"""The endless load: waits for a server, survives its restarts, pauses, and asks what it must know first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from probe.load.background import BackgroundLoad
from probe.load.endpoint import EndpointError, describe


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def load(server: Any) -> Iterator[BackgroundLoad]:
    background = BackgroundLoad(server.url, rate=50.0, concurrency=3)
    yield background
    background.stop()


def test_it_sends_and_never_exceeds_its_concurrency(server: Any, load: BackgroundLoad) -> None:
    assert load.status().state == "stopped"
    load.start()
    load.start()
    until(lambda: load.status().completed >= 10)
    assert load.status().state == "running"
    assert server.most_in_flight <= 3
    assert all(len(b["prompt"]) + b["max_tokens"] <= 512 and not b["stream"] for b in server.bodies)
    load.stop()
    sent = len(server.bodies)
    time.sleep(0.2)
    assert len(server.bodies) == sent
    assert load.status().state == "stopped"


def test_pause_and_resume(server: Any, load: BackgroundLoad) -> None:
    load.start()
    until(lambda: load.status().completed >= 3)
    load.pause()
    assert load.status().state == "paused"
    time.sleep(0.3)
    sent = len(server.bodies)
    time.sleep(0.3)
    assert len(server.bodies) == sent
    load.resume()
    until(lambda: len(server.bodies) > sent)


def test_it_outlives_a_restart_of_the_server(server: Any, load: BackgroundLoad) -> None:
    load.start()
    until(lambda: load.status().completed >= 3)
    server.stop()
    until(lambda: load.status().state == "waiting")
    assert load.status().last_error
    before = load.status().completed
    server.start()
    until(lambda: load.status().completed > before)
    assert load.status().state == "running"


def test_it_waits_for_a_url() -> None:
    background = BackgroundLoad(lambda: None, rate=1.0)
    background.start()
    until(lambda: background.status().state == "waiting")
    background.stop()


def test_a_refusal_counts_as_failed_and_is_told(server: Any, load: BackgroundLoad) -> None:
    server.fault = lambda n: "503"
    load.start()
    until(lambda: load.status().failed >= 2)
    assert "the queue is full" in load.status().last_error
    assert load.status().completed == 0


def test_describe(server: Any) -> None:
    found = describe(server.url)
    assert (found.model, found.max_model_len, found.vocab_size) == ("fake", 512, 64)
    server.vocab_size = None
    assert describe(server.url).vocab_size is None
    with pytest.raises(EndpointError, match="cannot be asked"):
        describe("http://127.0.0.1:9")


def test_bad_rates() -> None:
    with pytest.raises(ValueError, match="rate"):
        BackgroundLoad("http://x", rate=0)
