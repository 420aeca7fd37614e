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
def site() -> Iterator[dict[str, str]]:
    """Pages by path, and under "url" where they are; anything else is 404."""
    pages: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
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
def test_the_engine_is_told_by_its_metrics(site: dict[str, str], store: Store, body: str, engine: str) -> None:
    site["/metrics"] = body
    target = attach_target(store, f"prod={site['url']}/")
    assert (target.name, target.url, target.engine, target.kind) == ("prod", site["url"], engine, "external")
    assert [t.name for t in store.targets.list()] == ["prod"]


def test_without_a_name_the_address_is_the_name(site: dict[str, str], store: Store) -> None:
    site["/metrics"] = VLLM
    assert attach_target(store, site["url"]).name == site["url"].removeprefix("http://")


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
    site: dict[str, str], store: Store, body: str, says: str
) -> None:
    site["/metrics"] = body
    with pytest.raises(TargetError, match=says):
        attach_target(store, site["url"])
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


SGLANG = '# TYPE sglang_num_running_reqs gauge\nsglang_num_running_reqs{model_name="m",tp_rank="0"} 1.0\n'
TGI = "# TYPE tgi_queue_size gauge\ntgi_queue_size 1.0\n"
TRITON = '# TYPE nv_trt_llm_request_metrics gauge\nnv_trt_llm_request_metrics{model="m",request_type="active"} 1\n'
TRTLLM = '# TYPE trtllm_kv_cache_utilization gauge\ntrtllm_kv_cache_utilization{model_name="m"} 0.5\n'


@pytest.mark.parametrize(
    ("engine", "pages", "version", "path"),
    [
        ("vllm", {"/metrics": VLLM, "/version": '{"version": "0.33.0"}'}, "0.33.0", ""),
        ("kvoncall", {"/metrics": OURS, "/version": '{"version": "0.1.0"}'}, "0.1.0", ""),
        ("sglang", {"/metrics": SGLANG, "/get_server_info": '{"version": "0.5.23"}'}, "0.5.23", ""),
        ("tgi", {"/metrics": TGI, "/info": '{"version": "3.3.7"}'}, "3.3.7", ""),
        ("triton", {"/metrics": TRITON}, None, ""),
        (
            "tensorrt-llm",
            {"/metrics": "[]", "/prometheus/metrics": TRTLLM, "/version": '{"version": "1.3.0rc5"}'},
            "1.3.0rc5",
            "/prometheus/metrics",
        ),
    ],
)
def test_every_engine_is_attached_with_its_version_and_coverage(
    site: dict[str, str], store: Store, engine: str, pages: dict[str, str], version: str | None, path: str
) -> None:
    site.update(pages)
    target = attach_target(store, f"prod={site['url']}")
    assert (target.engine, target.url) == (engine, site["url"] + path)
    assert target.facts.get("version") == version
    report = target.facts["coverage"]
    assert (report["engine"], report["version"]) == (engine, version)
    assert (report["assumed"] is not None) == (version is None)
    read = [row["canonical"] for row in report["rows"] if row["status"] in ("present", "renamed")]
    assert read
    assert target.facts.get("spelling") == ("sglang_" if engine == "sglang" else None)


def test_attaching_again_keeps_what_was_learned_before(site: dict[str, str], store: Store) -> None:
    site["/metrics"] = VLLM
    store.targets.upsert("prod", url=site["url"], kind="external", facts={"model": "m"})
    target = attach_target(store, f"prod={site['url']}")
    assert target.facts["model"] == "m"
    assert "coverage" in target.facts


@pytest.mark.parametrize("answer", ["{", "[]", '{"version": 3}', '{"versions": "1"}'])
def test_a_server_that_tells_no_version_is_attached_without(site: dict[str, str], store: Store, answer: str) -> None:
    site.update({"/metrics": VLLM, "/version": answer})
    assert "version" not in attach_target(store, site["url"]).facts


def test_what_cannot_be_reached_as_configured_is_one_sentence(
    site: dict[str, str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    site["/metrics"] = VLLM
    monkeypatch.delenv("KV_TOKEN", raising=False)
    with pytest.raises(TargetError, match="KV_TOKEN is empty"):
        attach_target(store, site["url"], {"bearer_env": "KV_TOKEN"})
    assert store.targets.list() == []
    monkeypatch.setenv("KV_TOKEN", "secret")
    target = attach_target(store, site["url"], {"bearer_env": "KV_TOKEN"})
    assert target.options == {"bearer_env": "KV_TOKEN"}
    assert "secret" not in repr(target)
    assert attach_target(store, site["url"]).options == {"bearer_env": "KV_TOKEN"}  # attached again at the next start


def test_a_server_without_metrics_is_said_to_have_none(site: dict[str, str], store: Store) -> None:
    with pytest.raises(TargetError, match=r"/metrics answered HTTP 404"):
        attach_target(store, site["url"])
