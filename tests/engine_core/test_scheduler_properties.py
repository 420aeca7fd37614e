"""What holds for every workload on every configuration; the fake model checks content at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BLOCK_SIZES = st.integers(1, 5)
MAX_MODEL_LEN = 24

relaxed = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(BLOCK_SIZES)
    smallest_pool = 1 + -(-(MAX_MODEL_LEN - 1) // block_size)  # holds one request of any length
    chunked = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 6))
    return {
        "num_gpu_blocks": smallest_pool + draw(st.integers(0, 12)),
        "max_model_len": MAX_MODEL_LEN,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 40)) if chunked else MAX_MODEL_LEN + 4,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 4])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_fork_sharing": draw(st.sampled_from([True, True, False])),
        "prefix_cache_verify": draw(st.booleans()),
        "prefix_cache_ttl": draw(st.sampled_from([None, None, 3.0])),
    }


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests with the step in which they arrive and, for some, the step in which they are aborted.

    Some fork from one that came before, whose salt they have: `fork_of` says how many before.
    """
    stems = [[1] * 20, [1, 2, 3, 4] * 5, [7] * 4 + [8] * 16]
    return [
        {
            "request_id": f"r{index}",
            "prompt": draw(st.sampled_from(stems))[: draw(st.integers(1, 20))] + [9] * draw(st.integers(0, 2)),
            "max_tokens": draw(st.integers(1, 16)),
            "salt": draw(st.sampled_from([None, None, "a", "b"])),
            "priority": draw(st.integers(0, 2)),
            "arrives": draw(st.integers(0, 12)),
            "fork_of": draw(st.sampled_from([None, None, 1, 2])),
            "aborted": draw(st.sampled_from([None, None, None, 1, 3, 8])),
        }
        for index in range(draw(st.integers(1, 9)))
    ]


def play(make_engine: Callable[..., Any], config: dict[str, Any], workload: list[dict[str, Any]]) -> Any:
    """Runs a workload to its end; aborts come between `schedule` and the update. Bounds the number of steps."""
    engine = make_engine(**config)
    engine.all_requests = {}
    pending = sorted(workload, key=lambda request: request["arrives"])
    # Each step computes a token of the request that comes first, which no preemption can undo; arrivals of
    # higher priority can, each one once.
    limit = (len(workload) + 1) * sum(len(r["prompt"]) + r["max_tokens"] for r in workload) + 20
    for step in range(limit):
        engine.now = float(step)
        while pending and pending[0]["arrives"] <= step:
            spec = pending.pop(0)
            came_before = list(engine.all_requests.values())[-(spec["fork_of"] or 99) :]
            leader = came_before[0] if spec["fork_of"] and came_before else None
            engine.all_requests[spec["request_id"]] = engine.add(
                spec["request_id"], spec["prompt"], spec["max_tokens"], salt=spec["salt"], fork_of=leader,
                priority=spec["priority"], arrival_time=float(spec["arrives"]),
            )  # fmt: skip
        if not pending and not engine.scheduler.has_unfinished_requests():
            return engine
        waiting = engine.scheduler.has_unfinished_requests()
        output = engine.schedule()
        assert bool(output.scheduled) == waiting, "unfinished requests, but nothing is scheduled"
        for spec in workload:
            if spec["aborted"] is not None and spec["arrives"] + spec["aborted"] == step:
                engine.scheduler.abort(spec["request_id"])
        engine.update(output, engine.execute(output))
    raise AssertionError(f"unfinished after {limit} steps: {engine.scheduler.requests}")


@relaxed
@given(config=configurations(), workload=workloads())
def test_every_request_finishes_with_the_tokens_of_an_undisturbed_run(
    make_engine: Callable[..., Any], fake_output: Callable[..., Any], config: dict[str, Any], workload: list[Any]
) -> None:
    engine = play(make_engine, config, workload)
    for spec in workload:
        request = engine.all_requests[spec["request_id"]]
        count = min(spec["max_tokens"], MAX_MODEL_LEN - len(spec["prompt"]))
        tokens = fake_output(spec["prompt"], spec["salt"], count)
        assert request.status.is_finished
        if request.status.finish_reason == "abort":
            assert spec["aborted"] is not None
            assert request.output_token_ids == tokens[: request.num_output_tokens]
        else:
            assert request.output_token_ids == tokens
            computed = engine.computed[request.request_id]
            if request.num_preemptions == 0:
                assert computed == request.num_tokens - 1 - request.num_cached_tokens
            else:
                assert computed >= request.num_tokens - 1 - request.num_cached_tokens
    stats = engine.scheduler.stats()
    requests = engine.all_requests.values()
    assert stats.preemptions_total == sum(request.num_preemptions for request in requests)
    assert stats.preempted_requests_total == sum(request.num_preemptions > 0 for request in requests)
    admitted = [request for request in requests if request.num_cached_tokens >= 0]
    caching = config["enable_prefix_caching"]
    forked = [request for request in admitted if request.request_id in engine.forked]
    asked = [request for request in admitted if request.request_id not in engine.forked]
    assert stats.forks_total == len(forked)
    assert stats.prefix_queries_total == caching * sum(request.num_prompt_tokens for request in asked)
    assert stats.prefix_hits_total == sum(request.num_cached_tokens for request in asked)
    assert sum(stats.prefix_hits_by_scope.values()) == stats.prefix_hits_total
    assert sum(stats.isolation_breaches.values()) == sum(stats.prefix_hits_refused.values()) == 0
    assert stats.kv_usage == stats.running == stats.waiting == 0


@relaxed
@given(config=configurations(), workload=workloads())
def test_a_workload_played_twice_gives_the_same_log(
    make_engine: Callable[..., Any], config: dict[str, Any], workload: list[Any]
) -> None:
    assert play(make_engine, config, workload).log == play(make_engine, config, workload).log


@relaxed
@given(
    config=configurations(),
    count=st.integers(2, 9),
    length=st.integers(1, 16),
    max_tokens=st.integers(1, 8),
)
def test_fcfs_serves_equal_requests_in_order(
    make_engine: Callable[..., Any], config: dict[str, Any], count: int, length: int, max_tokens: int
) -> None:
    engine = make_engine(**config | {"scheduling_policy": "fcfs"})
    for index in range(count):
        engine.add(f"r{index}", [index] * length, max_tokens)
    admitted: list[str] = []
    with_token: list[str] = []
    finished: list[str] = []
    while engine.scheduler.has_unfinished_requests():
        output = engine.schedule()
        admitted += [e.request.request_id for e in output.scheduled if e.request.request_id not in admitted]
        sampled = engine.execute(output)
        first = [e.request for e in output.scheduled if e.samples and e.request.num_output_tokens == 0]
        with_token += sorted(request.request_id for request in first)
        finished += sorted(request.request_id for request in engine.update(output, sampled))
    everyone = [f"r{index}" for index in range(count)]
    assert sorted(admitted) == with_token == finished == everyone
