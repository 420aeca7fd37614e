"""Figures from items: Wilson and Newcombe against published values, verdicts, lower bounds of KL."""

from __future__ import annotations

import math
import random

import pytest

from probe.quality.likelihood import Token, kl, likelihood, window_data
from probe.quality.score import cell, paired, summarize
from probe.store import QualityItem


def pairs(both: int, lost: int, gained: int, neither: int) -> list[tuple[bool, bool]]:
    table = ((True, True, both), (True, False, lost), (False, True, gained), (False, False, neither))
    return [(before, after) for before, after, count in table for _ in range(count)]


@pytest.mark.parametrize(
    ("table", "drop", "low", "high"),
    [  # 36, 12, 2, 0 is Newcombe's own example; margins of 0 leave twice Wilson's arm
        ((36, 12, 2, 0), 0.2, 0.0569, 0.3404),
        ((1, 1, 7, 12), -6 / 21, -0.5069, -0.0256),
        ((0, 0, 0, 30), 0.0, -0.1135, 0.1135),
        ((54, 0, 0, 0), 0.0, -0.0664, 0.0664),
    ],
)
def test_the_interval_of_a_paired_difference_is_newcombes(
    table: tuple[int, int, int, int], drop: float, low: float, high: float
) -> None:
    found = paired(pairs(*table))
    assert found["drop"] == pytest.approx(drop)
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    rng = random.Random(1)
    for kept, lost, gained in ((0.9, 0.08, 0.01), (0.5, 0.3, 0.1), (0.97, 0.01, 0.01)):
        weights = (kept, lost, gained, 1 - kept - lost - gained)
        outcomes = ((True, True), (True, False), (False, True), (False, False))
        found = [paired(rng.choices(outcomes, weights, k=120)) for _ in range(1500)]
        covered = sum(f["low"] <= lost - gained <= f["high"] for f in found) / len(found)
        assert 0.93 < covered <= 1


@pytest.mark.parametrize(
    ("table", "verdict"),
    [
        ((100, 60, 0, 0), "worse"),
        ((318, 1, 1, 0), "no worse"),
        ((10, 0, 0, 0), "inconclusive"),  # too few to exclude a fall of 5 points
        ((10, 3, 1, 0), "inconclusive"),
        ((970, 30, 0, 0), "no worse"),  # a sure fall, but of 3 points
        ((10, 0, 100, 10), "no worse"),
        ((0, 0, 0, 0), "inconclusive"),
    ],
)
def test_verdicts(table: tuple[int, int, int, int], verdict: str) -> None:
    assert paired(pairs(*table))["verdict"] == verdict


def test_an_empty_cell_has_no_shares() -> None:
    assert cell([]) == {"items": 0, "right": 0, "invalid": 0, "accuracy": None, "low": None, "high": None}


def question(task: str, turn: int, right: bool, valid: bool = True) -> QualityItem:
    return QualityItem(f"{task}/1/{turn}", task, turn, right, valid, {})


def test_summary_by_task_and_turn() -> None:
    items = [question("add", 1, True), question("recall", 2, False, valid=False), question("add", 2, True)]
    before = [question("add", 1, True), question("recall", 2, True), question("recall", 9, False)]
    found = summarize(items, before, baseline_id="b", left_out=["why"])
    assert found["overall"] == cell(items)
    assert found["overall"]["invalid"] == 1
    assert found["tasks"]["add"]["accuracy"] == 1
    assert [(row["turn"], row["task"], row["items"]) for row in found["turns"]] == [
        (1, "all", 1), (1, "add", 1), (2, "all", 2), (2, "recall", 1), (2, "add", 1),
    ]  # fmt: skip
    assert found["likelihood"] is None
    assert found["left_out"] == ["why"]
    against = found["against"]
    assert (against["baseline_id"], against["items"], against["lost"], against["gained"]) == ("b", 2, 1, 0)
    assert against["tasks"]["recall"]["drop"] == 1
    assert summarize(items)["against"] is None


def top(probabilities: list[float], count: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(enumerate(probabilities), key=lambda pair: -pair[1])[:count]
    return tuple((token, math.log(p)) for token, p in ranked)


def test_kl_is_a_lower_bound_and_exact_when_all_is_told() -> None:
    rng = random.Random(0)
    for _ in range(200):
        p, q = ([rng.expovariate(1) ** 3 + 1e-2 for _ in range(30)] for _ in range(2))
        p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        told = [Token(0.0, top(p, count), None) for count in (30, 5)]
        after = [Token(0.0, top(q, count), None) for count in (30, 5)]
        assert kl(told[0], after[0]) == pytest.approx(exact, rel=1e-4, abs=1e-6)
        assert -1e-9 <= kl(told[1], after[1]) <= exact + 1e-6
    assert kl(told[1], told[1]) == pytest.approx(0, abs=1e-9)


def test_perplexity_counts_every_token_and_pairs_need_the_same_window() -> None:
    entry = {"5": {"logprob": -2.0, "rank": 2}, "7": {"logprob": -0.25, "rank": 1}}
    data = window_data([entry, entry], [5, 7], [1, 2])
    assert data["logprobs"] == [-2.0, -0.25]
    assert data["top"][0] == [[7, -0.25], [5, -2.0]]
    item = QualityItem("text/1", "text", None, None, None, data)
    alone = likelihood([item])
    assert alone is not None
    assert alone["perplexity"] == pytest.approx(math.exp(2.25 / 2))
    assert (alone["mean_kl"], alone["top1_agreement"]) == (None, None)
    both = likelihood([item], [item])
    assert both is not None
    assert both["mean_kl"] == pytest.approx(0)
    assert both["top1_agreement"] == 1
    assert [(row["turn"], row["tokens"]) for row in both["by_turn"]] == [(1, 1), (2, 1)]
    other = QualityItem("text/2", "text", None, None, None, data)
    unpaired = likelihood([item], [other])
    assert unpaired is not None
    assert unpaired["mean_kl"] is None
    assert likelihood([question("add", 1, True)]) is None
