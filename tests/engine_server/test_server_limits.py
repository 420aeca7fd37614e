"""A server with a short queue, a small pool and an API key: refusals, disconnects, metrics, debugging views."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.xdist_group("engine_server_limits")

KEY = "sesame"
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG: dict[str, Any] = {"prompt": "a long answer", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server: Any) -> Any:
    return start_server(
        "--api-key", KEY, "--max-num-seqs", "2", "--max-num-queued-reqs", "2", "--num-gpu-blocks-override", "20",
        "--scheduling-policy", "priority", "--served-model-name", "small",
    ).wait_ready()  # fmt: skip


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return server.base_url


@pytest.fixture
def idle(url: str, wait_until: Callable[..., None]) -> None:
    """Waits until nothing of an earlier test is left."""
    wait_until(lambda: not httpx.get(url + "/debug/requests").json()["requests"])


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=body, headers=HEADERS, timeout=60)


def raw_request(url: str, **body: Any) -> socket.socket:
    """Sends a request on a socket of its own, to be hung up at will."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body)
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()
    )
    return sock


def requests_of(url: str) -> list[dict[str, Any]]:
    return httpx.get(url + "/debug/requests").json()["requests"]


def test_api_key(url: str) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()
    assert caught.value.code == "invalid_api_key"
    assert openai.OpenAI(base_url=url + "/v1", api_key=KEY).models.list().data[0].id == "small"
    for path in ("/v1/completions", "/tokenize", "/reset_prefix_cache"):
        assert httpx.post(url + path, json={}).status_code == 401
    for path in ("/health", "/metrics", "/version", "/debug/engine"):
        assert httpx.get(url + path).status_code == 200
    assert KEY not in httpx.get(url + "/debug/engine").text


def test_full_queue_is_503_with_retry_after(
    url: str, idle: None, metric_values: Callable[[str], dict[str, float]], wait_until: Callable[..., None]
) -> None:
    before = metric_values(url).get("vllm:admission_rejections_total{reason=max_num_queued_reqs}", 0)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: complete(url, **LONG), range(12)))
    by_status = {status: [a for a in answers if a.status_code == status] for status in (200, 503)}
    assert len(by_status[200]) + len(by_status[503]) == 12
    assert len(by_status[200]) >= 4
    assert by_status[503], "twelve requests do not fit two seats and a queue of two"
    for answer in by_status[503]:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    after = metric_values(url)["vllm:admission_rejections_total{reason=max_num_queued_reqs}"]
    assert after - before == len(by_status[503])


def test_streams_meet_the_full_queue_before_they_begin(url: str, idle: None) -> None:
    """Five prompts in one request exceed the queue together, whatever their timing; none of them stays behind."""
    answer = complete(url, **LONG | {"prompt": ["one", "two", "three", "four", "five"]}, stream=True)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert requests_of(url) == []


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(
    url: str, idle: None, stream: bool, wait_until: Callable[..., None], metric_values: Callable[..., Any]
) -> None:
    aborted = "vllm:request_success_total{finished_reason=abort}"
    before = metric_values(url)[aborted]
    # Two run and a third waits; it must leave the queue as well.
    sockets = [raw_request(url, **LONG, stream=stream) for _ in range(3)]
    wait_until(lambda: len(requests_of(url)) >= 2)
    for sock in sockets:
        sock.close()
    wait_until(lambda: not requests_of(url))
    values = metric_values(url)
    assert values[aborted] - before >= 1
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0, "aborted requests give their blocks back"


def test_disconnect_in_the_middle_of_a_stream(url: str, idle: None, wait_until: Callable[..., None]) -> None:
    with httpx.stream(
        "POST", url + "/v1/completions", json=LONG | {"stream": True}, headers=HEADERS, timeout=60
    ) as response:
        next(response.iter_lines())
    wait_until(lambda: not requests_of(url))


def test_priority_is_accepted_where_it_is_scheduled(url: str, idle: None) -> None:
    assert complete(url, prompt="x", max_tokens=1, priority=-3).status_code == 200


