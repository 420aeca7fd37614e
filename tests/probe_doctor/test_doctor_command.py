"""The command: a live server, a stored target, a Prometheus server; text, JSON and exit codes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from probe.cli import main
from probe.store import AlertUpdate, Reading, Sample, Store

INFO = (
    'vllm:cache_config_info{engine="0",block_size="16",cache_dtype="auto",enable_prefix_caching="True",'
    'gpu_memory_utilization="0.92",num_gpu_blocks="4001",num_gpu_blocks_override="None",'
    'kv_cache_size_tokens="64000"} 1.0'
)


def page(turn: int, preempted_a_scrape: int) -> str:
    own = 'engine="0",model_name="m"'
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{own}}} 24.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{own}}} {8.0 if preempted_a_scrape else 0.0}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{own}}} {0.98 if preempted_a_scrape else 0.5}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{{own}}} {5 + turn * preempted_a_scrape}
# TYPE vllm:request_success counter
vllm:request_success_total{{{own},finished_reason="stop"}} {100 + 4 * turn}
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{{own}}} {1000 * turn}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{{own}}} {1000 * turn}
{INFO}
process_start_time_seconds 1.7e+09
"""


@dataclass
class Site:
    """A server of pages by path; `preempted` a scrape of its metrics."""

    url: str = ""
    preempted: int = 0
    scrapes: int = 0
    version: str = "0.32.0"
    prometheus: Callable[[str], Any] | None = None
    gone_after: int = field(default=10**9)

    def answer(self, path: str) -> str | None:
        where = urlsplit(path)
        if where.path == "/api/v1/query" and self.prometheus is not None:
            return json.dumps(self.prometheus(parse_qs(where.query)["query"][0]))
        if where.path == "/metrics" and self.scrapes < self.gone_after:
            self.scrapes += 1
            return page(self.scrapes, self.preempted)
        return {
            "/version": json.dumps({"version": self.version}),
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 8192}]}),
        }.get(where.path)


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            body = found.answer(f"{self.path}?{asked}" if asked else self.path)
            self.send_response(200 if body is not None else 404)
            data = (body or "").encode()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes a tenth of a second apart."""
    monkeypatch.setattr("probe.doctor.observed.LEAST_INTERVAL_S", 0.05)


def run(*args: str) -> int:
    return main(["doctor", *args])


def test_a_storm_on_a_live_server(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    site.preempted = 9
    code = run(site.url, "--for", "0.3", "--json", "--flags", "vllm serve m --max-num-seqs 24 --max-model-len 8192")
    found = json.loads(capsys.readouterr().out)
    first = found["findings"][0]
    assert (code, found["exit_code"], first["id"]) == (1, 1, "eviction-storm")
    assert (found["engine"], found["version"], found["scrapes"]["answered"]) == ("vllm", "0.32.0", 7)
    value = first["evidence"][0]
    assert value["numerator"] == pytest.approx(54)
    assert value["denominator"] == pytest.approx(48)
    assert value["window_s"] == pytest.approx(found["window_s"], abs=0.001)
    assert {one["excluded"] for one in first["look_alikes"]} == {True}
    assert first["runbook"] == "eviction-storm"
    assert first["change"]["flag"] in ("--max-num-seqs", "--gpu-memory-utilization", "--watermark")
    assert first["change"]["flag"] in first["next"]


def test_the_verdict_comes_first(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    site.preempted = 9
    assert run(site.url, "--for", "0.3") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("WARNING: Eviction rate above 5%")
    assert lines[0].endswith("Runbook: eviction-storm.")
    assert "vllm 0.32.0" in lines[1]
    assert any(line.strip().startswith("ruled out: a compute-bound queue") for line in lines)


def test_a_healthy_server(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(site.url, "--for", "0.3") == 0
    assert capsys.readouterr().out.startswith("HEALTHY: 48 requests in service")


def test_flags_alone_can_be_the_finding(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(site.url, "--for", "0.3", "--flags", "vllm serve m --swap-space 4") == 1
    out = capsys.readouterr().out
    assert out.startswith("CONFIGURATION: --swap-space is gone")
    assert "flag-not-in-version" in out


def test_flags_of_a_file(site: Site, quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.version = "0.27.1"
    file = tmp_path / "serve.yaml"
    file.write_text("enable-prefix-caching: false\n")
    assert run(site.url, "--for", "0.3", "--json", "--flags", str(file)) == 1
    assert [one["code"] for one in json.loads(capsys.readouterr().out)["lint"]] == ["yaml-false-dropped"]


def test_several_tenants_are_said(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(site.url, "--for", "0.3", "--json", "--multi-tenant")
    assert "salt-needed" in [one["code"] for one in json.loads(capsys.readouterr().out)["lint"]]


def test_advisories_of_the_version(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    site.version = "0.31.0"
    assert run(site.url, "--for", "0.3") == 0  # an advisory is told, it is no finding of this window
    out = capsys.readouterr().out
    assert "CVE-2026-129356" in out
    assert "CVE-2026-3108" not in out


def test_a_server_that_dies_meanwhile(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    site.gone_after = 5
    assert run(site.url, "--for", "0.3", "--json") == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "target-missing"


@pytest.mark.parametrize(
    "args",
    [
        ("http://127.0.0.1:9",),
        ("nobody",),
        ("http://127.0.0.1:9", "--for", "0"),
        ("x", "--prometheus", "http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_carried_out_is_one_sentence(
    args: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args, "--data-dir", str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("kvoncall: ")


def test_flags_that_cannot_be_read(site: Site, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(site.url, "--for", "0.3", "--flags", "vllm serve 'm") == 2
    assert "--flags" in capsys.readouterr().err.splitlines()[-1]


def stored(tmp_path: Path, site: Site, preempted: int, age_s: float) -> None:
    """Ten minutes of a watched target, the newest scrape `age_s` ago."""
    with Store.open(tmp_path) as store:
        store.targets.upsert("prod", url=site.url, kind="external", engine="vllm")
        store.targets.set_facts("prod", {"version": "0.32.0"})
        end = time.time() - age_s
        own = {"engine": "0", "model_name": "m"}
        samples = []
        for turn in range(121):
            ts = end - 600 + 5 * turn
            for metric, value in (
                ("up", 1.0),
                ("requests_running", 24.0),
                ("requests_waiting", 8.0 if preempted else 0.0),
                ("kv_usage_ratio", 0.98 if preempted else 0.5),
                ("preemptions_total", 5.0 + preempted * turn),
                ("requests_finished_total", 100.0 + 4 * turn),
                ("prompt_tokens_total", 1000.0 * turn),
                ("generation_tokens_total", 1000.0 * turn),
                ("ttft_seconds_count", 4.0 * turn),
            ):
                samples.append(Sample("prod", metric, {} if metric == "up" else own, ts, value))
        store.samples.write(samples)
        store.samples.flush()


def test_a_watched_target_is_read_from_the_store(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, site, preempted=2, age_s=1.0)
    assert run("prod", "--json", "--data-dir", str(tmp_path)) == 1
    found = json.loads(capsys.readouterr().out)
    assert site.scrapes == 0
    assert found["source"] == "what is stored of prod"
    assert found["window_s"] == pytest.approx(295, abs=6)
    first = found["findings"][0]
    assert (first["id"], first["confidence"]) == ("eviction-storm", "high")
    assert "shortened" not in first["why"]


def test_a_stored_target_that_nobody_watches_is_scraped(
    site: Site, quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, site, preempted=2, age_s=3600.0)
    assert run("prod", "--for", "0.3", "--json", "--data-dir", str(tmp_path)) == 0
    assert "scrapes of http" in json.loads(capsys.readouterr().out)["source"]
    assert site.scrapes >= 7


def fake_prometheus(instance: str) -> Callable[[str], Any]:
    """What a Prometheus server answers that scraped `instance` every 15 s while it preempted."""
    now = time.time()
    times = [now - 15 * turn for turn in range(12, -1, -1)]
    own = {"job": "llm", "instance": instance}
    of_engine = {**own, "engine": "0", "model_name": "m"}
    rows: list[tuple[str, dict[str, str], Callable[[int], float]]] = [
        ("up", own, lambda turn: 1.0),
        ("vllm:num_requests_running", of_engine, lambda turn: 24.0),
        ("vllm:num_requests_waiting", of_engine, lambda turn: 8.0),
        ("vllm:kv_cache_usage_perc", of_engine, lambda turn: 0.98),
        ("vllm:num_preemptions_total", of_engine, lambda turn: 5.0 + 6 * turn),
        ("vllm:request_success_total", {**of_engine, "finished_reason": "stop"}, lambda turn: 100.0 + 5 * turn),
        (
            "vllm:cache_config_info",
            {**own, "engine": "0", "block_size": "16", "num_gpu_blocks": "401"},
            lambda turn: 1.0,
        ),
    ]

    def answer(query: str) -> Any:
        chosen = [row for row in rows if row[0] == "up"] if query.startswith("up{") else rows
        if "count by" in query:
            chosen = [row for row in rows if row[0] != "up"]
        matrix = query.endswith(("s]", "m]"))
        result = []
        for name, labels, value in chosen:
            metric = {"__name__": name, **labels}
            points = [[ts, str(value(turn))] for turn, ts in enumerate(times)]
            result.append({"metric": metric, "values": points} if matrix else {"metric": metric, "value": points[-1]})
        return {"status": "success", "data": {"resultType": "matrix" if matrix else "vector", "result": result}}

    return answer


def test_a_window_read_from_prometheus(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.prometheus = fake_prometheus("gpu-7:8000")
    assert run("gpu-7:8000", "--prometheus", site.url, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["id"] == "eviction-storm"
    assert found["window_s"] == pytest.approx(180, abs=1)
    assert found["source"].endswith(f"scrapes of Prometheus at {site.url}")


def test_an_instance_that_prometheus_does_not_scrape(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.prometheus = fake_prometheus("gpu-7:8000")
    assert run("gpu-8:8000", "--prometheus", site.url) == 2
    assert "gpu-7" in capsys.readouterr().err


def fire(store: Store, rule: str, target: str, summary: str) -> None:
    """What a watch writes when an alert fires."""
    reading = Reading(rule, target, "breach", "firing", 1.0, 0.5, 1.0, None, 300.0, summary, "fake", time.time())
    store.alerts.save(
        [AlertUpdate(reading, "critical", 0.0, rule, 0.0, (("inactive", "pending"), ("pending", "firing")))]
    )


def test_alerts_in_force_on_a_stored_target_are_findings(
    site: Site, quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, site, preempted=0, age_s=1.0)
    with Store.open(tmp_path) as store:
        fire(store, "prefix-hit-collapse", "prod", "hits fell to 10% of the day before")
        fire(store, "oom", "elsewhere", "another target's")
    assert main(["doctor", "prod", "--data-dir", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    (one,) = [finding for finding in found if finding["id"] == "prefix-hit-collapse"]
    assert (one["confidence"], one["runbook"], one["explained_by"]) == ("high", "prefix-hit-collapse", None)
    assert one["summary"] == "hits fell to 10% of the day before"
    assert "oom" not in {finding["id"] for finding in found}


def test_a_stored_target_that_does_not_answer_is_the_finding(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path) as store:
        store.targets.upsert("gone", url="http://127.0.0.1:9", kind="external", engine="vllm")
    assert main(["doctor", "gone", "--data-dir", str(tmp_path)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "CRITICAL: Target down or not scraped, high confidence. Runbook: target-missing."
    with Store.open(tmp_path) as store:
        fire(store, "oom", "gone", "the engine ended for want of memory")
    assert main(["doctor", "gone", "--data-dir", str(tmp_path), "--json"]) == 1
    found = {one["id"]: one["explained_by"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found == {"oom": None, "target-missing": "oom"}
