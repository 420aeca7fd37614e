"""Which KV cache format the quality runbook advises: by measurement, and without one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.config import MIB, EngineConfig, ModelDims, apply_changes
from engine.memory import kv_bytes_per_token, plan_kv_cache
from runbooks.changes import Recommendation, refusal_reason
from runbooks.recommend import FlagChange, TargetFacts, from_facts, recommend

DIMS = ModelDims("LlamaForCausalLM", 4, 4, 2, 32, 128, 256, 936, 2048, "float32")
INCIDENT = ["--kv-cache-dtype", "int4_symmetric", "--device-memory", "128MiB", "--max-num-seqs", "16"]
DTYPE = "--kv-cache-dtype"
LAYERS = "--kv-cache-dtype-layers"


def embedded(args: list[str], **more: Any) -> TargetFacts:
    """What the embedded engine tells of itself with these flags."""
    config = EngineConfig.from_args(args)
    plan = plan_kv_cache(config, DIMS, weights_bytes=3 * MIB, activation_peak_bytes=20 * MIB)
    told = {
        "engine": "kvoncall",
        "flags": config.flag_values(),
        "dims": vars(DIMS).copy(),
        "memory_plan": plan.to_dict(),
    }
    return from_facts({**told, **more})


def vllm(version: str | None, dtype: str, **more: Any) -> TargetFacts:
    labels = {"block_size": "16", "num_gpu_blocks": "1001", "cache_dtype": dtype, "kv_cache_size_tokens": "16000"}
    return from_facts({"engine": "vllm", "version": version, "cache_config_info": labels, **more})


def measured(name: str, drop: float, low: float, high: float, **more: Any) -> dict[str, Any]:
    """A candidate with the real bytes of its format."""
    entry = {
        "name": name,
        "flags": {DTYPE: name},
        "kv_bytes_per_token": kv_bytes_per_token(DIMS, name),
        "items": 320,
        "accuracy": 0.97 - drop,
        "drop": drop,
        "low": low,
        "high": high,
        "mean_kl": 0.01,
        "full_precision": False,
    }
    return {**entry, **more}


FULL = measured("float16", 0.0, 0.0, 0.0, full_precision=True)
KIVI = measured("int4_kivi", 0.003, -0.006, 0.012)
INT8 = measured("int8_per_token_head", 0.0, -0.006, 0.006)
ROTATED = measured("int4_per_token_head", 0.05, 0.02, 0.08)
NAIVE = measured("int4_symmetric", 0.588, 0.53, 0.64)
ALL = [FULL, KIVI, INT8, ROTATED, NAIVE]


def advise(facts: TargetFacts) -> Recommendation:
    return recommend("kv-quality-drop", facts)


def only(advice: Recommendation) -> FlagChange:
    (change,) = advice.changes
    return change


def reasons(advice: Recommendation) -> dict[str, str]:
    """Refusals by the name of the candidate they are about."""
    return {r.reason.partition(":")[0]: r.reason for r in advice.refused}


def test_the_fewest_bytes_among_those_that_hold() -> None:
    advice = advise(embedded(INCIDENT, quality_candidates=ALL))
    change = only(advice)
    assert (change.flag, change.from_, change.to) == (DTYPE, "int4_symmetric", "int4_kivi")
    assert advice.flag_values() == {DTYPE: "int4_kivi"}
    assert "int4_kivi falls 0.3 points to 96.7% (95% interval -0.6 to 1.2, 320 questions)" in change.why
    assert "int4_symmetric, which runs, falls 58.8 points to 38.2%" in change.why
    assert f"{KIVI['kv_bytes_per_token']} per token, 34% of the 1024 of full precision" in change.why
    assert f"{KIVI['kv_bytes_per_token']} bytes per token in place of {NAIVE['kv_bytes_per_token']}" in change.cost
    assert "kvoncall quality" in change.verify
    assert advice.missing == ()


def test_every_other_candidate_is_refused_with_what_was_measured() -> None:
    found = reasons(advise(embedded(INCIDENT, quality_candidates=ALL)))
    assert found.keys() == {"float16", "int8_per_token_head", "int4_per_token_head", "int4_symmetric"}
    assert "but takes 2.9x the bytes (1024 per token, int4_kivi 352)" in found["float16"]
    assert "holds: falls 0.0 points" in found["int8_per_token_head"]
    assert "falls 5.0 points to 92.0% (95% interval 2.0 to 8.0, 320 questions)" in found["int4_per_token_head"]
    assert "it runs now" in found["int4_symmetric"]


@pytest.mark.parametrize(
    ("drop", "low", "high", "holds"),
    [
        (0.0, -0.01, 0.01, True),
        (-0.02, -0.04, 0.0, True),
        (0.01, -0.002, 0.022, True),
        (0.011, -0.002, 0.024, False),  # more than a point
        (0.008, 0.001, 0.015, False),  # less than a point, but beyond doubt
    ],
)
def test_what_holds_quality(drop: float, low: float, high: float, holds: bool) -> None:
    cheap = measured("int4_kivi", drop, low, high)
    change = only(advise(embedded(INCIDENT, quality_candidates=[FULL, cheap, NAIVE])))
    assert change.to == ("int4_kivi" if holds else "float16")


def test_a_rise_is_told_as_one() -> None:
    cheap = measured("int4_kivi", -0.02, -0.04, 0.0)
    assert (
        "int4_kivi rises 2.0 points to 99.0% (95% interval 0.0 to 4.0"
        in only(advise(embedded(INCIDENT, quality_candidates=[FULL, cheap, NAIVE]))).why
    )


@pytest.mark.parametrize("candidate", [FULL, KIVI, INT8], ids=lambda c: c["name"])
def test_the_pool_that_is_promised_is_the_one_the_engine_plans(candidate: dict[str, Any]) -> None:
    facts = embedded(INCIDENT, quality_candidates=[candidate, NAIVE])
    advice = advise(facts)
    promised = re.search(r"the pool holds (\d+) tokens in place of (\d+)", only(advice).cost)
    assert promised is not None
    then = embedded(apply_changes(INCIDENT, advice.flag_values()))
    assert int(promised[1]) == then.kv_cache_size_tokens
    assert int(promised[2]) == facts.kv_cache_size_tokens
    assert (then.kv_cache_size_tokens or 0) < (facts.kv_cache_size_tokens or 0)


def test_a_layer_map_is_one_change_beside_the_format() -> None:
    layers = measured("int4_kivi", 0.0, -0.01, 0.01, kv_bytes_per_token=496)
    layers["name"], layers["flags"] = "kivi 0:float16", {DTYPE: "int4_kivi", LAYERS: "0:float16"}
    advice = advise(embedded(INCIDENT, quality_candidates=[FULL, layers, NAIVE]))
    assert advice.flag_values() == {DTYPE: "int4_kivi", LAYERS: "0:float16"}
    assert all("496 per token" in c.why for c in advice.changes)
    apply_changes(INCIDENT, advice.flag_values())


def test_a_layer_map_in_force_is_no_part_of_a_candidate_that_does_not_name_it() -> None:
    facts = embedded([*INCIDENT, LAYERS, "0:float16"], quality_candidates=ALL)
    advice = advise(facts)
    assert advice.flag_values() == {DTYPE: "int4_kivi", LAYERS: None}
    assert "which runs" not in advice.changes[0].why


def test_the_format_that_runs_and_holds_is_left_alone() -> None:
    advice = advise(embedded(apply_changes(INCIDENT, {DTYPE: "int4_kivi"}), quality_candidates=ALL))
    assert advice.changes == ()
    assert "int4_kivi runs and holds quality as measured" in advice.summary


def test_nothing_measured_holds() -> None:
    advice = advise(embedded(INCIDENT, quality_candidates=[ROTATED, NAIVE]))
    assert advice.changes == ()
    assert "None of the formats measured" in advice.summary
    assert any("kvoncall quality" in text for text in advice.missing)


def test_full_precision_needs_no_fall_and_half_a_measurement_counts_for_nothing() -> None:
    full = {**FULL, "drop": None, "low": None, "high": None}
    facts = embedded(INCIDENT, quality_candidates=[full, {**KIVI, "low": None}, {**INT8, "accuracy": None}, NAIVE])
    assert [c.name for c in facts.quality_candidates] == ["float16", "int4_symmetric"]
    assert only(advise(facts)).to == "float16"


def test_a_format_whose_pool_cannot_hold_one_request_is_refused() -> None:
    tight = apply_changes(INCIDENT, {"--kv-cache-memory-bytes": 2048 * 330})  # 2048 tokens of int4, not of float16
    found = advise(embedded(tight, quality_candidates=[FULL, NAIVE]))
    assert found.changes == ()
    assert "does not fit: a request of --max-model-len 2048" in reasons(found)["float16"]


def test_the_storm_that_would_follow_is_told() -> None:
    busy = {"peak_running": 16, "peak_waiting": 4, "tokens_per_request_peak": 2048}
    small = apply_changes(INCIDENT, {"--kv-cache-memory-bytes": "10.1MiB"})
    facts = embedded(small, quality_candidates=ALL, traffic=busy)
    pool = embedded(apply_changes(small, {DTYPE: "int4_kivi"})).kv_cache_size_tokens or 0
    assert pool < 16 * 2048 < (facts.kv_cache_size_tokens or 0)
    cost = only(advise(facts)).cost
    assert f"wanted {16 * 2048} tokens at once" in cost
    assert f"expect `eviction-storm` unless --max-num-seqs goes to {pool // 2048}" in cost
    assert "eviction-storm" not in only(advise(embedded(small, quality_candidates=ALL))).cost


# vLLM: only values and flags of its version.


def test_values_a_vllm_version_does_not_have_are_refused() -> None:
    fp8 = measured("fp8", 0.002, -0.01, 0.014)
    advice = advise(vllm("0.19.1", "nvfp4", quality_candidates=[fp8, INT8, KIVI]))
    assert only(advice).to == "fp8"
    found = reasons(advice)
    assert "int8_per_token_head exists since vllm 0.20.0; this target runs 0.19.1" in found["int8_per_token_head"]
    assert "int4_kivi is in no release of vllm" in found["int4_kivi"]
    assert only(advise(vllm(None, "nvfp4", quality_candidates=[INT8]))).cost.endswith(
        "version unknown: the value int8_per_token_head exists since vllm 0.20.0"
    )


def test_a_pool_of_the_same_bytes_holds_tokens_by_their_size() -> None:
    facts = vllm("0.32.0", "int4_per_token_head", quality_candidates=[INT8, ROTATED], kv_bytes_per_token=320)
    cost = only(advise(facts)).cost
    tokens = 16000 * 320 // INT8["kv_bytes_per_token"]
    assert f"the pool holds {tokens - tokens % 16} tokens in place of 16000" in cost


def test_a_number_of_blocks_set_by_hand_keeps_tokens_and_grows_in_bytes() -> None:
    facts = vllm("0.32.0", "int4_per_token_head", quality_candidates=[INT8, ROTATED], kv_bytes_per_token=320)
    facts = replace(facts, flags={**facts.flags, "--num-gpu-blocks-override": 1001})
    cost = only(advise(facts)).cost
    assert "the pool holds 16000 tokens in place of 16000" in cost
    assert f"the pool takes {16000 * INT8['kv_bytes_per_token'] / MIB:.1f} MiB" in cost


# Without a measurement.


def test_without_a_measurement_full_precision_is_advised_and_how_to_measure() -> None:
    advice = advise(embedded(INCIDENT))
    change = only(advice)
    assert (change.flag, change.to) == (DTYPE, "auto")
    assert "2048 bytes per token in place of 320" in change.cost
    assert any("kvoncall quality" in text for text in advice.missing)
    assert "not measured" in advice.summary
    alternatives = {r.flag: (r.to, r.reason) for r in advice.refused}
    assert alternatives[DTYPE][0] == "int8_per_token_head"
    assert "not measured on this model" in alternatives[DTYPE][1]
    assert "not by rule" in alternatives["--kv-cache-dtype-skip-layers"][1]


def test_eight_bits_where_the_pool_of_full_precision_would_not_carry_the_load() -> None:
    busy = {"peak_running": 16, "peak_waiting": 0, "tokens_per_request_peak": 2048}
    small = apply_changes(INCIDENT, {"--kv-cache-memory-bytes": "20MiB"})
    advice = advise(embedded(small, traffic=busy))
    assert only(advice).to == "int8_per_token_head"
    assert "not measured" in only(advice).why
    assert any(r.to == "auto" and "pool would be too small" in r.reason for r in advice.refused)


@pytest.mark.parametrize(
    ("version", "dtype", "alternatives"),
    [
        ("0.19.1", "fp8", {"--calculate-kv-scales"}),  # no int8 yet
        ("0.27.1", "fp8_e4m3", {"--calculate-kv-scales", DTYPE}),
        ("0.33.0", "fp8", {DTYPE}),  # the scales' flag is gone
        ("0.33.0", "int8_per_token_head", set()),
        ("0.33.0", "nvfp4", {DTYPE}),
    ],
)
def test_alternatives_are_those_of_the_version(version: str, dtype: str, alternatives: set[str]) -> None:
    advice = advise(vllm(version, dtype))
    assert only(advice).to == "auto"
    assert {r.flag for r in advice.refused} == {*alternatives, "--kv-cache-dtype-skip-layers"}
    assert any("dimensions" in text for text in advice.missing)


def test_skip_layers_do_not_exist_before_their_version() -> None:
    reason = next(r.reason for r in advise(vllm("0.18.0", "fp8")).refused if r.flag == "--kv-cache-dtype-skip-layers")
    assert "exists since vllm 0.19.0" in reason


def test_an_unquantized_cache_is_not_the_cause() -> None:
    advice = advise(vllm("0.33.0", "auto"))
    assert advice.changes == ()
    assert "look for another cause" in advice.summary
    assert advise(TargetFacts("vllm")).changes == ()


def test_a_layer_map_beside_auto_is_removed() -> None:
    facts = embedded([DTYPE, "auto", LAYERS, "0-3:int4_symmetric", "--device-memory", "128MiB"])
    assert advise(facts).flag_values() == {LAYERS: None}


def test_commands_that_are_named_exist() -> None:
    from probe.cli import parser

    advice = advise(embedded(INCIDENT))
    named = re.findall(r"`kvoncall (quality [^`]*)`", " ".join(advice.missing))
    verify = only(advice).verify.removeprefix("kvoncall ")
    assert named
    for command in (*named, verify, "quality --target URL --canary"):
        name, *args = command.split()
        assert name == "quality"
        parser(name).parse_args(args)


# An operator's own idea.


@pytest.mark.parametrize(
    ("now", "to", "word"),
    [
        ("int4_kivi", "int4_symmetric", "outlier key channels"),
        ("int8_per_token_head", "int4_kivi", "keys get 4 bits in place of 8"),
        ("fp8_e4m3", "int8k_int4v", "values get 4 bits in place of 8"),
        ("int8_per_token_head", "int5", "takes no int5"),
    ],
)
def test_wrong_ways(now: str, to: str, word: str) -> None:
    facts = embedded([DTYPE, now, "--device-memory", "128MiB"])
    assert word in (refusal_reason("kv-quality-drop", facts, DTYPE, to) or "")


def test_right_ways_and_what_was_measured_pass_the_gate() -> None:
    facts = embedded([DTYPE, "fp8_e4m3", "--device-memory", "128MiB"])
    assert refusal_reason("kv-quality-drop", facts, DTYPE, "int8_per_token_head") is None
    assert refusal_reason("kv-quality-drop", facts, DTYPE, "auto") is None
    assert refusal_reason("kv-quality-drop", facts, DTYPE, "int4_kivi") is not None
    facts = embedded([DTYPE, "fp8_e4m3", "--device-memory", "128MiB"], quality_candidates=[KIVI])
    assert refusal_reason("kv-quality-drop", facts, DTYPE, "int4_kivi") is None


def test_vllm_labels_of_the_format_are_read() -> None:
    labels = {"block_size": "16", "num_gpu_blocks": "10", "cache_dtype": "fp8", "calculate_kv_scales": "False"}
    flags = from_facts({"cache_config_info": {**labels, "kv_cache_dtype_skip_layers": "['0', '3']"}}).flags
    assert flags["--kv-cache-dtype-skip-layers"] == "0 3"
    assert flags["--calculate-kv-scales"] is False
    assert (
        from_facts({"cache_config_info": {**labels, "kv_cache_dtype_skip_layers": "[]"}}).flags[
            "--kv-cache-dtype-skip-layers"
        ]
        is None
    )
