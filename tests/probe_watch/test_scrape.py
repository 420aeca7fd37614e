"""One scrape: the real vLLM text in canonical names, and every way an endpoint can misbehave."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpx
import pytest

from probe.collect.facts import read_facts
from probe.collect.scrape import MAX_BYTES, Scrape, ScrapeError, fetch, metrics_url, scrape
from probe.dialects import DialectError, load_dialect
from probe.store import Sample, Target

NOW = 1_800_000_000.0


def read(url: str, *, timeout_s: float = 20.0) -> Scrape:
    async def go() -> Scrape:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await scrape(client, url, load_dialect("vllm"), "t", ts=NOW, timeout_s=timeout_s)

    return asyncio.run(go())


def sentence(url: str, *, timeout_s: float = 20.0) -> str:
    with pytest.raises(ScrapeError) as caught:
        read(url, timeout_s=timeout_s)
    text = str(caught.value)
    assert "\n" not in text
    assert url in text
    return text


def values(found: list[Sample], metric: str) -> dict[tuple[str, ...], float]:
    return {tuple(v for k, v in s.labels.items() if k != "model_name"): s.value for s in found if s.metric == metric}


def test_real_vllm_scrape_in_canonical_names(engine: Any, vllm_scrape: bytes) -> None:
    engine.body = vllm_scrape
    found = read(engine.url)
    samples = found.samples
    assert {s.ts for s in samples} == {NOW}
    assert found.missing == ()
    assert values(samples, "preemptions_total") == {("0",): 42.0}
    assert values(samples, "requests_finished_total")[("0", "length")] == 40.0
    assert values(samples, "prefix_queries_total") == {("0",): 5794.0}
    assert values(samples, "prefix_hits_total") == {("0",): 352.0}
    assert values(samples, "process_start_time_seconds") == {(): 1.79596135971e09}
    assert values(samples, "e2e_seconds_count") == {("0",): 40.0}
    buckets = [s for s in samples if s.metric == "ttft_seconds_bucket"]
    assert len(buckets) == 23
    assert {s.value for s in buckets if s.labels["le"] == "+Inf"} == {40.0}
    assert found.info["num_gpu_blocks"] == "48"
    names = {s.metric for s in samples}
    assert not {n for n in names if "created" in n or ":" in n}
    assert "queue_seconds_sum" in names
    assert "queue_seconds_bucket" not in names
    assert "python_info" not in names


def test_the_newer_of_two_names_wins(engine: Any) -> None:
    engine.body = (
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.1\nvllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2\n'
    )
    assert values(read(engine.url).samples, "kv_usage_ratio") == {("0",): 0.2}
    engine.body = b'vllm:gpu_cache_usage_perc{model_name="m"} 0.1\n'
    assert values(read(engine.url).samples, "kv_usage_ratio") == {(): 0.1}


def test_several_engines_keep_their_label(engine: Any) -> None:
    engine.body = b'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 5\n'
    found = read(engine.url)
    assert values(found.samples, "requests_running") == {("0",): 3.0, ("1",): 5.0}
    assert found.missing == ("requests_waiting", "kv_usage_ratio", "requests_finished_total")


@pytest.mark.parametrize(
    "body",
    [
        b"<html><body>It works!</body></html>",
        b'vllm:num_requests_running{engine="0} 1\n',
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting one\n",
        b"{}",
        b'{"requests": 3}',
    ],
)
def test_malformed_metrics(engine: Any, body: bytes) -> None:
    engine.body = body
    assert "is not in the Prometheus text format" in sentence(engine.url)


def test_empty_and_binary_answers(engine: Any) -> None:
    engine.body = b"# nothing here\n"
    assert "without a single metric" in sentence(engine.url)
    engine.body = b"\xff\xfe\x00"
    assert "is not text" in sentence(engine.url)


def test_http_error(engine: Any) -> None:
    engine.status = 503
    assert "answered HTTP 503" in sentence(engine.url)


def test_oversized_answer_is_not_read_to_its_end(engine: Any) -> None:
    engine.body = b"vllm:num_requests_running 1\n" * (MAX_BYTES // 28 + 2)
    assert f"more than {MAX_BYTES:,} bytes" in sentence(engine.url)


def test_hanging_endpoint(engine: Any) -> None:
    engine.pause = threading.Event()
    assert "did not answer in full within 0.2 s" in sentence(engine.url, timeout_s=0.2)
    engine.pause.set()


def test_endpoint_that_trickles_for_ever() -> None:
    """Every byte arrives in time, the whole does not: the limit is on the whole."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"#")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        assert "did not answer in full" in sentence(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
        stop.set()
        thread.join(20)


def test_answer_cut_short_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:num_requests_running 1\n")

        thread = threading.Thread(target=cut)
        thread.start()
        assert "could not be read" in sentence(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(20)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    assert "cannot be reached" in sentence(url)


@pytest.mark.parametrize("url", ["http://", "nonsense", "ftp://127.0.0.1/x"])
def test_addresses_that_cannot_work(url: str) -> None:
    sentence(url)


def test_metrics_url() -> None:
    assert metrics_url("http://h:1/") == "http://h:1/metrics"
    assert metrics_url("http://h:1/prometheus/metrics") == "http://h:1/prometheus/metrics"


def test_unknown_engine_has_no_dialect() -> None:
    with pytest.raises(DialectError, match="'abacus' are not known"):
        load_dialect("abacus")


def facts(engine: Any, kind: str, info: dict[str, str]) -> dict[str, object]:
    target = Target(1, "t", engine.url, "external", kind, [], {}, 1.0, 1.0, True, NOW)

    async def go() -> dict[str, object]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await read_facts(client, target, info, timeout_s=20.0)

    return asyncio.run(go())


def test_facts_of_the_embedded_engine(engine: Any) -> None:
    engine.pages["/debug/engine"] = {"engine": "kvoncall", "flags": {"--seed": 1}, "stats": {"running": 2}}
    assert facts(engine, "kvoncall", {}) == {"engine": "kvoncall", "flags": {"--seed": 1}}


def test_facts_of_vllm(engine: Any) -> None:
    engine.pages["/version"] = {"version": "0.33.0"}
    engine.pages["/v1/models"] = {"data": [{"id": "m", "max_model_len": 2048}]}
    assert facts(engine, "vllm", {"block_size": "16"}) == {
        "engine": "vllm",
        "cache_config_info": {"block_size": "16"},
        "version": "0.33.0",
        "model": "m",
        "max_model_len": 2048,
    }


def test_facts_that_cannot_be_read_are_left_out(engine: Any) -> None:
    engine.pages["/version"] = ["not", "an", "object"]
    assert facts(engine, "vllm", {}) == {"engine": "vllm"}
    assert facts(engine, "kvoncall", {}) == {}


def test_fetch_limit_counts_decoded_bytes() -> None:
    """A small compressed body that unpacks to a large one is stopped too."""
    import gzip

    body = gzip.compress(b"x" * 2_000_000)

    async def go() -> None:
        transport = httpx.MockTransport(
            lambda _: httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(body))
        )
        async with httpx.AsyncClient(transport=transport) as client:
            await fetch(client, "http://h/metrics", timeout_s=20, max_bytes=1_000_000)

    assert len(body) < 10_000
    with pytest.raises(ScrapeError, match="more than 1,000,000 bytes"):
        asyncio.run(go())
