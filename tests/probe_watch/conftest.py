"""An engine that is only its `/metrics`: what it says, and how badly, is set by the test."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from probe.store import Store

DATA = Path(__file__).parent / "data"


@dataclass
class FakeEngine:
    """Counters and gauges of one vLLM process, exposed in vLLM's names; `body` replaces all of them."""

    values: dict[str, float] = field(
        default_factory=lambda: {
            "vllm:num_requests_running": 0.0,
            "vllm:num_requests_waiting": 0.0,
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:num_preemptions_total": 0.0,
            "vllm:generation_tokens_total": 0.0,
        }
    )
    finished: float = 0.0
    started: float = 1_700_000_000.0
    body: bytes | None = None
    status: int = 200
    pause: threading.Event | None = None  # a request waits here before it is answered
    pages: dict[str, object] = field(default_factory=dict)
    scrapes: int = 0
    url: str = ""

    def text(self) -> bytes:
        lines = [f"process_start_time_seconds {self.started}"]
        lines += [f'{n}{{engine="0",model_name="m"}} {v}' for n, v in self.values.items()]
        lines.append(f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {self.finished}')
        lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0')
        return ("\n".join(lines) + "\n").encode()

    def restart(self) -> None:
        """A new process: counters at 0, another start time."""
        self.started += 100.0
        self.finished = 0.0
        self.values = {n: (0.0 if n.endswith("_total") else v) for n, v in self.values.items()}


def serve(engine: FakeEngine) -> ThreadingHTTPServer:
    """Serve the engine on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if engine.pause is not None:
                engine.pause.wait(20)
            if self.path == "/metrics":
                engine.scrapes += 1
                self._answer(engine.status, engine.text() if engine.body is None else engine.body)
            elif self.path in engine.pages:
                self._answer(200, json.dumps(engine.pages[self.path]).encode())
            else:
                self._answer(404, b"")

        def _answer(self, status: int, body: bytes) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the scraper gave up

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    engine.url = f"http://127.0.0.1:{server.server_port}"
    return server


@pytest.fixture
def engines() -> Iterator[Callable[[], FakeEngine]]:
    """`engines()` serves one more engine."""
    servers: list[ThreadingHTTPServer] = []

    def start() -> FakeEngine:
        fake = FakeEngine()
        servers.append(serve(fake))
        return fake

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def engine(engines: Callable[[], FakeEngine]) -> FakeEngine:
    return engines()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def vllm_scrape() -> bytes:
    """`/metrics` of a real vLLM 0.32.0 after 42 preemptions (some families left out)."""
    return (DATA / "vllm-after-preemptions.prom").read_bytes()


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
    """`child(role, data_dir, argument)` starts `child.py`; whatever still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(role: str, data_dir: Path, argument: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).parent / "child.py"), role, str(data_dir), argument]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=120)
