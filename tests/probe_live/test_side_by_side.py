"""A real Prometheus with the exported rules beside our own monitor, on the same servers: two fake ones and the live
engine. Both must say the same of every alert at every moment, but for the seconds around a change.

One fake server preempts, the other keeps blocks with no request left; half-way both recover. The engine idles.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from engine.supervisor import EngineSupervisor
from probe.alerts.rules import EVICTION_STORM
from probe.export.alerts import Options, select
from probe.export.prometheus import rules_text
from probe.fleet import histories
from probe.monitor import Monitor
from probe.store import Store

pytestmark = [pytest.mark.prometheus, pytest.mark.xdist_group("live")]

TIME_SCALE = 0.05  # windows of 15 s, hold times of 3 s
SICK_S, WELL_S = 18.0, 26.0
# Both scrape and evaluate once a second, each at its own moment: that far a change may be seen apart.
SLACK_S = 4.0
READY_S = 60.0

States = dict[tuple[str, str], str]  # (target, rule) -> pending or firing


class FakeServer:
    """vLLM's names; `preempts`: 5 preemptions a second at 20 finished requests. Else it idles and may keep blocks."""

    def __init__(self, preempts: bool) -> None:
        self.sick, self._preempts = True, preempts
        self._began = self._since = time.monotonic()
        self._preempted = 0.0

    def page(self) -> str:
        now = time.monotonic()
        if self._preempts and self.sick:
            self._preempted += 5 * (now - self._since)
        self._since = now
        finished = 20 * (now - self._began) if self._preempts else 0.0
        usage = 0.5 if self._preempts or self.sick else 0.0
        values = {
            "num_requests_running gauge": 8 if self._preempts else 0,
            "num_requests_waiting gauge": 0,
            "kv_cache_usage_perc gauge": usage,
            "num_preemptions counter": self._preempted,
            "request_success counter": finished,
            "generation_tokens counter": 100 * finished,
            "prompt_tokens counter": 100 * finished,
            "prefix_cache_queries counter": 0.0,
            "prefix_cache_hits counter": 0.0,
        }
        lines = []
        for name_and_type, value in values.items():
            name, kind = name_and_type.split()
            suffix = "_total" if kind == "counter" else ""
            lines.append(f"# TYPE vllm:{name} {kind}")
            lines.append(f'vllm:{name}{suffix}{{engine="0",model_name="m"}} {value}')
        return "\n".join(lines) + "\n"


def serve(fake: FakeServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = fake.page().encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


@pytest.fixture
def fakes() -> Iterator[tuple[dict[str, str], list[FakeServer]]]:
    """Addresses by name, and the servers."""
    servers = [FakeServer(preempts=True), FakeServer(preempts=False)]
    made = [serve(fake) for fake in servers]
    yield {name: f"127.0.0.1:{m.server_port}" for name, m in zip(("storm", "leak"), made, strict=True)}, servers
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """The embedded engine's address."""
    supervisor = EngineSupervisor(["--device-memory", "192MiB"], log_dir=tmp_path / "logs", threads=1)
    supervisor.start()
    assert supervisor.base_url is not None
    yield supervisor.base_url.removeprefix("http://")
    supervisor.stop()


def start_prometheus(folder: Path, instances: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("prometheus")
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("prometheus is missing")
        pytest.skip("prometheus is not installed")
    options = Options(jobs=("vllm",), scrape_interval_s=1.0, time_scale=TIME_SCALE)
    (folder / "rules.yaml").write_text(rules_text(select(options)))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": instances}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        assert process.poll() is None, "Prometheus refused its configuration"
        assert time.monotonic() < deadline, "Prometheus does not get ready"
        time.sleep(0.2)


def theirs(client: httpx.Client, url: str, names: dict[str, str]) -> States:
    answer = client.get(f"{url}/api/v1/query", params={"query": 'ALERTS{kvoncall_rule!=""}'}).json()
    by_instance = {instance: name for name, instance in names.items()}
    return {
        (by_instance.get(s["metric"].get("instance", ""), "all"), s["metric"]["kvoncall_rule"]): s["metric"][
            "alertstate"
        ]
        for s in answer["data"]["result"]
    }


def ours(store: Store) -> States:
    return {(alert.target, alert.rule): alert.state for alert in store.alerts.active()}


def apart(seen: list[tuple[float, States, States]], key: tuple[str, str]) -> list[float]:
    """The moments at which the two disagree on an alert and neither has changed within the slack."""
    changes = [
        seen[i][0]
        for side in (1, 2)
        for i in range(1, len(seen))
        if seen[i][side].get(key) != seen[i - 1][side].get(key)  # type: ignore[union-attr]
    ]
    settled = [row for row in seen if all(abs(row[0] - change) > SLACK_S for change in changes)]
    return [at for at, mine, other in settled if mine.get(key) != other.get(key)]


def look_back(url: str, names: dict[str, str]) -> None:
    """A backtest on what Prometheus keeps: the storm would have paged (its hold time left out), nobody else."""
    now = time.time()
    notes: list[str] = []
    found = histories(url, EVICTION_STORM, now - SICK_S - WELL_S, now, step_s=1.0, report=notes.append)
    tested = {h.target.options["matchers"]["instance"]: h.judge(hold_s=0.0) for h in found}
    assert set(tested) == set(names.values())
    assert {i for i, result in tested.items() if result.firings} == {names["storm"]}
    assert not any("eviction" in note or "preempt" in note for note in notes), notes


def test_our_monitor_and_prometheus_say_the_same(
    fakes: tuple[dict[str, str], list[FakeServer]], engine: str, tmp_path: Path
) -> None:
    names, servers = fakes
    names = {**names, "embedded": engine}
    process, url = start_prometheus(tmp_path, list(names.values()))
    seen: list[tuple[float, States, States]] = []
    with Store.open(tmp_path / "store") as store, httpx.Client(trust_env=False, timeout=10) as client:
        for name, instance in names.items():
            kind = "kvoncall" if name == "embedded" else "vllm"
            store.targets.upsert(
                name, url=f"http://{instance}", kind="external", engine=kind, scrape_interval_s=1.0,
                time_scale=TIME_SCALE,
            )  # fmt: skip
        monitor = Monitor(store)
        monitor.start()
        try:
            began = time.monotonic()
            while (now := time.monotonic() - began) < SICK_S + WELL_S:
                for server in servers:
                    server.sick = now < SICK_S
                seen.append((now, ours(store), theirs(client, url, names)))
                time.sleep(0.5)
            look_back(url, names)
        finally:
            monitor.stop()
            process.terminate()
            process.wait(timeout=30)
    expected = {("storm", "eviction-storm"), ("leak", "kv-block-leak")}
    for side in (1, 2):
        fired = {key for row in seen for key, state in row[side].items() if state == "firing"}  # type: ignore[union-attr]
        assert fired == expected, side
    keys = {key for row in seen for side in (1, 2) for key in row[side]}  # type: ignore[union-attr]
    assert {key: moments for key in keys if (moments := apart(seen, key))} == {}
    assert seen[-1][1] == seen[-1][2] == {}
    assert {server.sick for server in servers} == {False}
