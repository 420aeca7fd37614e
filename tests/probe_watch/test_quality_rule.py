"""The quality rule: rounds of a canary, sustained falls, and what must not fire. Values computed by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import pytest

from probe.alerts.evaluate import Outcome, View, evaluate
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.quality import Round, rounds
from probe.alerts.rule import QualitySignal, scaled
from probe.alerts.rules import DEFAULT_RULES, KV_QUALITY_DROP
from probe.alerts.window import Window
from probe.store import Sample, Target

T0 = 1_800_000_000.0
TARGET = Target(1, "t", "http://h:1", "external", "vllm", [], {}, 1.0, 1.0, True, T0 - 9_000)

Counts = tuple[float, int, int, int, int]  # seconds after T0; items, lost, gained, invalid
GOOD = (120, 1, 0, 0)
BAD = (120, 71, 1, 2)


def samples(counts: Iterable[Counts], dtype: str = "int4_symmetric") -> list[Sample]:
    names = ("quality_items", "quality_lost", "quality_gained", "quality_invalid")
    return [
        Sample("t", name, {"dtype": dtype}, T0 + at, float(value))
        for at, *values in counts
        for name, value in zip(names, values, strict=True)
    ]


def signal() -> QualitySignal:
    assert isinstance(KV_QUALITY_DROP.signal, QualitySignal)
    return KV_QUALITY_DROP.signal


def read(*counts: Counts, now: float = 1_000.0) -> Outcome:
    window = Window({m: 10_000 for rule in DEFAULT_RULES for m in rule.metrics})
    window.add(samples(counts))
    return evaluate(KV_QUALITY_DROP, View(TARGET, window, [], T0 + now))


def test_fall_and_its_paired_interval_by_hand() -> None:
    seen = Round(T0, "int4_symmetric", 120, 71, 1, 6)
    half = 1.96 * math.sqrt(72 - 70 * 70 / 120) / 120
    assert seen.drop == 70 / 120
    assert seen.interval == pytest.approx((70 / 120 - half, 70 / 120 + half))
    assert seen.invalid_rate == 0.05
    assert Round(T0, "", 10, 10, 0, 0).interval == (1.0, 1.0)  # all lost: nothing left to vary
    assert Round(T0, "", 10, 0, 0, 0).interval == (0.0, 0.0)


def test_a_sustained_fall_is_a_breach_and_says_what_fell() -> None:
    outcome = read((100, *GOOD), (400, *BAD), (700, *BAD))
    assert (outcome.verdict, outcome.numerator, outcome.denominator) == ("breach", 70, 120)
    assert outcome.value == 70 / 120
    assert outcome.coverage == "3 rounds in 60 min, the last 300 s ago, 2 worse in a row"
    assert outcome.summary == (
        "Answers got worse than their baseline: accuracy -58.3 points (95% interval -67.5 to -49.2) on 120 questions, "
        "1.7% invalid answers, KV cache dtype int4_symmetric"
    )


def test_one_bad_round_does_not_fire() -> None:
    outcome = read((100, *GOOD), (400, *GOOD), (700, *BAD))
    assert (outcome.verdict, outcome.value) == ("below_floor", 70 / 120)
    assert "1 of 2 rounds in a row" in outcome.coverage
    assert read((100, *BAD), (400, *GOOD), (700, *BAD)).verdict == "below_floor"


def test_a_single_round_that_is_bad_is_no_data_yet() -> None:
    outcome = read((700, *BAD))
    assert outcome.verdict == "no_data"
    assert outcome.coverage.startswith("1 round in 60 min")
    assert "1 of 2 rounds" in outcome.coverage
    assert read((700, *GOOD)).verdict == "ok"


def test_the_newest_good_round_ends_it() -> None:
    assert read((100, *BAD), (400, *BAD), (700, *GOOD)).verdict == "ok"


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((20, 4, 1, 0), "ok"),  # 15 points, but the interval reaches below zero: -5.6 to 35.6
        ((1_000, 50, 0, 0), "ok"),  # exactly 5 points: not above
        ((1_000, 51, 0, 0), "breach"),
        ((1_000, 20, 0, 0), "ok"),  # clear of zero, but a fall of 2 points
        ((1_000, 0, 90, 0), "ok"),  # better
        ((100, 0, 0, 5), "ok"),  # 5% invalid: not above
        ((100, 0, 0, 6), "breach"),
    ],
)
def test_what_makes_a_round_worse(counts: tuple[int, int, int, int], verdict: str) -> None:
    assert read((400, *counts), (700, *counts)).verdict == verdict


def test_without_a_canary_there_is_no_data_and_the_reason_is_plain() -> None:
    outcome = read()
    assert (outcome.verdict, outcome.value) == ("no_data", None)
    assert outcome.coverage == "no quality canary ran in the last 60 min"


def test_rounds_count_while_they_are_in_the_window_and_do_not_go_stale() -> None:
    assert read((400, *BAD), (700, *BAD), now=3_999).verdict == "breach"
    assert read((400, *BAD), (700, *BAD), now=4_001).verdict == "no_data"
    assert "1 of 2 rounds" in read((400, *BAD), (700, *BAD), now=4_001).coverage
    assert "no quality canary" in read((400, *BAD), (700, *BAD), now=4_301).coverage


def test_a_round_is_whole_or_not_there() -> None:
    window = Window(dict.fromkeys(KV_QUALITY_DROP.metrics, 10000))
    window.add([*samples([(100, *BAD)]), *samples([(200, *BAD)])[:-1], *samples([(300, 0, 0, 0, 0)])])
    assert [r.ts for r in rounds(window, signal(), T0)] == [T0 + 100]


def test_rounds_of_two_formats_are_one_history() -> None:
    window = Window(dict.fromkeys(KV_QUALITY_DROP.metrics, 10000))
    window.add(samples([(100, *GOOD), (700, *GOOD)], "float16"))
    window.add(samples([(300, *BAD), (500, *BAD)], "int4_symmetric"))
    assert [r.dtype for r in rounds(window, signal(), T0)] == ["float16", "int4_symmetric", "int4_symmetric", "float16"]
    view = View(TARGET, window, [], T0 + 600)
    assert evaluate(KV_QUALITY_DROP, view).verdict == "ok"  # the newest in the window is the good one


def test_a_drill_leaves_time_for_rounds() -> None:
    assert scaled(KV_QUALITY_DROP, dataclasses.replace(TARGET, time_scale=0.03)).window_s == 300.0
    assert scaled(KV_QUALITY_DROP, TARGET) == KV_QUALITY_DROP


def test_rounds_are_kept_longer_than_scrapes() -> None:
    horizons = TargetEvaluator(TARGET, DEFAULT_RULES).window.horizons_s
    assert horizons["quality_items"] == 3600.0
    assert horizons["up"] == 660.0  # the longest rule on events and its time to recover


def test_a_window_drops_each_metric_by_its_own_horizon() -> None:
    window = Window({"up": 10.0, "quality_items": 100.0})
    for at in (0.0, 50.0, 100.0):
        window.add([Sample("t", m, {}, T0 + at, at) for m in ("up", "quality_items", "other")])
    assert [ts - T0 for ts, _ in window.series("up")[0].points] == [100.0]
    assert [ts - T0 for ts, _ in window.series("quality_items")[0].points] == [0.0, 50.0, 100.0]
    assert window.series("other") == []


def states(evaluator: TargetEvaluator, now: float) -> dict[str, str]:
    return {u.reading.rule: u.reading.state for u in evaluator.evaluate(T0 + now)}


def test_life_of_the_alert_while_all_others_stay_quiet() -> None:
    evaluator = TargetEvaluator(TARGET, DEFAULT_RULES)
    seen: list[str] = []
    at = 0.0
    for counts in (GOOD, BAD, BAD, BAD, GOOD, BAD):
        for _ in range(60):  # a round a minute, a scrape a second
            at += 1.0
            evaluator.add_samples([Sample("t", "up", {}, T0 + at, 1.0)])
            if at % 60 == 0:
                evaluator.add_samples(samples([(at, *counts)]))
            now = states(evaluator, at)
        seen.append(now["kv-quality-drop"])
        assert {rule: state for rule, state in now.items() if rule != "kv-quality-drop"} == {
            rule.id: "inactive" for rule in DEFAULT_RULES if rule.id != "kv-quality-drop"
        }
    assert seen == ["inactive", "inactive", "firing", "firing", "resolved", "inactive"]


def test_a_firing_alert_is_frozen_when_the_canary_stops() -> None:
    evaluator = TargetEvaluator(TARGET, DEFAULT_RULES)
    evaluator.add_samples([*samples([(100, *BAD), (200, *BAD)]), Sample("t", "up", {}, T0 + 200, 1.0)])
    assert states(evaluator, 201)["kv-quality-drop"] == "firing"
    reading = next(u.reading for u in evaluator.evaluate(T0 + 9_000) if u.reading.rule == "kv-quality-drop")
    assert (reading.state, reading.verdict) == ("firing", "no_data")


def test_an_engine_that_is_down_explains_it() -> None:
    evaluator = TargetEvaluator(TARGET, DEFAULT_RULES)
    evaluator.add_samples([Sample("t", "up", {}, T0 + at, 0.0) for at in range(100, 200, 10)])
    evaluator.add_samples(samples([(100, *BAD), (190, *BAD)]))
    for at in range(200, 270, 2):
        firing = {u.reading.rule for u in evaluator.evaluate(T0 + at) if u.reading.state == "firing"}
    assert firing == {"target-missing", "kv-quality-drop"}  # both are alerts; who is told is another matter
    assert "target-missing" in KV_QUALITY_DROP.inhibited_by
