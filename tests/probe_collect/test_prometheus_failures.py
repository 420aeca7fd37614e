"""A Prometheus that refuses, hangs, warns, lies or answers in part; how it is reached."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from probe.collect import prometheus
from probe.collect.access import Access, AccessError, access_from
from probe.collect.discovery import discover
from probe.collect.prometheus import PrometheusError, PrometheusServer
from probe.collect.prometheus_target import PrometheusTarget

VECTOR = {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [1, "2"]}]}}


def query(server: Any, **options: Any) -> list[prometheus.Series]:
    return asked(server, **options).query("a").series


def asked(server: Any, **options: Any) -> PrometheusServer:
    return PrometheusServer(server.url, options.pop("access", None), **{"timeout_s": 20.0, **options})


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (400, b'{"status":"error","errorType":"bad_data","error":"no\\nway"}', "HTTP 400: no way."),
        (422, b'{"status":"error","error":"too many samples"}', "HTTP 422: too many samples."),
        (401, b"<html>", "refuses the credentials (HTTP 401)"),
        (503, b"<html>gateway</html>", "answered HTTP 503."),
        (500, b"[]", "answered HTTP 500."),
        (200, b"<html>login</html>", "does not answer as Prometheus does"),
        (200, b'{"status":"success"}', "does not answer as Prometheus does"),
        (200, b'{"status":"success","data":{"result":[1, "2"]}}', "something that is no vector"),
    ],
)
def test_refusals_are_one_sentence(server: Any, reply: Any, status: int, body: bytes, sentence: str) -> None:
    server.replies["/api/v1/query"] = reply(body, status=status)
    with pytest.raises(PrometheusError) as caught:
        query(server)
    assert sentence in str(caught.value)
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1  # nobody hammers a server that is in trouble


def test_a_server_that_hangs_or_is_not_there(server: Any, reply: Any) -> None:
    hold = threading.Event()
    server.replies["/api/v1/query"] = reply(b"{}", wait=hold)
    with pytest.raises(PrometheusError, match=r"did not answer within 0\.2 s"):
        query(server, timeout_s=0.2)
    hold.set()
    server.url = "http://127.0.0.1:1"
    with pytest.raises(PrometheusError, match=r"127\.0\.0\.1:1 cannot be reached \(.*refused\)") as caught:
        query(server)
    assert "0x" not in str(caught.value)


def test_an_answer_without_end_is_cut_off(server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_ANSWER_BYTES", 1000)
    server.replies["/api/v1/query"] = reply(b" " * 200_000)
    with pytest.raises(PrometheusError, match="more than 1,000 bytes"):
        query(server)


def test_warnings_are_told_with_the_answer(server: Any, reply: Any) -> None:
    body = json.dumps({**VECTOR, "warnings": ["one store did not answer"]}).encode()
    server.replies["/api/v1/query"] = reply(body)
    answer = asked(server).query("a")
    assert answer.series == [({"a": "b"}, [(1.0, 2.0)])]
    assert answer.warnings == ("one store did not answer",)
    server.replies["/api/v1/query"] = reply(json.dumps(VECTOR).encode())
    assert asked(server).query("a").warnings == ()


def test_a_range_whose_second_part_fails_says_from_where(
    server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MAX_POINTS", 10)
    asked_for: list[tuple[float, float]] = []

    def answer(form: str) -> Any:
        values = {k: v[0] for k, v in parse_qs(form).items()}
        start, end = float(values["start"]), float(values["end"])
        asked_for.append((start, end))
        if len(asked_for) == 2:
            return reply(b'{"status":"error","error":"out of memory"}', status=503)
        points = [[start + i, "1"] for i in range(10)]
        return reply(json.dumps({"status": "success", "data": {"result": [{"metric": {}, "values": points}]}}).encode())

    server.replies["/api/v1/query_range"] = answer
    found = asked(server).query_range("a", 1000.0, 1029.0, 1.0)
    assert asked_for == [(1000.0, 1009.0), (1010.0, 1019.0)]
    assert [ts for ts, _ in found.series[0][1]] == [1000.0 + i for i in range(10)]
    assert found.problem is not None
    assert found.problem.startswith("The values after 1970-01-01T00:16:50Z are missing: ")
    assert "out of memory" in found.problem
    asked_for[:] = [(0, 0)]
    with pytest.raises(PrometheusError, match="out of memory"):
        asked(server).query_range("a", 1000.0, 1029.0, 1.0)


def test_nothing_is_known_of_a_target_whose_prometheus_fails(
    server: Any, reply: Any, target: Callable[..., Any]
) -> None:
    server.replies["/api/v1/query"] = reply(status=502)
    one = target(url=server.url, source="prometheus", options={"matchers": {"job": "a"}})
    (seen,) = PrometheusTarget(asked(server)).read(one, 5.0)
    assert (seen.ts, seen.scrape, seen.known, seen.samples) == (5.0, None, False, [])
    assert "HTTP 502" in (seen.error or "")
    (seen,) = PrometheusTarget(asked(server)).read(target(source="prometheus"), 5.0)
    assert "does not say by which labels" in (seen.error or "")


def test_one_server_that_hangs_holds_up_no_other(servers: Callable[[], Any], reply: Any) -> None:
    hold = threading.Event()
    slow, quick = servers(), servers()
    slow.replies["/api/v1/query"] = reply(b"{}", wait=hold)
    quick.replies["/api/v1/query"] = reply(json.dumps(VECTOR).encode())

    async def go() -> None:
        hanging, answering = asked(slow), asked(quick)
        waiting = [asyncio.ensure_future(hanging.run(lambda: hanging.query("a"))) for _ in range(20)]
        await answering.run(lambda: answering.query("a"))
        assert not any(task.done() for task in waiting)
        hold.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        hanging.close()
        answering.close()

    asyncio.run(go())


def test_secrets_come_from_the_environment(server: Any, reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies["/api/v1/query"] = reply(json.dumps(VECTOR).encode())
    monkeypatch.setenv("TEST_TENANT", "blue")
    monkeypatch.setenv("TEST_TOKEN", "s3cret")
    monkeypatch.setenv("TEST_LOGIN", "user:p:w")
    access = access_from({"headers_env": {"X-Scope-OrgID": "TEST_TENANT"}, "bearer_env": "TEST_TOKEN"})
    assert "s3cret" not in repr(access)
    query(server, access=access)
    headers = server.requests[-1][1]
    assert (headers["X-Scope-OrgID"], headers["Authorization"]) == ("blue", "Bearer s3cret")
    query(server, access=access_from({"basic_env": "TEST_LOGIN"}))
    assert server.requests[-1][1]["Authorization"] == "Basic dXNlcjpwOnc="


@pytest.mark.parametrize(
    ("options", "url", "sentence"),
    [
        ({"bearer_env": "TEST_UNSET"}, "", "The environment variable TEST_UNSET is empty: it must hold the bearer"),
        ({"headers_env": {"X-Key": "TEST_UNSET"}}, "", "must hold the header X-Key"),
        ({"basic_env": "TEST_PLAIN"}, "", "TEST_PLAIN must hold USER:PASSWORD"),
        ({"headers_env": {"X-Key": "TEST_LINES"}}, "", "TEST_LINES must hold one line"),
        ({"headers_env": ["X-Key"]}, "", "headers_env must map names"),
        ({"ca_file": "/no/such/ca.pem"}, "", "The CA file /no/such/ca.pem is not there"),
        ({}, "http://user:hush@h:1/metrics", "The address of h holds a password"),
    ],
)
def test_access_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], url: str, sentence: str
) -> None:
    monkeypatch.delenv("TEST_UNSET", raising=False)
    monkeypatch.setenv("TEST_PLAIN", "hush")
    monkeypatch.setenv("TEST_LINES", "hush\r\nX-Other: 1")
    with pytest.raises(AccessError) as caught:
        access_from(options, url)
    assert sentence in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_certificate_counts_only_with_its_ca(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    body = json.dumps(VECTOR).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(PrometheusError, match="certificate that is not trusted"):
            PrometheusServer(url).query("a")
        for access in (access_from({"ca_file": str(certificate)}), Access(verify=False)):
            assert PrometheusServer(url, access).query("a").series
            assert httpx.get(url, verify=access.ssl_context(), trust_env=False).status_code == 501  # GET: it speaks
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, verify=Access().ssl_context(), trust_env=False)
        with pytest.raises(AccessError, match="holds no CA certificate"):
            access_from({"ca_file": str(key)}).ssl_context()
    finally:
        server.shutdown()
        server.server_close()


def test_the_deadline_is_on_the_whole_answer() -> None:
    """Every byte comes in time, the whole does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"1\r\n \r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        url, begun = f"http://127.0.0.1:{listener.getsockname()[1]}", time.monotonic()
        with pytest.raises(PrometheusError, match="did not answer in full within"):
            PrometheusServer(url, timeout_s=0.4).query("a")
        assert time.monotonic() - begun < 60
        stop.set()
        thread.join(20)


def test_two_jobs_that_scrape_one_address_are_two_candidates(server: Any, reply: Any) -> None:
    def answer(form: str) -> Any:
        names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
        found = [{"__name__": n, "job": j, "instance": "h:1", "model_name": "m"} for n in names for j in ("a", "b/c")]
        values: dict[str, Any] = {"value": [60, "1"]}
        if parse_qs(form)["query"][0].startswith("up{"):
            found = [{"__name__": "up", "job": "a", "instance": "h:1"}]
            values = {"values": [[30, "1"], [45, "1"], [60, "1"]]}
        rows = [{"metric": labels, **values} for labels in found]
        return reply(json.dumps({"status": "success", "data": {"result": rows}}).encode())

    server.replies["/api/v1/query"] = answer
    found = discover(asked(server)).candidates
    assert [(c.name, c.matchers["job"], c.scrape_interval_s) for c in found] == [
        ("a-h-1", "a", 15.0),
        ("b-c-h-1", "b/c", None),
    ]
