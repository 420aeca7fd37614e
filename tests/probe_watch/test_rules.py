"""Each rule against traffic made for it: what fires it, and the healthy, thin or missing data that must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from probe.alerts.evaluate import Outcome, View, evaluate
from probe.alerts.evaluator import TargetEvaluator, horizons_s
from probe.alerts.rule import Rule
from probe.alerts.rules import (
    CACHE_THRASH,
    DEFAULT_RULES,
    ENGINE_STALL,
    GPU_MEMORY_CREEP,
    HEAD_OF_LINE_BLOCK,
    ITL_SLO_BURN,
    KV_BLOCK_LEAK,
    METRICS_UNKNOWN,
    PREEMPTION_LIVELOCK,
    PREFIX_HIT_COLLAPSE,
    TTFT_SLO_BURN,
)
from probe.alerts.window import Window
from probe.store import Sample, Target

T0 = 1_800_000_000.0
TARGET = Target(1, "t", "http://h:1", "external", "vllm", [], {}, 15.0, 1.0, True, T0 - 9_000)
HOUR = 3600.0

Course = float | Callable[[float], float]
"""A series over time: a constant, or the value at a number of seconds before now (negative, 0 is now)."""


def rate(per_second: float, until: float = 0.0, then: float | None = None) -> Course:
    """A counter that grows by `per_second` until `until`, and by `then` a second from there on."""
    return lambda at: 1e6 + per_second * min(at, until) + (then or 0.0) * max(0.0, at - until)


def engine(number: str = "0", **courses: Course) -> dict[tuple[str, tuple[tuple[str, str], ...]], Course]:
    """Series of one engine; a bucket's bound is written `ttft_seconds_bucket__2_5`."""
    series: dict[tuple[str, tuple[tuple[str, str], ...]], Course] = {}
    for name, course in courses.items():
        metric, _, le = name.partition("__")
        labels = {"engine": number, "model_name": "m"} | ({"le": le.replace("_", ".")} if le else {})
        series[metric, tuple(labels.items())] = course
    return series


def gpu(number: str, used: Course, total: float = 80e9) -> dict[tuple[str, tuple[tuple[str, str], ...]], Course]:
    labels = (("gpu", number),)
    return {("device_memory_used_bytes", labels): used, ("device_memory_total_bytes", labels): total}


def sampled(
    series: Mapping[tuple[str, tuple[tuple[str, str], ...]], Course], span: float, step: float
) -> Iterator[list[Sample]]:
    at = -span
    while at <= 0:
        now = T0 + at
        values = {key: course if isinstance(course, float | int) else course(at) for key, course in series.items()}
        yield [
            *(Sample("t", metric, dict(labels), now, float(v)) for (metric, labels), v in values.items()),
            Sample("t", "up", {}, now, 1.0),
        ]
        at += step


@dataclass(frozen=True)
class Case:
    what: str
    rule: Rule
    series: Mapping[tuple[str, tuple[tuple[str, str], ...]], Course]
    verdict: str
    value: float | None = None
    says: str = ""
    span: float = 900.0
    step: float = 15.0
    coverage: str = ""
    now: float = field(default=0.0)


BUSY = {"requests_running": 4.0, "requests_waiting": 3.0}
IDLE = {"requests_running": 0.0, "requests_waiting": 0.0}
STUCK = {"generation_tokens_total": 100.0, "prompt_tokens_total": 100.0}


def blocked(number: str = "0", **changed: Course) -> dict[tuple[str, tuple[tuple[str, str], ...]], Course]:
    usual: dict[str, Course] = {
        "requests_waiting": 3.0,
        "ttft_seconds_count": 7.0,
        "generation_tokens_total": rate(20),
        "kv_usage_ratio": 0.5,
    }
    return engine(number, **(usual | changed))


def latency(served: float, good: float, **more: Course) -> dict[tuple[str, tuple[tuple[str, str], ...]], Course]:
    return engine(ttft_seconds_count=rate(served), ttft_seconds_bucket__2_50=rate(good), **more)


