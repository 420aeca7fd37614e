"""A tiny OpenAI-shaped server with scripted faults, and a store in a temporary folder."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from probe.store import Store

MODEL = {"id": "fake", "max_model_len": 512}


class FakeServer:
    """Answers completions token by token. `fault(n)` names what request n (from 0) meets:

    "" (fine), "503", "error_event" (HTTP 200, then an error object), "cut" (the stream just ends), "die" (the server
    closes every connection and its port). `bodies` keeps what was asked.
    """

    def __init__(self) -> None:
        self.fault: Callable[[int], str] = lambda n: ""
        self.token_delay_s = 0.0
        self.vocab_size: int | None = 64
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listens (again), on the same port once it has one."""
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.cut_all()

    def take(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.bodies.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return len(self.bodies) - 1

    def done(self) -> None:
        with self._lock:
            self.in_flight -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args: Any) -> None:
        self.sockets: list[Any] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.sockets.append(request)
        super().process_request(request, client_address)

    def cut_all(self) -> None:
        for sock in self.sockets:
            try:
                sock.shutdown(2)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Quiet."""

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._json(200, {"data": [MODEL]})
            elif self.path == "/debug/engine" and fake.vocab_size is not None:
                self._json(200, {"engine": "kvoncall", "dims": {"vocab_size": fake.vocab_size}})
            else:
                self._json(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = fake.take(body)
            try:
                self._complete(body, fake.fault(number))
            except OSError:
                self.close_connection = True
            finally:
                fake.done()

        def _complete(self, body: dict[str, Any], fault: str) -> None:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"],
                     "prompt_tokens_details": {"cached_tokens": 3}}  # fmt: skip
            if fault == "503":
                self._json(503, {"error": {"message": "the queue is full", "type": "x"}})
            elif fault == "die":
                threading.Thread(target=fake.stop).start()
                time.sleep(5)
            elif not body["stream"]:
                self._json(200, {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage})
            else:
                self._stream(body["max_tokens"], fault, usage)

        def _stream(self, tokens: int, fault: str, usage: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for n in range(tokens):
                time.sleep(fake.token_delay_s)
                if fault and n == tokens // 2:
                    if fault == "error_event":
                        self._event({"error": {"message": "out of blocks", "code": 500}})
                        self._event("[DONE]")
                    return
                last = n == tokens - 1
                self._event({"choices": [{"index": 0, "text": "a", "finish_reason": "length" if last else None}]})
            self._event({"choices": [], "usage": usage})
            self._event("[DONE]")

        def _event(self, value: Any) -> None:
            data = value if isinstance(value, str) else json.dumps(value)
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

    return Handler


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "data") as opened:
        yield opened
