"""A server that answers what the test says, by path; targets that need no store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from probe.store import Target


@dataclass
class Reply:
    """One answer; `wait` holds it back until set, `pause_s` for a while."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: threading.Event | None = None
    pause_s: float = 0.0


@dataclass
class FakeServer:
    """Answers by path (without the query): a `Reply`, or what a function of the request's form makes."""

    replies: dict[str, Reply | Callable[[str], Reply]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str], str]] = field(default_factory=list)  # path, headers, body
    url: str = ""

    def serve(self) -> ThreadingHTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length).decode()
                path, _, query = self.path.partition("?")
                fake.requests.append((path, dict(self.headers), body or query))
                reply = fake.replies.get(path, Reply(status=404))
                reply = reply(body or query) if callable(reply) else reply
                if reply.wait is not None:
                    reply.wait.wait(20)
                time.sleep(reply.pause_s)
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.body)
                except OSError:
                    pass  # the client gave up

            do_POST = do_GET  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        return server


@pytest.fixture
def servers() -> Iterator[Callable[[], FakeServer]]:
    """`servers()` starts one more."""
    running: list[ThreadingHTTPServer] = []

    def start() -> FakeServer:
        fake = FakeServer()
        running.append(fake.serve())
        return fake

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(servers: Callable[[], FakeServer]) -> FakeServer:
    return servers()


def target(name: str = "t", **changes: Any) -> Target:
    """A target of a vLLM engine."""
    fields: dict[str, Any] = {
        "id": 1,
        "name": name,
        "url": "http://h",
        "kind": "external",
        "engine": "vllm",
        "flags": [],
        "facts": {},
        "scrape_interval_s": 1.0,
        "time_scale": 1.0,
        "active": True,
        "created_at": 0.0,
    }
    return Target(**{**fields, **changes})


@pytest.fixture(name="target")
def make_target() -> Callable[..., Target]:
    """`target(name, url=…)` makes one that is in no store."""
    return target


@pytest.fixture(name="reply")
def make_reply() -> type[Reply]:
    """`reply(body, status=…)` makes an answer for `server.replies`."""
    return Reply


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