def prefix(
    hits: Course, queries: Course = lambda at: 1e6 + 100 * at
) -> dict[tuple[str, tuple[tuple[str, str], ...]], Course]:
    return engine(prefix_hits_total=hits, prompt_tokens_total=queries)


def dip(at: float) -> float:
    """Good answers: all, but none for ten minutes half an hour ago."""
    return 10 * at if at < -2400 else -24_000.0 if at < -1800 else -24_000 + 10 * (at + 1800)


LIVELOCK, THRASH, STALL, HEAD = PREEMPTION_LIVELOCK, CACHE_THRASH, ENGINE_STALL, HEAD_OF_LINE_BLOCK
HITS, LEAK, CREEP = PREFIX_HIT_COLLAPSE, KV_BLOCK_LEAK, GPU_MEMORY_CREEP
DAY = 90_000.0
MB = 1e6

CASES = [
    Case(
        "preempts, finishes nothing",
        LIVELOCK,
        engine(preemptions_total=rate(0.1), requests_finished_total=5.0),
        "breach",
        30.0,
        "30 preemptions and no request finished in 5 min on engine 0",
    ),
    Case("preempts, finishes", LIVELOCK, engine(preemptions_total=rate(1), requests_finished_total=rate(0.01)), "ok"),
    Case("idle", LIVELOCK, engine(preemptions_total=9.0, requests_finished_total=5.0), "ok", 0.0),
    Case(
        "one of two livelocked",
        LIVELOCK,
        engine("0", preemptions_total=0.0, requests_finished_total=rate(3))
        | engine("1", preemptions_total=rate(0.1), requests_finished_total=7.0),
        "breach",
        30.0,
        "on engine 1",
    ),
    Case(
        "not exposed", LIVELOCK, engine(requests_finished_total=5.0), "no_data", coverage="preemptions_total was never"
    ),
    Case(
        "missed soon after",
        THRASH,
        engine(kv_block_evictions_total=rate(1), kv_evicted_before_reuse_total=rate(0.5)),
        "breach",
        0.5,
        "50.0% of the evicted blocks asked for again soon after (150 of 300 in 5 min)",
    ),
    Case(
        "evicts what nobody wants",
        THRASH,
        engine(kv_block_evictions_total=rate(1), kv_evicted_before_reuse_total=rate(0.2)),
        "ok",
        0.2,
    ),
    Case(
        "few blocks",
        THRASH,
        engine(kv_block_evictions_total=rate(0.1), kv_evicted_before_reuse_total=rate(0.09)),
        "below_floor",
        0.9,
        coverage="fewer than 50 evicted blocks: shown, not alerted",
    ),
    Case("evicts nothing", THRASH, engine(kv_block_evictions_total=3.0, kv_evicted_before_reuse_total=1.0), "ok"),
    Case(
        "ratio of sums",
        THRASH,
        engine("0", kv_block_evictions_total=rate(1), kv_evicted_before_reuse_total=rate(0.9))
        | engine("1", kv_block_evictions_total=rate(9), kv_evicted_before_reuse_total=0.0),
        "ok",
        0.09,
    ),
    Case("not exposed", THRASH, engine(**STUCK), "no_data"),
    Case(
        "stuck", STALL, engine(**STUCK, **BUSY), "breach", 0.0, "0 tokens in 3 min while requests are held on engine 0"
    ),
    Case("only waiting", STALL, engine(**STUCK, requests_running=0.0, requests_waiting=1.0), "breach", 0.0),
    Case("no work", STALL, engine(**STUCK, **IDLE), "ok", 0.0),
    Case("works", STALL, engine(generation_tokens_total=rate(50), prompt_tokens_total=rate(9), **BUSY), "ok", 10620.0),
    Case("a long prompt", STALL, engine(generation_tokens_total=5.0, prompt_tokens_total=rate(200), **BUSY), "ok"),
    Case(
        "one of two stuck",
        STALL,
        engine("0", generation_tokens_total=rate(50), prompt_tokens_total=rate(9), **BUSY)
        | engine("1", **STUCK, **BUSY),
        "breach",
        0.0,
        "on engine 1",
    ),
    Case("gone", STALL, engine(**STUCK, **BUSY), "no_data", coverage="no data for 300 s", now=300.0),
    Case("head blocks", HEAD, blocked(), "breach", 3.0, "3 or more waited all of 2 min and none was admitted"),
    Case("blocks are short", HEAD, blocked(kv_usage_ratio=0.95), "ok"),
    Case("admits", HEAD, blocked(ttft_seconds_count=rate(0.1)), "ok"),
    Case("no queue", HEAD, blocked(requests_waiting=0.0), "ok", 0.0),
    Case("a stall is another rule's", HEAD, blocked(generation_tokens_total=5.0), "ok"),
    Case(
        "one of two blocked",
        HEAD,
        blocked("0", ttft_seconds_count=rate(1)) | blocked("1", requests_waiting=2.0),
        "breach",
        2.0,
        "on engine 1",
    ),
    Case("gone", HEAD, blocked(), "no_data", coverage="no data for 300 s", now=300.0),
    Case("collapsed", HITS, prefix(rate(80, -600, 10)), "breach", 0.125, "10.0% in 10 min against 80.0%", DAY, 60.0),
    Case("a bit lower", HITS, prefix(rate(80, -600, 70)), "ok", 0.875, span=DAY, step=60.0),
    Case("never hit much", HITS, prefix(rate(9, -600, 0)), "ok", 0.0, span=DAY, step=60.0),
    Case("few tokens", HITS, prefix(rate(8, -600, 1), rate(10)), "below_floor", 0.125, span=DAY, step=60.0),
    Case("nearly no baseline", HITS, prefix(rate(80, -600, 1)), "below_floor", span=660.0),
    Case("no baseline", HITS, prefix(rate(80)), "no_data", coverage="too few samples of prefix_hits_total", span=500.0),
    Case("no traffic", HITS, prefix(5.0, 9.0), "ok", span=DAY, step=60.0),
    Case("20% slow", TTFT_SLO_BURN, latency(10, 8), "breach", 20.0, "20 times the budget in 1 h (99% within 2.5 s)"),
    Case("7% slow for long", TTFT_SLO_BURN, latency(100, 93), "breach", 7.0, span=6 * HOUR, step=60.0),
    Case("1% slow", TTFT_SLO_BURN, latency(100, 99), "ok", 1.0, span=6 * HOUR, step=60.0),
    Case(
        "slow half an hour ago",
        TTFT_SLO_BURN,
        engine(ttft_seconds_count=lambda at: 10 * at, ttft_seconds_bucket__2_5=dip),
        "ok",
        100 / 6,
        span=6 * HOUR,
        step=60.0,
    ),
    Case("30 requests an hour", TTFT_SLO_BURN, latency(1 / 120, 0), "below_floor", 100.0, span=HOUR),
    Case("no requests", TTFT_SLO_BURN, latency(0, 0), "ok"),
    Case("other buckets", TTFT_SLO_BURN, engine(ttft_seconds_count=rate(9), ttft_seconds_bucket__2=rate(9)), "no_data"),
    Case(
        "one of two slow",
        ITL_SLO_BURN,
        engine("0", itl_seconds_count=rate(10), itl_seconds_bucket__0_1=rate(10))
        | engine("1", itl_seconds_count=rate(10), itl_seconds_bucket__0_1=0.0),
        "breach",
        50.0,
    ),
    Case("leaks", LEAK, engine(kv_usage_ratio=0.05, **IDLE), "breach", 0.05, "5.0% of the KV blocks in use without"),
    Case("all free", LEAK, engine(kv_usage_ratio=0.0, **IDLE), "ok", 0.0),
    Case("in use", LEAK, engine(kv_usage_ratio=0.5, **BUSY), "ok"),
    Case(
        "a request a moment ago",
        LEAK,
        engine(kv_usage_ratio=0.5, requests_running=lambda at: float(at < -200), requests_waiting=0.0),
        "ok",
    ),
    Case(
        "one of two leaks",
        LEAK,
        engine("0", kv_usage_ratio=0.9, **BUSY) | engine("1", kv_usage_ratio=0.02, **IDLE),
        "breach",
        0.02,
        "on engine 1",
    ),
    Case("gone", LEAK, engine(kv_usage_ratio=0.05, **IDLE), "no_data", now=600.0),
    Case("creeps", CREEP, gpu("0", lambda at: 40e9 + 1600 * MB * at / HOUR), "breach", 0.02, span=HOUR),
    Case("constant", CREEP, gpu("0", 40e9), "ok", 0.0, span=HOUR),
    Case("shrinks", CREEP, gpu("0", lambda at: 40e9 - MB * at), "ok", span=HOUR),
    Case("a step half an hour ago", CREEP, gpu("0", lambda at: 9e9 if at < -1800 else 70e9), "ok", span=HOUR),
    Case(
        "one of two creeps",
        CREEP,
        gpu("0", 40e9) | gpu("1", lambda at: 40e9 + 1600 * MB * at / HOUR),
        "breach",
        0.02,
        "2.0% of the device an hour, over 1 h on gpu 1",
        span=HOUR,
    ),
    Case("no driver", CREEP, engine(**IDLE), "no_data"),
    Case(
        "two missing", METRICS_UNKNOWN, {("required_metrics_missing", ()): 2.0}, "breach", 2.0, "2 metrics that alerts"
    ),
    Case("none missing", METRICS_UNKNOWN, {("required_metrics_missing", ()): 0.0}, "ok", 0.0),
    Case("nobody looked", METRICS_UNKNOWN, {}, "no_data"),
]


