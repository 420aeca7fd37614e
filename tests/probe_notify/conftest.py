"""Alerts by hand, a clock by hand, and a webhook that answers what the test sets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from probe.notify.dispatcher import Dispatcher
from probe.store import Alert, AlertUpdate, Reading, Store
from probe.store.database import FILE_NAME

START = 1_800_000_000.0


@dataclass(frozen=True)
class Named:
    """As much of a rule as muting reads."""

    id: str
    inhibited_by: tuple[str, ...] = ()


RULES = (Named("oom"), Named("eviction-storm", ("oom",)), Named("kv-saturated", ("oom", "eviction-storm")))


ALERT = Alert(
    id=1,
    rule="kv-saturated",
    target="prod-1",
    state="firing",
    severity="warning",
    value=1.0,
    threshold=0.9,
    numerator=None,
    denominator=None,
    window_s=60.0,
    hold_s=0.0,
    summary="full",
    coverage="1 of 1",
    runbook="kv-saturated",
    replay_id=None,
    progress_s=0.0,
    pending_at=0.0,
    firing_at=0.0,
    resolved_at=None,
    updated_at=0.0,
    engine="vllm",
    model="llama-3",
)


@dataclass
class Hook:
    """A webhook: `answers` are the next status codes (then 200); `posts` what arrived, (headers, payload)."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    posts: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    pause: threading.Event | None = None  # a request waits here before it is answered

    @property
    def messages(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(status, [(status, rule) of each alert]) of every post."""
        return [(p["status"], [(a["status"], a["labels"]["alertname"]) for a in p["alerts"]]) for _, p in self.posts]


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.posts.append((dict(self.headers), json.loads(body)))
            if found.pause is not None:
                found.pause.wait(20)
            code = found.answers.pop(0) if found.answers else 200
            try:
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
            except OSError:
                pass  # the sender gave up

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}/hook"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database without rows: copying it is quicker than migrating for each test."""
    directory = tmp_path_factory.mktemp("empty")
    Store.open(directory).close()
    return directory / FILE_NAME


@pytest.fixture
def data_dir(tmp_path: Path, empty_store: Path) -> Path:
    """A data directory with an empty store, not open yet."""
    directory = tmp_path / "data"
    directory.mkdir()
    shutil.copy(empty_store, directory / FILE_NAME)
    return directory


@pytest.fixture
def store(data_dir: Path) -> Iterator[Store]:
    with Store.open(data_dir) as opened:
        yield opened


def move(store: Store, rule: str, state: str, at: float, target: str = "a", severity: str = "warning") -> Alert:
    """Bring the alert of a rule to "firing" or "resolved", as the evaluator does; returns it."""
    steps = {"pending": (("inactive", "pending"),), "firing": (("inactive", "pending"), ("pending", "firing"))}
    transitions = steps.get(state, (("firing", state),))
    reading = Reading(rule, target, "breach", state, 1.0, 0.5, None, None, 60.0, f"{rule} is bad", "1 of 1", at)
    store.alerts.save([AlertUpdate(reading, severity, 0.0, rule, 0.0, transitions)])
    return next(alert for alert in store.alerts.history(target=target) if alert.rule == rule)


@dataclass
class Alertmanager:
    """A real one: `post` and `get` talk to its API."""

    url: str

    def post(self, path: str, content: object) -> None:
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        _OPENER.open(request, timeout=30).close()

    def get(self, path: str) -> Any:
        with _OPENER.open(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Callable[[str], Alertmanager]]:
    """`alertmanager(config)` starts one and waits until it listens."""
    program = shutil.which("prometheus-alertmanager")
    if program is None and os.environ.get("CI") != "true":
        pytest.skip("prometheus-alertmanager is not installed")
    running: list[subprocess.Popen[bytes]] = []

    def start(config: str) -> Alertmanager:
        assert program is not None
        (tmp_path / "alertmanager.yml").write_text(config)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        arguments = [f"--config.file={tmp_path / 'alertmanager.yml'}", f"--storage.path={tmp_path / 'alertmanager'}"]
        arguments += [f"--web.listen-address={address}", "--cluster.listen-address="]
        process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running.append(process)
        found, deadline = Alertmanager(f"http://{address}"), time.monotonic() + 60
        while True:
            try:
                found.get("/api/v2/status")
                return found
            except OSError:
                assert process.poll() is None, "Alertmanager ended"
                assert time.monotonic() < deadline, "Alertmanager does not listen"
                time.sleep(0.05)

    yield start
    for process in running:
        process.kill()
        process.wait(30)


@dataclass
class Clock:
    """Runs a dispatcher by hand: `to(t)` ticks every `step_s` up to START + t, and waits for what it sends."""

    dispatcher: Dispatcher
    now: float = START
    step_s: float = 5.0

    def to(self, seconds: float) -> None:
        async def run() -> None:
            while self.now < START + seconds:
                self.now = min(self.now + self.step_s, START + seconds)
                await self.dispatcher.tick(self.now)
                await self.dispatcher.drain()

        asyncio.run(run())


@pytest.fixture
def clock(store: Store) -> Clock:
    return Clock(Dispatcher(store, RULES))
