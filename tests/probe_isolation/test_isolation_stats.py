"""The statistics against published and exactly known values."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from probe.isolation.stats import EXACT_UP_TO, auc_interval, is_quiet, rank_test, upper_bound


def test_separated_samples_have_the_exact_p_of_their_size() -> None:
    assert rank_test([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx((1.0, 2 / 252))
    assert rank_test([1, 2, 3], [4, 5, 6]) == pytest.approx((0.0, 2 / 20))


def test_ties_count_half_and_keep_p_exact() -> None:
    xs, ys = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 5.0]
    values = [*xs, *ys]

    def share(chosen: tuple[int, ...]) -> float:
        rest = [values[i] for i in range(7) if i not in chosen]
        wins = sum((values[i] > y) + (values[i] == y) / 2 for i in chosen for y in rest)
        return wins / (len(chosen) * len(rest))

    seen = share((0, 1, 2, 3))
    ways = [share(chosen) for chosen in combinations(range(7), 4)]
    expected = sum(abs(way - 0.5) >= abs(seen - 0.5) - 1e-12 for way in ways) / len(ways)
    assert rank_test(xs, ys) == pytest.approx((seen, expected))


def test_the_normal_approximation_continues_the_exact_test() -> None:
    rng = random.Random(1)
    half = EXACT_UP_TO // 2
    xs, ys = [rng.gauss(0.6, 1) for _ in range(half)], [rng.gauss(0, 1) for _ in range(half)]
    exact = rank_test(xs, ys)[1]
    larger = rank_test([*xs, 0.3], [*ys, 0.31])[1]
    assert larger == pytest.approx(exact, rel=0.25)


@pytest.mark.parametrize("size", [8, 60])
def test_equal_samples_are_rarely_told_apart(size: int) -> None:
    rng = random.Random(size)
    draws = [rank_test([rng.random() for _ in range(size)], [rng.random() for _ in range(size)])[1] for _ in range(200)]
    assert sum(p < 0.05 for p in draws) <= 20  # 10 expected
    assert sum(p < 0.001 for p in draws) <= 2


def test_samples_that_are_all_ties_say_nothing() -> None:
    assert rank_test([0.0] * 5, [0.0] * 6) == (0.5, 1.0)
    assert rank_test([0.0] * 50, [0.0] * 60) == (0.5, 1.0)
    with pytest.raises(ValueError, match="both kinds"):
        rank_test([], [1.0])


def test_the_auc_interval_is_hanley_and_mcneils() -> None:
    low, high = auc_interval(0.893, 51, 58)  # their example: standard error 0.032
    assert (high - low) / 2 / 1.96 == pytest.approx(0.032, abs=0.001)
    low, high = auc_interval(0.5, 80, 80)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert auc_interval(1.0, 5, 5) == pytest.approx((0.05 ** (1 / 5), 1.0))


@pytest.mark.parametrize(
    ("events", "trials", "bound"),
    [
        (0, 40, 1 - 0.05 ** (1 / 40)),
        (0, 1000, 0.002991),
        (1, 10, 0.394163),
        (3, 100, 0.075711),
        (7, 7, 1.0),
        (0, 0, 1.0),
    ],
)
def test_the_bound_is_clopper_and_pearsons(events: int, trials: int, bound: float) -> None:
    assert upper_bound(events, trials) == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize(
    ("auc", "size", "quiet"),
    [(0.5, 80, True), (0.5, 25, False), (0.6, 80, False), (0.6, 2000, True), (0.0, 5, False), (0.3, 20, False)],
)
def test_silence_takes_enough_observations_and_no_luck(auc: float, size: int, quiet: bool) -> None:
    assert is_quiet(auc, size, size) is quiet
