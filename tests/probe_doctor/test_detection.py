"""Incidents that are known by construction: the top finding is theirs, and what only looks like one stays quiet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from probe.doctor.observed import Observed, of_pages
from probe.doctor.report import ABSTAINED, FOUND, HEALTHY, Diagnosis, diagnose

Diagnosed = Callable[..., Diagnosis]

BUSY: dict[str, Any] = {
    "running": 24,
    "waiting": 0,
    "usage": 0.55,
    "preemptions": 0,
    "finished": (100, 160),
    "prompt_tokens": (50_000, 80_000),
    "tokens": (20_000, 32_000),
    "queries": (50_000, 80_000),
    "hits": (5_000, 8_000),
    "ttft": (60, 60, 6.0),
    "itl": (12_000, 12_000, 240.0),
    "queue": (60, 60, 0.06),
    "prefill": (60, 60, 6.0),
    "prompt_len": (60, 60, 30_000.0),
    "answer_len": (60, 60, 12_000.0),
}
IDLE = {**BUSY, "running": 0, "usage": 0.0, "finished": 100, "prompt_tokens": 50_000, "tokens": 20_000,
        "queries": 50_000, "hits": 5_000, "ttft": (0, 0, 0.0), "itl": (0, 0, 0.0)}  # fmt: skip
STORM = {**BUSY, "usage": 0.98, "waiting": 12, "preemptions": (5, 65)}
LIVELOCK = {**STORM, "running": 2, "waiting": 3, "finished": 100, "tokens": (20_000, 20_400), "ttft": (0, 0, 0.0)}
COMPUTE_BOUND = {**BUSY, "waiting": 30, "usage": 0.4, "queue": (60, 10, 600.0), "ttft": (60, 10, 606.0)}
HEAD_OF_LINE = {**BUSY, "running": 3, "waiting": 9, "usage": 0.3, "finished": (100, 120), "ttft": (0, 0, 0.0)}
STALLED = {**IDLE, "running": 0, "waiting": 4}
HUNG = {**IDLE, "running": 8, "usage": 0.5}
HELD = {**IDLE, "waiting": 2, "usage": 0.6}
LEAK = {**IDLE, "usage": 0.2}
SATURATED = {**BUSY, "usage": 0.97, "waiting": 6}
THRASH = {**BUSY, "usage": 0.85, "evicted": (0, 900), "missed_soon": (0, 600)}
SLOW_PREFILL = {**BUSY, "ttft": (60, 20, 300.0), "prefill": (60, 20, 294.0)}


def top(diagnosis: Diagnosis) -> str | None:
    serious = diagnosis.examination.serious
    return serious[0].id if serious else None


@pytest.mark.parametrize(
    ("figures", "finding", "runbook"),
    [
        pytest.param(STORM, "eviction-storm", "eviction-storm", id="storm"),
        pytest.param(LIVELOCK, "preemption-livelock", "preemption-livelock", id="livelock"),
        pytest.param(SATURATED, "kv-saturated", "kv-saturated", id="saturated"),
        pytest.param(COMPUTE_BOUND, "queue-with-room", "ttft-slo-burn", id="compute-bound"),
        pytest.param(HEAD_OF_LINE, "head-of-line-block", "head-of-line-block", id="head-of-line"),
        pytest.param(STALLED, "engine-stall", "head-of-line-block", id="never-admitted"),
        pytest.param(HELD, "engine-stall", "offload-resume-deadlock", id="blocks-held-by-what-waits"),
        pytest.param(HUNG, "engine-stall", "engine-stall", id="hung"),
        pytest.param(LEAK, "kv-block-leak", "kv-block-leak", id="leak"),
        pytest.param(SLOW_PREFILL, "ttft-slo-burn", "ttft-slo-burn", id="slow-prefill"),
        pytest.param({**BUSY, "corrupted": (0, 3)}, "corrupted-requests", "kv-quality-drop", id="nan"),
        pytest.param(
            {**BUSY, "itl": (12_000, 9_000, 2400.0)}, "itl-slo-burn", "itl-slo-burn", id="stutter-without-preemption"
        ),
    ],
)
def test_an_incident_is_named(diagnosed: Diagnosed, figures: dict[str, Any], finding: str, runbook: str) -> None:
    diagnosis = diagnosed(figures)
    assert top(diagnosis) == finding, diagnosis.verdict
    assert diagnosis.examination.serious[0].runbook == runbook
    assert diagnosis.code == FOUND
    assert diagnosis.verdict.endswith(f"Runbook: {runbook}.")


@pytest.mark.parametrize(
    ("figures", "code"),
    [
        pytest.param(BUSY, HEALTHY, id="busy"),
        pytest.param({**BUSY, "usage": 0.97}, HEALTHY, id="full-and-nobody-waits"),
        pytest.param({**BUSY, "preemptions": 42}, HEALTHY, id="an-old-storm"),
        pytest.param({**BUSY, "hits": 5_000}, HEALTHY, id="nothing-shared"),
        pytest.param(IDLE, ABSTAINED, id="idle"),
        pytest.param({**BUSY, "running": 3, "finished": (100, 104)}, ABSTAINED, id="hardly-any-traffic"),
    ],
)
def test_what_is_no_incident_is_not_named(diagnosed: Diagnosed, figures: dict[str, Any], code: int) -> None:
    diagnosis = diagnosed(figures)
    assert top(diagnosis) is None, diagnosis.verdict
    assert diagnosis.code == code


def test_thrash_is_seen_where_evictions_are_counted(diagnosed: Diagnosed) -> None:
    assert top(diagnosed(THRASH, engine="kvoncall", version="0.1.0")) == "cache-thrash"


def test_one_hot_replica_is_routing_and_not_memory(diagnosed: Diagnosed) -> None:
    hot = {**BUSY, "usage": 0.96, "waiting": 8}
    diagnosis = diagnosed([hot, {**BUSY, "usage": 0.2}])
    assert top(diagnosis) == "hot-replica"
    saturated = next(f for f in diagnosis.examination.findings if f.id == "kv-saturated")
    assert saturated.explained_by == "hot-replica"


def test_long_answers_are_no_livelock(diagnosed: Diagnosed) -> None:
    """Nothing ends within a short window when answers are long; the storm is what is sure."""
    figures = {**STORM, "finished": 100, "preemptions": (5, 25)}
    diagnosis = diagnosed(figures)
    assert top(diagnosis) == "eviction-storm"
    livelock = next(f for f in diagnosis.examination.findings if f.id == "preemption-livelock")
    assert livelock.confidence == "low"


def test_places_that_are_taken_are_no_blocked_head(window: Callable[..., Observed]) -> None:
    from runbooks.config_lint import read_line

    line = read_line("vllm", "0.32.0", "vllm serve m --max-num-seqs 3")
    seen = window({**HEAD_OF_LINE, "ttft": (1, 1, 0.1)})
    diagnosis = diagnose(seen, line)
    assert top(diagnosis) == "queue-with-room"
    assert diagnosis.examination.serious[0].confidence == "high"


def test_a_restart_within_the_window_is_the_finding(diagnosed: Diagnosed) -> None:
    def anew(at: float) -> float:
        return 1_699_990_000.0 if at < 0.5 else 1_700_000_007.0

    def count(at: float) -> float:
        return 100 + 60 * at if at < 0.5 else 60 * (at - 0.5)

    diagnosis = diagnosed({**BUSY, "finished": count, "preemptions": lambda at: 40 if at < 0.5 else 0}, started=anew)
    assert top(diagnosis) == "oom"
    assert any("reset" in remark for remark in diagnosis.examination.remarks)
    assert not any(f.id == "eviction-storm" for f in diagnosis.examination.findings)  # a fall is no growth


def test_a_reset_without_a_start_time_is_a_restart_too(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed({**BUSY, "finished": lambda at: 100 if at < 0.5 else 1}, started=None)
    assert top(diagnosis) == "restarted"


def test_a_server_that_stops_answering_is_found(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed(BUSY, lost=(4, 5, 6))
    assert top(diagnosis) == "target-missing"
    assert diagnosis.code == FOUND


def test_one_answer_is_no_window(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed(STORM, lost=(1, 2, 3, 4, 5))
    assert "2 of 7" not in diagnosis.verdict
    few = diagnosed(STORM, lost=(0, 1, 2, 3, 4, 5))
    assert few.code == ABSTAINED
    assert "1 of 7 scrapes answered" in few.verdict
    assert "--for" in few.verdict


def test_hidden_metrics_abstain_and_say_what_to_set(diagnosed: Diagnosed) -> None:
    diagnosis = diagnosed({"running": 24, "waiting": 0})
    assert diagnosis.code == ABSTAINED
    assert any(f.id == "metrics-unknown" for f in diagnosis.examination.findings)
    assert "not exposed" in diagnosis.verdict


def test_too_little_traffic_is_not_judged(diagnosed: Diagnosed) -> None:
    """Two preemptions among ten requests are above 5%, and prove nothing."""
    diagnosis = diagnosed({**BUSY, "running": 4, "finished": (100, 106), "preemptions": (5, 7), "usage": 0.95})
    assert diagnosis.code == ABSTAINED
    assert any("eviction-storm is above its threshold" in reason for reason in diagnosis.examination.thin)


def test_retraction_is_the_storm_of_sglang() -> None:
    def page(retracted: int, finished: int) -> str:
        rank = 'engine_type="unified",model_name="m",tp_rank="0",pp_rank="0"'
        return (
            f"sglang:num_running_reqs{{{rank}}} 20\nsglang:num_queue_reqs{{{rank}}} 6\n"
            f"sglang:token_usage{{{rank}}} 0.99\n"
            "# TYPE sglang:num_retracted_requests_total counter\n"
            f"sglang:num_retracted_requests_total{{{rank}}} {retracted}\n"
            f'# TYPE sglang:num_requests_total counter\nsglang:num_requests_total{{model_name="m"}} {finished}\n'
        )

    pages = [(1000.0 + 3 * turn, page(10 + 4 * turn, 100 + 5 * turn)) for turn in range(6)]
    diagnosis = diagnose(of_pages("sglang", pages, {"version": "0.5.23"}))
    assert top(diagnosis) == "eviction-storm"
    assert "--max-num-seqs" not in diagnosis.verdict  # not a flag of SGLang


def test_a_full_pool_of_tensorrt_llm() -> None:
    def page(finished: int) -> str:
        own = 'model_name="m",engine_type="trt"'
        return (
            f"trtllm_num_requests_running{{{own}}} 30\ntrtllm_num_requests_waiting{{{own}}} 9\n"
            f"trtllm_kv_cache_utilization{{{own}}} 0.97\n"
            f"# TYPE trtllm_request_success_total counter\ntrtllm_request_success_total{{{own}}} {finished}\n"
        )

    pages = [(1000.0 + 3 * turn, page(100 + 5 * turn)) for turn in range(6)]
    diagnosis = diagnose(of_pages("tensorrt-llm", pages, {"version": "1.4.0rc4"}))
    assert top(diagnosis) == "kv-saturated"
    assert any(one.id == "eviction-storm" for one in diagnosis.examination.not_judged)


def test_thresholds_are_those_of_the_rules() -> None:
    from probe.alerts.expr import Compare, Logical
    from probe.alerts.rule import ValueSignal
    from probe.alerts.rules import EVICTION_STORM, KV_SATURATED
    from probe.doctor.examine import LEAST_REQUESTS
    from probe.doctor.look_alikes import FULL

    signal = EVICTION_STORM.signal
    assert isinstance(signal, ValueSignal)
    assert isinstance(signal.floor, Logical)
    assert isinstance(signal.floor.left, Compare)
    assert signal.floor.left.right == LEAST_REQUESTS
    assert KV_SATURATED.threshold == FULL


@pytest.mark.parametrize("offset", [0.0004, 0.00049, 0.0005, 0.0006, 0.4994, 0.49951])
def test_the_first_scrape_is_in_the_window_whatever_its_time(offset: float) -> None:
    def page(turn: int) -> str:
        own = 'engine="0",model_name="m"'
        return (
            f"vllm:num_requests_running{{{own}}} 24\nvllm:num_requests_waiting{{{own}}} 8\n"
            f"vllm:kv_cache_usage_perc{{{own}}} 0.98\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{{{own}}} {9 * turn}\n"
            f"# TYPE vllm:request_success counter\nvllm:request_success_total{{{own}}} {4 * turn}\n"
        )

    pages = [(1000.0 + offset + turn * 0.0503 + turn * offset / 7, page(turn)) for turn in range(7)]
    diagnosis = diagnose(of_pages("vllm", pages, {"version": "0.32.0"}))
    value = diagnosis.examination.findings[0].evidence[0]
    assert (value.numerator, value.denominator) == (54, 48)


def test_a_collapsed_hit_rate_is_judged_against_its_own_past(window: Callable[..., Observed]) -> None:
    """45 minutes of a watch, the hit rate 60% until ten minutes ago: seen with a past, not judged without one."""
    from probe.store import Sample

    seen = window(BUSY)
    labels = {"engine": "0", "model_name": "m"}
    samples, prompts, hits = [], 0.0, 0.0
    for turn in range(91):
        ts = seen.until - 2700 + 30 * turn
        collapsed = turn > 70
        prompts, hits = prompts + 5_000, hits + (100 if collapsed else 3_000)
        figures = {"prompt_tokens_total": prompts, "prefix_hits_total": hits, "requests_running": 24.0, "up": 1.0}
        figures |= {"requests_finished_total": 4.0 * turn, "generation_tokens_total": 900.0 * turn}
        samples += [Sample("kept", name, {} if name == "up" else labels, ts, value) for name, value in figures.items()]
    watched = dataclasses.replace(
        seen,
        samples=samples,
        events=(),
        since=seen.until - 300,
        history_from=seen.until - 2700,
        attempts=11,
        answers=11,
    )
    diagnosis = diagnose(watched)
    assert top(diagnosis) == "prefix-hit-collapse"
    assert any(one.id == "prefix-hit-collapse" for one in diagnose(seen).examination.not_judged)


@pytest.mark.parametrize(("time_scale", "expected"), [(1.0, None), (0.03, "head-of-line-block")])
def test_a_drill_is_judged_at_its_own_pace(
    window: Callable[..., Observed], time_scale: float, expected: str | None
) -> None:
    """A head that blocks for five seconds is an incident of a drill, and none of a server at true scale."""
    from probe.store import Sample

    seen = window(BUSY)
    labels = {"engine": "0", "model_name": "m"}
    samples = []
    for turn in range(61):
        blocked = turn > 50
        figures = {
            "requests_waiting": 5.0 if blocked else 0.0,
            "requests_running": 3.0,
            "kv_usage_ratio": 0.4,
            "up": 1.0,
        }
        figures |= {"ttft_seconds_count": float(min(turn, 50)), "generation_tokens_total": 40.0 * turn}
        figures |= {"requests_finished_total": float(min(turn, 50)), "prompt_tokens_total": 100.0 * min(turn, 50)}
        ts = seen.until - 30 + 0.5 * turn
        samples += [Sample("kept", name, {} if name == "up" else labels, ts, value) for name, value in figures.items()]
    target = dataclasses.replace(seen.target, time_scale=time_scale, scrape_interval_s=0.5)
    drill = dataclasses.replace(
        seen, target=target, samples=samples, events=(), since=seen.until - 30, history_from=seen.until - 30
    )
    assert top(diagnose(drill)) == expected
