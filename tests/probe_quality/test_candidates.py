"""Candidates: what they take from a run, the front, and which layers a mix keeps."""

from __future__ import annotations

from typing import Any

import pytest

from probe.quality.candidates import Candidate, candidate, format_arms, layer_arms, mixed_arms, with_front
from probe.store import QualityRun


def run(result: dict[str, Any], facts: dict[str, Any]) -> QualityRun:
    return QualityRun(
        "r1", "lab", "arm", "testbed", {}, "key", facts, None, "done", result, None, 1.0, 2.0
    )  # fmt: skip


def made(name: str, bytes_: int, accuracy: float) -> Candidate:
    return Candidate(name, {}, bytes_, 100, accuracy, accuracy, accuracy, 0.0, 0.0, 0.0, None, None, False, "r")


def front(*found: Candidate) -> list[str]:
    return [c.name for c in with_front(found) if c.on_front]


def test_a_candidate_is_what_its_run_measured() -> None:
    result = {
        "overall": {"items": 240, "right": 228, "invalid": 1, "accuracy": 0.95, "low": 0.91, "high": 0.97},
        "likelihood": {"mean_kl": 0.02, "top1_agreement": 0.97},
        "against": {"drop": 0.04, "low": 0.01, "high": 0.08},
    }
    found = candidate("int4_kivi", {"--kv-cache-dtype": "int4_kivi"}, run(result, {"kv_bytes_per_token": 352}))
    assert (found.items, found.accuracy, found.accuracy_low) == (240, 0.95, 0.91)
    assert (found.drop, found.low, found.high) == (0.04, 0.01, 0.08)
    assert (found.mean_kl, found.top1_agreement, found.kv_bytes_per_token) == (0.02, 0.97, 352)
    assert found.to_dict()["flags"] == {"--kv-cache-dtype": "int4_kivi"}


def test_full_precision_loses_nothing_to_itself() -> None:
    overall = {"items": 10, "right": 10, "invalid": 0, "accuracy": 1.0, "low": 0.7, "high": 1.0}
    result = {"overall": overall, "likelihood": None, "against": None}
    found = candidate("float16", {}, run(result, {"kv_bytes_per_token": 1024}), full_precision=True)
    assert (found.drop, found.mean_kl, found.top1_agreement) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ((made("a", 10, 0.5), made("b", 20, 0.9), made("c", 30, 0.8)), ["a", "b"]),
        ((made("dear", 30, 0.9), made("cheap", 10, 0.9)), ["cheap"]),
        ((made("worse", 10, 0.5), made("better", 10, 0.6)), ["better"]),
        ((), []),
    ],
)
def test_the_front_holds_whatever_nothing_cheaper_matches(found: tuple[Candidate, ...], names: list[str]) -> None:
    assert front(*found) == names


def test_candidates_come_by_their_bytes() -> None:
    assert [c.name for c in with_front([made("b", 20, 0.1), made("a", 10, 0.2)])] == ["a", "b"]


def test_an_arm_for_a_format_clears_an_earlier_map_of_layers() -> None:
    (arm,) = format_arms(["fp8_e4m3"])
    assert arm.flags == {"--kv-cache-dtype": "fp8_e4m3", "--kv-cache-dtype-layers": None}


def test_each_layer_is_quantized_alone() -> None:
    arms = layer_arms("int4_symmetric", "float16", 3)
    assert [arm.flags["--kv-cache-dtype-layers"] for arm in arms] == [f"{n}:int4_symmetric" for n in range(3)]
    assert {arm.flags["--kv-cache-dtype"] for arm in arms} == {"float16"}


def test_mixes_keep_the_layers_that_were_measured_to_suffer_most() -> None:
    layers = [{"layer": n, "mean_kl": kl} for n, kl in enumerate((0.1, 0.4, 0.05, 0.2))]
    one, two = mixed_arms("int4_symmetric", "float16", layers)
    assert one.flags == {"--kv-cache-dtype": "int4_symmetric", "--kv-cache-dtype-layers": "1:float16"}
    assert two.flags["--kv-cache-dtype-layers"] == "1:float16,3:float16"
    assert two.name == "int4_symmetric, float16 in layers 1 and 3"


def test_a_mix_never_keeps_every_layer() -> None:
    layers = [{"layer": 0, "mean_kl": 1.0}, {"layer": 1, "mean_kl": 0.5}]
    assert [arm.flags["--kv-cache-dtype-layers"] for arm in mixed_arms("int4_symmetric", "float16", layers)] == [
        "0:float16"
    ]
    assert mixed_arms("int4_symmetric", "float16", layers[:1]) == []