def test_metrics_count_what_was_sent(url: str, idle: None, metric_values: Callable[[str], dict[str, float]]) -> None:
    httpx.post(url + "/reset_prefix_cache", headers=HEADERS)
    before = metric_values(url)
    prompt = "counted prompt of 33 characters.."
    for _ in range(3):
        assert complete(url, prompt=prompt, max_tokens=5, temperature=0, ignore_eos=True).status_code == 200
    assert complete(url, prompt="stop", max_tokens=9, temperature=0, stop_token_ids=list(range(257))).status_code == 200
    after = metric_values(url)

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("vllm:prompt_tokens_total") == 3 * 33 + 4
    assert grew("vllm:prefix_cache_queries_total") == 3 * 33 + 4
    assert grew("vllm:prefix_cache_hits_total") == grew("vllm:prompt_tokens_cached_total") == 2 * 32
    assert grew("vllm:generation_tokens_total") == 3 * 5 + 1
    assert grew("vllm:request_success_total{finished_reason=length}") == 3
    assert grew("vllm:request_success_total{finished_reason=stop}") == 1
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                      "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
                      "request_num_preemptions", "request_params_max_tokens", "request_params_n"):  # fmt: skip
        assert grew(f"vllm:{histogram}_count") == 4
        assert grew(f"vllm:{histogram}_bucket{{le=+Inf}}") == 4
    assert grew("vllm:inter_token_latency_seconds_count") == 3 * 4
    assert grew("vllm:request_prompt_tokens_sum") == 3 * 33 + 4
    assert grew("vllm:request_generation_tokens_sum") == 16
    assert grew("vllm:request_generation_tokens_bucket{le=5.0}") == 4
    assert grew("vllm:request_generation_tokens_bucket{le=2.0}") == 1
    assert grew("vllm:request_prefill_kv_computed_tokens_sum") == 33 + 1 + 1 + 4
    assert grew("vllm:iteration_tokens_total_sum") == 33 + 1 + 1 + 4 + 3 * 4
    assert grew("vllm:iteration_tokens_total_count") == grew("kvoncall:step_seconds_count") == 3 * 5 + 1


def test_preemptions_show_in_metrics(url: str, idle: None, metric_values: Callable[[str], dict[str, float]]) -> None:
    """Two requests of 245 tokens need 32 blocks; the pool has 19."""
    before = metric_values(url)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: complete(url, **LONG | {"prompt": f"number {i}"}), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    after = metric_values(url)
    preemptions = after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"]
    assert preemptions >= 1
    sums = "vllm:request_num_preemptions_sum"
    assert after[sums] - before[sums] == preemptions
    requests = "kvoncall:requests_preempted_total"
    assert 1 <= after[requests] - before[requests] <= preemptions


def test_metrics_names_labels_and_configuration(url: str) -> None:
    response = httpx.get(url + "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = response.text
    assert 'vllm:num_requests_running{engine="0",model_name="small"} 0.0' in text.replace(
        'model_name="small",engine="0"', 'engine="0",model_name="small"'
    )
    assert "_created" not in text
    info = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in ('block_size="16"', 'num_gpu_blocks="20"', 'kv_cache_size_tokens="304"', 'cache_dtype="auto"',
                  'enable_prefix_caching="True"', 'gpu_memory_utilization="0.92"', 'engine="0"'):  # fmt: skip
        assert label in info
    assert "process_start_time_seconds " in text
    assert 'kvoncall:kv_blocks{engine="0"' in text or 'kvoncall:kv_blocks{model_name="small"' in text


def test_debug_views_agree_while_the_engine_works(url: str, idle: None, wait_until: Callable[..., None]) -> None:
    sockets = [raw_request(url, **LONG, stream=True) for _ in range(2)]
    wait_until(lambda: any(r["status"] == "running" and r["num_output_tokens"] > 20 for r in requests_of(url)))
    for request in requests_of(url):
        if request["status"] == "running":
            assert request["num_blocks"] * 16 >= request["num_computed_tokens"]
            assert request["num_prompt_tokens"] == len(LONG["prompt"])
            assert request["age_seconds"] > 0
    blocks = httpx.get(url + "/debug/blocks").json()
    assert blocks["num_blocks"] == 20
    assert blocks["block_size"] == 16
    assert set(blocks["states"]) <= set(range(len(blocks["state_names"])))
    assert 2 in blocks["states"] or 3 in blocks["states"]
    scheduler = httpx.get(url + "/debug/scheduler").json()
    assert scheduler["stats"]["running"] >= 1
    assert scheduler["last_steps"][-1]["num_scheduled_tokens"] >= 1
    for sock in sockets:
        sock.close()
    wait_until(lambda: not requests_of(url))


def test_debug_engine(url: str, server: Any) -> None:
    facts = httpx.get(url + "/debug/engine").json()
    assert facts["engine"] == "kvoncall"
    assert facts["pid"] == server.process.pid
    assert facts["flags"]["--max-num-seqs"] == 2
    assert facts["flags"]["--api-key"] == "set"
    assert facts["dims"]["num_kv_heads"] == 2
    plan = facts["memory_plan"]
    assert plan["num_gpu_blocks"] == 20
    assert plan["source"] == "num_gpu_blocks_override"
    assert 0 < facts["device_memory_used_bytes"] < plan["device_memory_bytes"]
    assert facts["uptime_seconds"] > 0
    assert facts["started_at"] < time.time()
    health = httpx.get(url + "/health")
    assert health.headers["x-engine-pid"] == str(server.process.pid)
    assert httpx.get(url + "/version").json()["version"] == facts["version"]
