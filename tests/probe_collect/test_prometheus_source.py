"""A real Prometheus as the source: one server, scraping a fake engine and an address where nobody answers."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from probe.collect import prometheus
from probe.collect.changes import Observation
from probe.collect.discovery import discover
from probe.collect.prometheus import PrometheusError, PrometheusServer
from probe.collect.prometheus_target import PrometheusTarget, series
from probe.store import Target

pytestmark = pytest.mark.prometheus

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 3
vllm:num_requests_running{{engine="1",model_name="m"}} 5
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m",job="batch"}} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} {n}
# TYPE vllm:request_success counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {n}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="m"}} {n}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {n}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {n}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {n}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="64"}} 1
process_start_time_seconds 1700000000
"""


@dataclass
class Running:
    """The server, and the addresses it scrapes."""

    url: str
    engine: str
    nobody: str

    def target(self, instance: str, **options: Any) -> Target:
        options = {"matchers": {"job": "llm", "instance": instance}, **options}
        fields = (1, "t", self.url, "external", "vllm", [], {}, 1.0, 1.0, True, 0.0, "prometheus", options)
        return Target(*fields)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("prometheus")
    scrapes = [0]

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scrapes[0] += 1
            body = PAGE.format(n=scrapes[0]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever, args=(0.02,), daemon=True).start()
    nobody = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    addresses = [f"127.0.0.1:{server.server_port}" for server in (engine, nobody)]
    nobody.server_close()
    process, url = _start(folder, addresses)
    try:
        _wait(lambda: _scrapes(url, addresses[0]) >= 3, "three scrapes")
        yield Running(url, *addresses)
    finally:
        process.terminate()
        process.communicate(timeout=60)
        engine.shutdown()
        engine.server_close()


def _start(folder: Path, addresses: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 400ms, scrape_timeout: 400ms}\n"
        f"scrape_configs: [{{job_name: llm, static_configs: [{{targets: {addresses}, labels: {{zone: a}}}}]}}]\n"
    )
    port = _free_port()
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _scrapes(url: str, instance: str) -> int:
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": f'up{{instance="{instance}"}}[1m]'})
        result = answer.json()["data"]["result"]
    except (httpx.HTTPError, ValueError, KeyError):
        return 0
    return len(result[0]["values"]) if result else 0


def _wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        time.sleep(0.05)


@pytest.fixture
def asked(running: Running) -> Iterator[PrometheusServer]:
    server = PrometheusServer(running.url, timeout_s=60.0)
    yield server
    server.close()


def values(seen: Observation, metric: str) -> list[tuple[dict[str, str], float]]:
    return [(dict(s.labels), s.value) for s in seen.samples if s.metric == metric]


def test_every_scrape_of_prometheus_is_read_once_and_at_its_own_time(running: Running, asked: PrometheusServer) -> None:
    source, target = PrometheusTarget(asked), running.target(running.engine)
    first = source.read(target, time.time())
    assert len(first) >= 3
    _wait(lambda: _scrapes(running.url, running.engine) > len(first) + 1, "two more scrapes")
    found = first + source.read(target, time.time())
    (up,) = asked.query(f'up{{instance="{running.engine}"}}[5m]').series
    stored = [ts for ts, _ in up[1]]
    assert [o.ts for o in found] == stored[: len(found)]
    assert len(found) > len(first)
    counts = [values(o, "preemptions_total")[0][1] for o in found]
    assert counts == [counts[0] + i for i in range(len(counts))]
    for seen in found:
        assert seen.scrape is not None
        assert {s.ts for s in seen.samples} == {seen.ts}
        assert values(seen, "up") == [({}, 1.0)]


def test_samples_have_the_engines_labels_and_not_those_of_prometheus(running: Running, asked: PrometheusServer) -> None:
    seen = PrometheusTarget(asked).read(running.target(running.engine), time.time())[-1]
    running_requests = sorted(values(seen, "requests_running"), key=lambda found: found[1])
    assert running_requests == [({"engine": "0", "model_name": "m"}, 3.0), ({"engine": "1", "model_name": "m"}, 5.0)]
    # Prometheus calls it exported_job, because job is its own.
    assert values(seen, "requests_waiting") == [({"engine": "0", "model_name": "m", "job": "batch"}, 1.0)]
    assert {labels["le"] for labels, _ in values(seen, "ttft_seconds_bucket")} == {"0.5", "+Inf"}
    assert seen.scrape is not None
    assert seen.scrape.info["num_gpu_blocks"] == "64"
    assert seen.scrape.missing == ()
    assert seen.scrape.exposed == 12
    assert values(seen, "scrape_duration_seconds")[0][1] > 0


def test_a_target_that_prometheus_cannot_scrape_is_down_at_each_of_its_tries(
    running: Running, asked: PrometheusServer
) -> None:
    found = PrometheusTarget(asked).read(running.target(running.nobody), time.time())
    assert found
    for seen in found:
        assert (seen.scrape, values(seen, "up")) == (None, [({}, 0.0)])
        assert seen.error == f"Prometheus could not scrape {running.nobody}."


def test_a_target_that_prometheus_does_not_know_is_down_now(running: Running, asked: PrometheusServer) -> None:
    (seen,) = PrometheusTarget(asked).read(running.target("elsewhere:1"), 1_700_000_000.0)
    assert values(seen, "up") == [({}, 0.0)]
    assert "has no target with" in (seen.error or "")


def test_labels_of_several_targets_are_no_target(running: Running, asked: PrometheusServer) -> None:
    target = running.target("", matchers={"job": "llm"})
    (seen,) = PrometheusTarget(asked).read(target, time.time())
    assert (seen.known, seen.samples) == (False, [])
    assert "fit 2 targets" in (seen.error or "")


def test_discovery_finds_the_engine_and_its_model(running: Running, asked: PrometheusServer) -> None:
    (found,) = discover(asked).candidates
    assert (found.engine, found.models) == ("vllm", ("m",))
    assert found.matchers == {"job": "llm", "instance": running.engine}
    assert found.name == running.engine.replace(":", "-")
    assert "vllm" in found.evidence
    assert found.scrape_interval_s is not None
    assert found.scrape_interval_s > 0.1


def test_a_series_over_time_in_parts_is_the_series_at_once(
    running: Running, asked: PrometheusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, end = running.target(running.engine), time.time()
    whole, problems = series(asked, target, "requests_running", end - 3, end, 0.1)
    assert problems == ()
    assert list(whole.columns) == ["ts", "value", "engine", "model_name"]
    assert set(zip(whole["engine"], whole["value"], strict=True)) == {("0", 3.0), ("1", 5.0)}
    monkeypatch.setattr(prometheus, "MAX_POINTS", 4)
    parts, _ = series(asked, target, "requests_running", end - 3, end, 0.1)
    assert whole.equals(parts)
    assert not parts.duplicated(["ts", "engine"]).any()
    up, _ = series(asked, target, "up", end - 1, end, 0.5)
    assert set(up["value"]) == {1.0}
    with pytest.raises(PrometheusError, match="nothing that gives no_such_metric"):
        series(asked, target, "no_such_metric", end - 1, end, 0.5)


def test_prometheus_says_what_is_wrong_with_a_query(asked: PrometheusServer) -> None:
    with pytest.raises(PrometheusError, match=r"answered HTTP 400: .*parse error") as caught:
        asked.query("sum(")
    assert "\n" not in str(caught.value)
