"""Attaching looks at the address first and registers only what it understands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from probe.store import Sample, Store
from probe.targets import TargetError, attach_target, measured_facts

VLLM = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 1.0\n'
OURS = VLLM + '# TYPE kvoncall:kv_blocks gauge\nkvoncall:kv_blocks{state="free"} 3.0\n'


@pytest.fixture
def serve() -> Iterator[dict[str, str]]:
    pages: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages["body"].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    pages["url"] = f"http://127.0.0.1:{server.server_port}"
    yield pages
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize(("body", "engine"), [(VLLM, "vllm"), (OURS, "kvoncall")])
def test_the_engine_is_told_by_its_metrics(serve: dict[str, str], store: Store, body: str, engine: str) -> None:
    serve["body"] = body
    target = attach_target(store, f"prod={serve['url']}/")
    assert (target.name, target.url, target.engine, target.kind) == ("prod", serve["url"], engine, "external")
    assert [t.name for t in store.targets.list()] == ["prod"]


def test_without_a_name_the_address_is_the_name(serve: dict[str, str], store: Store) -> None:
    serve["body"] = VLLM
    assert attach_target(store, serve["url"]).name == serve["url"].removeprefix("http://")


@pytest.mark.parametrize("spec", ["", "localhost:8000", "ftp://127.0.0.1", "http://127.0.0.1:99999", "x=http://:80"])
def test_what_is_no_address_is_refused(store: Store, spec: str) -> None:
    with pytest.raises(TargetError) as caught:
        attach_target(store, spec)
    assert "\n" not in str(caught.value)
    assert store.targets.list() == []


@pytest.mark.parametrize(
    ("body", "says"), [("# TYPE go_goroutines gauge\ngo_goroutines 3.0\n", "none of an engine known"), ("{", "format")]
)
def test_other_pages_are_refused_and_nothing_is_registered(
    serve: dict[str, str], store: Store, body: str, says: str
) -> None:
    serve["body"] = body
    with pytest.raises(TargetError, match=says):
        attach_target(store, serve["url"])
    assert store.targets.list() == []


def test_traffic_is_measured_over_the_look_back(store: Store) -> None:
    import time

    now = time.time()
    target = store.targets.upsert("prod", url="http://127.0.0.1:1", kind="external")
    labels = {"engine": "0", "model_name": "m"}
    for age, running, finished, prompt in ((60.0, 3, 100, 5_000), (30.0, 9, 110, 6_000), (1.0, 2, 120, 7_000)):
        rows = {
            "requests_running": running,
            "request_prompt_tokens_count": finished,
            "request_prompt_tokens_sum": prompt,
        }
        store.samples.write(Sample("prod", metric, labels, now - age, value) for metric, value in rows.items())
    store.flush()
    traffic = measured_facts(store, target, None)["traffic"]
    assert traffic["peak_running"] == 9
    assert traffic["prompt_tokens_mean"] == 100.0  # 2,000 tokens over 20 finished requests
    assert "output_tokens_mean" not in traffic  # never measured