def read(case: Case) -> Outcome:
    window = Window(horizons_s([case.rule]))
    for samples in sampled(case.series, case.span, case.step):
        window.add(samples)
    return evaluate(case.rule, View(TARGET, window, [], T0 + case.now))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule.id}: {case.what}")
def test_verdict(case: Case) -> None:
    outcome = read(case)
    assert outcome.verdict == case.verdict, outcome
    if case.value is not None:
        assert outcome.value == pytest.approx(case.value, rel=1e-9)
    assert case.says in outcome.summary
    assert case.coverage in outcome.coverage


def test_every_rule_that_compares_values_has_a_case_that_fires_and_one_that_does_not() -> None:
    elsewhere = {
        "oom",
        "target-missing",
        "eviction-storm",
        "kv-saturated",
        "kv-quality-drop",
        "prefix-isolation-breach",
    }
    for rule in DEFAULT_RULES:
        if rule.id not in elsewhere and rule is not ITL_SLO_BURN:  # the same as for time to first token
            assert {"breach", "ok", "no_data"} <= {case.verdict for case in CASES if case.rule is rule}, rule.id


def test_memory_an_engine_takes_at_its_start_is_no_creep() -> None:
    """Weights, then blocks, then graphs within ten minutes; later a creep of 2% an hour."""

    def used(at: float) -> float:
        since = at + 4 * HOUR
        start = 1e9 if since < 0 else 20e9 if since < 200 else 70e9 if since < 600 else 72e9
        return start + max(0.0, at + 1.5 * HOUR) * 1600 * MB / HOUR

    evaluator = TargetEvaluator(TARGET, [GPU_MEMORY_CREEP])
    states: dict[float, str] = {}
    for samples in sampled(gpu("0", used), 5 * HOUR, 60.0):
        evaluator.add_samples(samples)
        states[samples[-1].ts - T0] = evaluator.evaluate(samples[-1].ts)[0].reading.state
    fired = [at for at, state in states.items() if state == "firing"]
    assert any(state == "pending" for at, state in states.items() if at < -3 * HOUR)
    assert -HOUR < fired[0] < -0.25 * HOUR
    assert states[0.0] == "firing"
