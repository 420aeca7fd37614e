"""The load generator against a scripted server: what it measures, what it calls a failure, when it stops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from probe.load.generator import LoadOptions, run_load
from probe.load.report import LoadReport, RequestRecord, percentiles
from probe.load.traces import LoadRequest, synthetic


def requests(count: int, tokens: int = 6) -> list[LoadRequest]:
    return synthetic(count, prompt_tokens=10, max_tokens=tokens, vocab_size=64, name="r")


def run(url: str, plan: list[LoadRequest], **more: Any) -> LoadReport:
    hooks = {k: more.pop(k) for k in ("on_record", "cancelled") if k in more}
    options = LoadOptions(**{"concurrency": 4, "model": "fake", "max_duration_s": 60.0, **more})
    return asyncio.run(run_load(url, plan, options, **hooks))


def test_a_good_run_measures_every_request(server: Any) -> None:
    server.token_delay_s = 0.01
    seen: list[RequestRecord] = []
    report = run(server.url, requests(10), on_record=seen.append)
    assert (report.completed, report.failed, report.not_sent) == (10, 0, 0)
    assert len(seen) == 10
    for record in report.records:
        assert record.status == 200
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (10, 6, 3)
        assert record.finish_reason == "length"
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert record.itl_mean_s is not None
        assert 0.01 <= record.ttft_s < record.e2e_s
        assert record.e2e_s >= 0.06  # six tokens, 10 ms apart
        assert record.ttft_s + 5 * record.itl_mean_s <= record.e2e_s + 0.005
    data = report.to_dict()
    assert data["output_tokens"] == 60
    assert data["cached_tokens"] == 30
    assert data["ttft_s"]["p50"] <= data["ttft_s"]["p99"]
    assert not data["server_died"]


def test_what_is_sent_is_what_the_plan_says(server: Any) -> None:
    plan = requests(1)
    run(server.url, plan, temperature=0.5)
    body = server.bodies[0]
    assert body["prompt"] == list(plan[0].prompt)
    assert body["model"] == "fake"
    assert body["max_tokens"] == 6
    assert body["temperature"] == 0.5
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_a_closed_loop_keeps_its_concurrency(server: Any) -> None:
    server.token_delay_s = 0.02
    report = run(server.url, requests(12), concurrency=3)
    assert report.completed == 12
    assert server.most_in_flight == 3


def test_an_open_loop_sends_at_the_arrival_times(server: Any) -> None:
    server.token_delay_s = 0.05
    plan = [LoadRequest(f"r{n}", n * 0.4, (5, 6, 7), 3, 4) for n in range(4)]
    report = run(server.url, plan, timed=True, concurrency=None, speedup=2.0)
    starts = sorted(r.started_s for r in report.records)
    assert report.completed == 4
    for n, start in enumerate(starts):
        assert start >= n * 0.2 - 0.005
    assert report.duration_s >= 0.6


def test_a_full_queue_is_a_failure_with_the_servers_sentence(server: Any) -> None:
    server.fault = lambda n: "503" if n % 2 else ""
    report = run(server.url, requests(6), concurrency=1)
    assert report.errors == {"http_503": 3}
    assert report.to_dict()["first_error"] == "the queue is full"
    assert not report.server_died


def test_status_200_with_an_error_event_is_a_failure(server: Any) -> None:
    server.fault = lambda n: "error_event" if n == 2 else ""
    report = run(server.url, requests(4), concurrency=1)
    assert (report.completed, report.failed) == (3, 1)
    bad = next(r for r in report.records if r.error)
    assert (bad.status, bad.error, bad.error_message) == (200, "stream_error", "out of blocks")


def test_a_stream_that_just_ends_is_a_failure(server: Any) -> None:
    server.fault = lambda n: "cut" if n == 0 else ""
    report = run(server.url, requests(3), concurrency=1)
    assert report.completed == 2
    assert list(report.errors) in (["incomplete"], ["disconnected"])


def test_the_run_ends_when_the_server_dies(server: Any) -> None:
    server.fault = lambda n: "die" if n == 8 else ""
    server.token_delay_s = 0.01
    report = run(server.url, requests(500), concurrency=4)
    assert report.server_died
    assert report.stopped_early == "the server does not answer any more"
    assert report.completed >= 5
    assert report.failed >= 1
    assert report.not_sent > 0
    assert report.completed + report.failed + report.not_sent == 500


def test_nobody_listens_at_all() -> None:
    report = run("http://127.0.0.1:9", requests(50))
    assert report.completed == 0
    assert report.server_died
    assert set(report.errors) <= {"connect", "cancelled"}


def test_time_is_bounded_and_open_requests_count_as_failed(server: Any) -> None:
    server.token_delay_s = 5.0
    report = run(server.url, requests(9), concurrency=2, max_duration_s=0.5)
    assert report.stopped_early is not None
    assert "time limit" in report.stopped_early
    assert report.errors == {"cancelled": 2}
    assert report.not_sent == 7
    assert report.duration_s < 30


def test_the_caller_can_stop_it(server: Any) -> None:
    server.token_delay_s = 0.05
    begin = time.monotonic()
    report = run(server.url, requests(1000), cancelled=lambda: time.monotonic() - begin > 0.4)
    assert report.stopped_early == "stopped by the caller"
    assert report.not_sent > 900


def test_a_request_may_time_out(server: Any) -> None:
    server.token_delay_s = 3.0
    report = run(server.url, requests(1), request_timeout_s=0.3)
    assert report.errors == {"timeout": 1}


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        LoadOptions()
    with pytest.raises(ValueError, match="speedup"):
        LoadOptions(timed=True, speedup=0)


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
