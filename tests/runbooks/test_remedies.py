"""Remedies of every runbook over many targets, and values computed by hand."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import promql_parser
import pytest

from engine.config import EngineConfig, apply_changes
from probe.alerts.rules import DEFAULT_RULES
from probe.collect.coverage import coverage
from probe.dialects import load_dialect
from runbooks.changes import Recommendation, refusal_reason
from runbooks.flags import catalog, embedded_flags, why_absent, why_value_absent
from runbooks.recommend import FlagChange, TargetFacts, TrafficFacts, from_facts, recommend
from runbooks.wrong_way import WRONG_WAY

GIB = 1024**3
RULES = [rule.id for rule in DEFAULT_RULES]
RUNBOOKS = [  # of kinds of incidents, without an alert
    "capacity-misjudged", "flag-not-in-version", "kv-does-not-fit", "kv-dtype-unsupported", "metrics-misread",
    "offload-host-memory", "offload-resume-deadlock", "prefix-cache-inert", "shared-gpu-memory",
    "slow-after-retraction", "upgrade-less-kv",
]  # fmt: skip


def target(engine: str = "vllm", version: str | None = "0.33.0", **more: Any) -> TargetFacts:
    """A target with a pool of 40,000 tokens in blocks of 16, and nothing else known."""
    facts = {"engine": engine, "version": version, "kv_cache_size_tokens": 40_000, "num_gpu_blocks": 2_501}
    return from_facts({**facts, "block_size": 16, **more})


def change(advice: Recommendation, flag: str) -> FlagChange:
    """The one change of that flag."""
    (found,) = [c for c in advice.changes if c.flag == flag]
    return found


def flags(advice: Recommendation) -> list[str]:
    """The flags that are to change."""
    return [c.flag for c in advice.changes]


def refused(advice: Recommendation, flag: str) -> str:
    """Why that flag is not to change."""
    return " | ".join(r.reason for r in advice.refused if r.flag == flag)


BUSY = TrafficFacts(64, 40, 6_000.0, 300.0, 4_000, 3.0, 0.5)
QUIET = TrafficFacts(0, 0, 900.0, 100.0, 1_000, 0.1, 4.0)
SET = {
    "--gpu-memory-utilization": 0.8,
    "--max-num-seqs": 64,
    "--max-num-batched-tokens": 2_048,
    "--watermark": 0.2,
    "--enable-prefix-caching": False,
    "--enforce-eager": True,
    "--disable-log-stats": True,
}
SIZED: dict[str, Any] = {
    "max_num_seqs": 64, "max_num_batched_tokens": 2_048, "device_memory_bytes": 80 * GIB, "weights_bytes": 40 * GIB,
    "activation_peak_bytes": 4 * GIB, "kv_bytes_per_token": 131_072, "kv_bytes_per_block": 2_097_152,
    "other_processes_bytes": 8 * GIB, "max_model_len": 131_072,
}  # fmt: skip
SHOW = "--show-hidden-metrics-for-version"
COVERAGE = {
    "rows": [
        {"canonical": "kv_usage_ratio", "status": "hidden", "todo": f"needs {SHOW}", "required": True},
        {"canonical": "kv_block_idle_before_evict_seconds", "status": "hidden", "todo": "needs --kv-cache-metrics"},
        {"canonical": "requests_running", "status": "present", "todo": None, "required": True},
    ]
}
ENGINES = [
    ("kvoncall", None), ("vllm", "0.6.6"), ("vllm", "0.10.2"), ("vllm", "0.24.0"), ("vllm", "0.33.0"), ("vllm", None),
    ("sglang", "0.4.6.post5"), ("sglang", "0.5.23"), ("tensorrt-llm", "1.3.0"), ("tgi", None),
]  # fmt: skip
KNOWLEDGE: list[dict[str, Any]] = [
    {}, {**SIZED, "flags": SET, "coverage": COVERAGE}, {**SIZED, "flags": {**SET, "--kv-cache-memory-bytes": 4 * GIB}},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_whatever_is_proposed_exists_points_the_right_way_and_is_explained(rule: str) -> None:
    for (engine, version), known, traffic in itertools.product(ENGINES, KNOWLEDGE, (TrafficFacts(), BUSY, QUIET)):
        facts = replace(target(engine, version, **known), traffic=traffic)
        advice = recommend(rule, facts)
        assert advice.runbook == rule
        assert advice.summary
        for item in advice.changes:
            assert why_absent(engine, version, item.flag) is None
            assert item.to is None or why_value_absent(engine, version, item.flag, item.to) is None
            assert refusal_reason(rule, facts, item.flag, item.to) is None
            assert item.flag[2:] in item.rollback
            assert item.why
            if "`" not in item.verify and not item.verify.startswith("kvoncall"):
                promql_parser.parse(item.verify)
        if engine == "kvoncall":
            then = EngineConfig.from_args(apply_changes([], advice.flag_values())).flag_values()
            assert all(then[c.flag] == c.to for c in advice.changes if c.to is not None)
        assert {"--swap-space", "--preemption-mode"}.isdisjoint(flags(advice))


@pytest.mark.parametrize("rule", ["eviction-storm", "preemption-livelock", "cache-thrash", "kv-saturated"])
@pytest.mark.parametrize(("engine", "version"), [("kvoncall", None), ("vllm", "0.33.0")])
def test_a_pool_that_is_too_small_is_never_made_smaller(rule: str, engine: str, version: str | None) -> None:
    facts = target(engine, version, flags=SET, **SIZED)
    assert "direction" in (refusal_reason(rule, facts, "--gpu-memory-utilization", 0.7) or "")
    for item in recommend(rule, replace(facts, traffic=BUSY)).changes:
        assert item.flag != "--gpu-memory-utilization" or item.to > 0.8


def test_the_flags_that_steps_name_exist() -> None:
    known = embedded_flags() | set(catalog("vllm")["flags"]) | set(catalog("sglang")["flags"])
    known |= {"--query-compute-apps", "--format", "--pid", "--target", "--prefix-match-unit"}  # the last: only named
    for rule, (engine, version), knowledge in itertools.product(RULES, ENGINES, KNOWLEDGE):
        steps = " ".join(recommend(rule, replace(target(engine, version, **knowledge), traffic=BUSY)).steps)
        own = set(re.findall(r"--[a-z][a-z-]+", steps))
        assert own <= known
        if engine == "sglang" and "coverage" not in knowledge:
            assert own - {"--query-compute-apps", "--format", "--pid", "--target"} <= set(catalog("sglang")["flags"])


def test_the_wrong_ways_are_of_rules_and_flags_that_exist() -> None:
    known = embedded_flags() | set(catalog("vllm")["flags"]) | set(catalog("sglang")["flags"])
    for (rule, flag), (direction, why) in WRONG_WAY.items():
        assert rule in RULES or rule in RUNBOOKS
        assert flag in known
        assert direction in (-1, 1)
        assert re.search("direction|will not help", why)


# Preemption livelock.


def test_a_request_that_can_never_fit_is_refused_at_admission() -> None:
    facts = target(kv_cache_size_tokens=76_640, num_gpu_blocks=4_791, max_model_len=262_144)  # vllm#39734
    advice = recommend("preemption-livelock", facts)
    assert change(advice, "--max-model-len").to == 76_640
    assert "does not hold one request" in refused(advice, "--max-num-seqs")
    served = recommend("preemption-livelock", replace(facts, traffic=TrafficFacts(64, 0, None, None, 4_000)))
    assert change(served, "--max-num-seqs").to == 19  # 4,790 blocks; 4,000 tokens take 250


def test_a_livelock_without_lengths_gets_a_reserve() -> None:
    advice = recommend("preemption-livelock", target(flags={"--watermark": 0.0}))
    assert (change(advice, "--watermark").from_, change(advice, "--watermark").to) == (0.0, 0.05)
    assert "Of 2501 blocks 125 stay free" in change(advice, "--watermark").why
    kept = recommend("preemption-livelock", target(flags={"--watermark": 0.03}))
    assert "not needed" in refused(kept, "--watermark")
    old = recommend("preemption-livelock", target(version="0.23.0"))
    assert "exists since vllm 0.24.0" in refused(old, "--watermark")


@pytest.mark.parametrize("rule", ["preemption-livelock", "eviction-storm"])
def test_sglang_gets_its_own_flag_for_fewer_sequences(rule: str) -> None:
    facts = target("sglang", "0.5.23", flags={"--max-running-requests": 64})
    advice = recommend(rule, replace(facts, traffic=TrafficFacts(64, 0, None, None, 4_000)))
    fewer = change(advice, "--max-running-requests")
    assert (fewer.from_, fewer.to) == (64, 10)  # 2,500 blocks of 16; 250 each
    assert "sglang:num_retracted_requests_total" in fewer.verify
    assert any("--schedule-conservativeness" in step for step in advice.steps)


# Cache thrash.


def test_a_cache_takes_all_the_pool_that_fits_where_requests_would_not() -> None:
    sized = {k: v for k, v in SIZED.items() if k != "max_model_len"}
    facts = replace(target(flags=SET, **sized), traffic=TrafficFacts(2, 0, None, None, 100))
    assert "--gpu-memory-utilization" not in flags(recommend("eviction-storm", facts))
    advice = recommend("cache-thrash", facts)
    more = change(advice, "--gpu-memory-utilization")
    added = int(80 * GIB * 0.12) // 131_072 // 16 * 16
    assert more.to == 0.92
    assert more.expected in {f"pool 40000 -> {40_000 + n} tokens" for n in (added - 16, added, added + 16)}
    assert change(advice, "--kv-offloading-size").to == 5  # 2,501 blocks of 2 MiB are 4.88 GiB
    assert "nothing is found" in refused(advice, "--enable-prefix-caching")


def test_the_embedded_engine_has_no_host_tier() -> None:
    advice = recommend("cache-thrash", target("kvoncall", None, flags={**SET, "--prefix-cache-ttl": 60}, **SIZED))
    assert flags(advice) == ["--gpu-memory-utilization"]
    assert "will not help" in refused(advice, "--prefix-cache-ttl")


# Engine stall, head of line.


def test_a_stall_is_a_matter_of_flags_only_where_the_queue_waits_for_what_never_fits() -> None:
    facts = target(max_model_len=131_072)
    stuck = recommend("engine-stall", replace(facts, traffic=TrafficFacts(0, 5)))
    assert change(stuck, "--max-model-len").to == 40_000
    hung = recommend("engine-stall", replace(facts, traffic=TrafficFacts(3, 5)))
    assert hung.changes == ()
    assert "requests ran" in refused(hung, "--max-model-len")
    assert any("py-spy" in step for step in hung.steps)


def test_taken_places_are_widened_to_what_the_pool_holds() -> None:
    facts = target(max_num_seqs=8, max_num_batched_tokens=2_048)
    full = replace(facts, traffic=TrafficFacts(8, 4, None, None, 1_000))
    assert change(recommend("head-of-line-block", full), "--max-num-seqs").to == 39  # 2,500 blocks; 63 each
    assert flags(recommend("head-of-line-block", full)) == ["--max-num-seqs"]
    free = recommend("head-of-line-block", replace(full, traffic=replace(full.traffic, peak_running=5)))
    assert "at most 5 ran at once" in refused(free, "--max-num-seqs")
    assert change(free, "--long-prefill-token-threshold").to == 512


@pytest.mark.parametrize(
    ("step", "now", "to"), [(8_192, 0, 2_048), (8_192, 4_096, 2_048), (8_192, 1_024, None), (256, 0, None)]
)
def test_a_long_prompt_leaves_three_quarters_of_a_step_to_others(step: int, now: int, to: int | None) -> None:
    facts = target(max_num_seqs=64, max_num_batched_tokens=step, flags={"--long-prefill-token-threshold": now})
    advice = recommend("head-of-line-block", replace(facts, traffic=TrafficFacts(5, 4)))
    found = [c.to for c in advice.changes if c.flag == "--long-prefill-token-threshold"]
    assert found == ([] if to is None else [to])


def test_a_large_reserve_is_what_the_head_waits_for() -> None:
    facts = target(max_num_seqs=64, flags={"--watermark": 0.2})
    advice = recommend("head-of-line-block", replace(facts, traffic=TrafficFacts(5, 4)))
    assert change(advice, "--watermark").to == 0.05


# Prefix hits.


def test_a_cache_that_is_off_is_switched_on_and_isolation_is_kept() -> None:
    off = {"--enable-prefix-caching": False, "--prefix-cache-scope": "session", "--prefix-cache-ttl": 3_600}
    advice = recommend("prefix-hit-collapse", target("kvoncall", None, flags=off))
    assert [(c.flag, c.to) for c in advice.changes] == [("--enable-prefix-caching", True)]
    assert "prefix-isolation-breach" in change(advice, "--enable-prefix-caching").cost
    assert "keeps tenants apart" in refused(advice, "--prefix-cache-scope")
    assert "part of isolation" in refused(advice, "--prefix-cache-ttl")
    assert any("--prefix-cache-public" in step for step in advice.steps)


def test_defaults_tell_whether_the_cache_is_on() -> None:
    assert flags(recommend("prefix-hit-collapse", target(version="0.7.3"))) == ["--enable-prefix-caching"]
    assert "on already" in refused(recommend("prefix-hit-collapse", target(version="0.8.0")), "--enable-prefix-caching")


def test_prompts_shorter_than_a_block_are_pointed_out() -> None:
    facts = replace(target(block_size=8_320), traffic=TrafficFacts(prompt_tokens_mean=4_096.0))  # vllm#48401
    assert any("Blocks hold 8320 tokens" in step for step in recommend("prefix-hit-collapse", facts).steps)


# Latency.


def test_queue_and_prefill_want_different_flags() -> None:
    facts = target(max_num_seqs=8, max_num_batched_tokens=2_048, flags={"--gpu-memory-utilization": 0.92})
    queue = recommend("ttft-slo-burn", replace(facts, traffic=TrafficFacts(8, 4, 6_000.0, 1.0, 1_000, 3.0, 0.5)))
    assert flags(queue) == ["--max-num-seqs"]
    assert "3.00 s in the queue" in queue.summary
    prefill = recommend("ttft-slo-burn", replace(facts, traffic=TrafficFacts(8, 4, 6_000.0, 1.0, 1_000, 0.5, 3.0)))
    step = change(prefill, "--max-num-batched-tokens")
    assert (step.to, flags(prefill)) == (8_192, ["--max-num-batched-tokens"])
    assert "takes 3 steps of 2048; with 8192 it takes 1" in step.why
    unknown = recommend("ttft-slo-burn", facts)
    assert unknown.changes == ()
    assert "the queue's length" in unknown.summary


def test_without_times_the_length_of_the_queue_decides() -> None:
    facts = target(max_num_seqs=64, max_num_batched_tokens=2_048, max_model_len=4_000)
    waits = recommend("ttft-slo-burn", replace(facts, traffic=TrafficFacts(10, 4)))
    assert flags(waits) == ["--max-num-queued-reqs"]
    assert change(waits, "--max-num-queued-reqs").to == 10
    short = recommend("ttft-slo-burn", replace(facts, traffic=TrafficFacts(10, 0, 500.0)))
    assert "one step of 2048 already" in refused(short, "--max-num-batched-tokens")


@pytest.mark.parametrize(
    ("now", "seqs", "to"),
    [(8_192, 256, 4_096), (2_048, 1_024, 1_024), (600, 64, 512), (512, 64, None), (1_024, 1_024, None)],
)
def test_a_step_is_halved_but_holds_every_running_request(now: int, seqs: int, to: int | None) -> None:
    advice = recommend("itl-slo-burn", target(max_num_batched_tokens=now, max_num_seqs=seqs))
    assert [c.to for c in advice.changes] == ([] if to is None else [to])


@pytest.mark.parametrize(
    ("gap", "speed", "prefill_s", "to"),
    [
        (2.0, 20_000.0, None, 4_608),  # 0.5 s x 20,000 / 2 = 5,000
        (2.0, 1_000.0, None, 512),
        (2.0, 1_000.0, 0.1, 4_608),  # a prompt of 2,000 tokens took 0.1 s: 20,000 a second, too
        (2.0, 900_000.0, None, 16_384),
        (0.4, 20_000.0, None, 16_384),
        (2.0, None, None, 16_384),
        (None, 20_000.0, None, 16_384),
    ],
)
def test_a_step_is_as_small_as_the_objective_asks_for(
    gap: float | None, speed: float | None, prefill_s: float | None, to: int
) -> None:
    """32,768 tokens, 0.5 s wanted: what half of that computes, a half of the step at most."""
    pace = TrafficFacts(
        prompt_tokens_mean=2_000.0, prefill_s_mean=prefill_s, itl_s_p99=gap, itl_bound_s=0.5, prompt_tokens_per_s=speed
    )
    facts = replace(target(max_num_batched_tokens=32_768, max_num_seqs=16), traffic=pace)
    assert change(recommend("itl-slo-burn", facts), "--max-num-batched-tokens").to == to


def test_a_step_is_not_made_smaller_than_a_prompt_where_prompts_are_not_cut() -> None:
    uncut = {"--enable-chunked-prefill": False, "--enforce-eager": True}
    advice = recommend("itl-slo-burn", target(max_num_batched_tokens=8_192, flags=uncut))
    assert [(c.flag, c.to) for c in advice.changes] == [("--enforce-eager", False)]
    assert "chunked prefill" in refused(advice, "--max-num-batched-tokens")


# Leak, creep, metrics.


def test_a_leak_has_no_flag() -> None:
    for engine, version in ENGINES:
        advice = recommend("kv-block-leak", replace(target(engine, version, flags=SET, **SIZED), traffic=BUSY))
        assert advice.changes == ()
        assert any("1% of this pool is 400 tokens" in step for step in advice.steps)
        assert "will not help" in refused(advice, "--gpu-memory-utilization")


def test_only_another_process_is_given_room() -> None:
    facts = target(device_memory_bytes=80 * GIB, flags={"--gpu-memory-utilization": 0.92})
    alone = recommend("gpu-memory-creep", facts)
    assert alone.changes == ()
    assert "will not help" in refused(alone, "--gpu-memory-utilization")
    shared = recommend("gpu-memory-creep", replace(facts, other_processes_bytes=8 * GIB))
    assert change(shared, "--gpu-memory-utilization").to == 0.82  # 0.92 less a tenth
    roomy = replace(facts, other_processes_bytes=8 * GIB, flags={"--gpu-memory-utilization": 0.8})
    assert "not needed" in refused(recommend("gpu-memory-creep", roomy), "--gpu-memory-utilization")


def test_sglang_has_metrics_only_when_asked() -> None:
    advice = recommend("metrics-unknown", target("sglang", "0.5.23"))
    assert [(c.flag, c.to) for c in advice.changes] == [("--enable-metrics", True)]


@pytest.mark.parametrize(("version", "before"), [("0.12.0", "0.11"), ("0.14.1", "0.13")])
def test_hidden_names_come_back_for_the_minor_before(version: str, before: str) -> None:
    shown = recommend("metrics-unknown", target(version=version, coverage=COVERAGE))
    assert change(shown, SHOW).to == before
    assert shown.summary.startswith("Not read: kv_usage_ratio. ")
    assert "kv_block_idle_before_evict_seconds: needs --kv-cache-metrics" in shown.steps
    none = recommend("metrics-unknown", target(version=version, coverage={"rows": COVERAGE["rows"][1:]}))
    assert "none of what they need is hidden" in refused(none, SHOW)
    assert "attach it again" in " ".join(recommend("metrics-unknown", target()).missing)


def test_the_report_of_an_attached_target_is_read() -> None:
    report = coverage(load_dialect("vllm"), {"vllm:num_requests_running"}, "0.33.0").to_dict()
    unread = target(coverage=report).unread
    assert unread is not None
    assert {m.name for m in unread if m.required} == {"requests_waiting", "kv_usage_ratio", "requests_finished_total"}


def test_statistics_are_switched_on_again_and_a_newer_engine_is_named() -> None:
    off = recommend("metrics-unknown", target(flags={"--disable-log-stats": True}))
    assert [(c.flag, c.to) for c in off.changes] == [("--disable-log-stats", None)]
    newer = recommend("metrics-unknown", target(version="0.40.0"))
    assert any("Upgrade kvoncall" in step for step in newer.steps)


def test_an_engine_without_known_flags_gets_steps_in_words() -> None:
    for rule in ("eviction-storm", "preemption-livelock", "cache-thrash", "kv-saturated", "prefix-hit-collapse"):
        advice = recommend(rule, target("tensorrt-llm", "1.3.0"))
        assert advice.changes == ()
        assert advice.steps
        assert not any(r.flag.startswith("--") and "catalog" in r.reason for r in advice.refused)
