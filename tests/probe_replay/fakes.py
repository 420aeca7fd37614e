"""Fakes of everything a replay touches, for tests and for the child process that crashes (see test_runner_crash)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from engine.config import MIB, EngineConfig, ModelDims, apply_changes
from engine.memory import plan_kv_cache
from probe.load.endpoint import Endpoint, describe
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, LoadExercise
from probe.replay.observation import Check, LoadPlan, Observation, alert_fired, alert_resolved, all_completed
from probe.store import AlertUpdate, Reading, Sample, Store

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


DIMS = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 256, 64, 512, "float32")


@dataclass(frozen=True)
class FakeScenario:
    """Two short requests against the fake server; the remedy is the eviction storm's."""

    args: tuple[str, ...] = ("--device-memory", "64MiB", "--gpu-memory-utilization", "0.15", "--max-num-seqs", "64")
    time_scale: float = 0.05
    scrape_interval_s: float = 0.01
    threads: int | None = None

    id = "fake"
    title = "A fake incident"
    rule = "eviction-storm"
    runbook = "eviction-storm"
    hypothesis = "fakes preempt each other"
    article_case: Mapping[str, Any] = field(default_factory=lambda: {"case": "none"})

    def flags(self) -> list[str]:
        return list(self.args)

    def exercise(self, bench: Bench) -> LoadExercise:
        return LoadExercise(bench, self.load)

    def load(self, endpoint: Endpoint) -> LoadPlan:
        plan = synthetic(6, prompt_tokens=400, max_tokens=4, vocab_size=endpoint.vocab_size, name="q")
        return LoadPlan(tuple(plan), LoadOptions(concurrency=6, model=endpoint.model), "six fakes", tuple(plan[:1]))

    def reproduced(self, before: Observation) -> list[Check]:
        return [alert_fired(before, self.rule)]

    def verified(self, after: Observation) -> list[Check]:
        return [all_completed(after), alert_resolved(after, self.rule)]


class FakeMonitor:
    """Counts its starts and stops."""

    started = stopped = 0

    def __init__(self, store: Store) -> None:
        self.store = store

    def start(self) -> None:
        type(self).started += 1

    def stop(self) -> None:
        type(self).stopped += 1


class FakeDrill:
    """An engine that is the fake server. It also plays the monitor: when a load is over (`exits_since` is asked), the
    alert fires under the first flags and resolves under changed ones. `script` maps a method to what it must raise.
    """

    script: ClassVar[dict[str, Callable[[], None]]] = {}
    what = "drill engine"
    opening = "starting a drill engine"
    api_key: str | None = None
    url = ""
    exits: ClassVar[list[dict[str, Any]]] = []
    last: FakeDrill | None = None

    def __init__(self, store: Store, name: str, flags: list[str], **more: Any) -> None:
        self.store, self.name, self.flags, self.first_flags = store, name, list(flags), list(flags)
        self.base_url, self.closed = self.url, False
        self.loads = 0
        type(self).last = self

    def _act(self, name: str) -> None:
        self.script.get(name, lambda: None)()

    def start(self) -> Endpoint:
        self._act("start")
        self.store.targets.upsert(self.name, url=self.base_url, kind="drill", scrape_interval_s=0.1, time_scale=0.05)
        self.store.samples.write([Sample(self.name, "up", {}, time.time(), 1.0)])
        self.store.flush()
        return describe(self.base_url)

    def changed(self, changes: Mapping[str, Any]) -> list[str]:
        return apply_changes(self.flags, changes)

    def why_not_restarted(self, flags: list[str]) -> None:
        pass

    def restart(self, flags: list[str]) -> Endpoint:
        self._act("restart")
        self.flags = list(flags)
        return describe(self.base_url)

    def facts(self) -> dict[str, Any]:
        config = EngineConfig.from_args(self.flags)
        plan = plan_kv_cache(config, DIMS, weights_bytes=3 * MIB, activation_peak_bytes=4 * MIB)
        return {"engine": "kvoncall", "flags": config.flag_values(), "dims": vars(DIMS), "memory_plan": plan.to_dict()}

    def exits_since(self, ts: float) -> list[dict[str, Any]]:
        self._act("load_over")
        self.loads += 1
        if self.loads == 1:
            set_alert(self.store, self.name, "firing")
        elif self.flags != self.first_flags:
            set_alert(self.store, self.name, "resolved")
        return list(self.exits)

    def close(self) -> None:
        self.closed = True
        if self.store.targets.get(self.name):
            self.store.targets.deactivate(self.name)


def set_alert(store: Store, target: str, state: str) -> None:
    """Writes what a monitor would: the alert becomes firing, or resolves."""
    now = time.time()
    breach = state == "firing"
    reading = Reading(
        "eviction-storm", target, "breach" if breach else "ok", state, 0.4 if breach else 0.0, 0.05, 8.0, 20.0, 15.0,
        "fake storm", "fake", now,
    )  # fmt: skip
    change = ("pending", "firing") if breach else ("firing", "resolved")
    store.alerts.save([AlertUpdate(reading, "warning", 1.0, "eviction-storm", 1.0, (change,))])


def crash_at(step: str, data_dir: Path, url: str) -> None:
    """Runs a fake replay in this process, which dies without a word at `step` (a method of FakeDrill)."""
    import os

    from probe.replay.runner import ReplayRunner

    FakeDrill.url = url
    FakeDrill.script = {step: lambda: os._exit(9)}
    store = Store.open(data_dir)
    ReplayRunner(store, FakeScenario(), interactive=False, drill=FakeDrill, monitor=FakeMonitor, log_dir=data_dir).run()  # type: ignore[arg-type]
