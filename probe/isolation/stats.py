"""The statistics a verdict rests on: a rank test with its effect size, and bounds that say what silence means.

Sources: Mann and Whitney (1947) with midranks for ties; Hanley and McNeil (1982), Radiology 143, 29-36, for the
standard error of an AUC; Clopper and Pearson (1934) for the bound of a share. Pure Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

EXACT_UP_TO = 40  # observations of both samples together; beyond, the normal approximation is close
Z_95 = 1.959964
P_VALUE = 0.001  # a difference in times is shown below this
LOUD = 0.6  # an AUC below this is of no use to an attacker, however certain it is
QUIET = 0.65  # an AUC that is surely below this is called no leak: see `is_quiet`


def rank_test(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(AUC, two-sided p) of "xs tend to be larger than ys".

    AUC is the share of pairs in which x > y, ties counting half: 0.5 says they cannot be told apart. p is exact given
    the ties for small samples (a permutation test of the rank sum), else normal, corrected for ties and continuity.
    Raises ValueError for an empty sample.
    """
    n, m = len(xs), len(ys)
    if not n or not m:
        raise ValueError("a rank test needs observations of both kinds")
    doubled = _doubled_ranks([*xs, *ys])  # midranks times two are whole
    rank_sum = sum(doubled[:n])
    auc = (rank_sum / 2 - n * (n + 1) / 2) / (n * m)
    if n + m <= EXACT_UP_TO:
        return auc, _exact_p(doubled, n, rank_sum)
    ties = sum(count**3 - count for count in Counter([*xs, *ys]).values())
    variance = n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return auc, 1.0
    distance = max(0.0, abs(auc - 0.5) * n * m - 0.5)
    return auc, math.erfc(distance / math.sqrt(2 * variance))


def auc_interval(auc: float, n: int, m: int) -> tuple[float, float]:
    """95 % interval of an AUC measured on n and m observations (Hanley and McNeil).

    At 0 and 1 their error is zero, which few observations do not warrant: the interval then reaches to where all
    pairs would still agree with 5 % chance among the fewer of the two.
    """
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    variance = (auc * (1 - auc) + (n - 1) * (q1 - auc * auc) + (m - 1) * (q2 - auc * auc)) / (n * m)
    half = Z_95 * math.sqrt(max(0.0, variance))
    if auc in (0.0, 1.0):
        half = upper_bound(0, min(n, m))
    return max(0.0, auc - half), min(1.0, auc + half)


def is_quiet(auc: float, n: int, m: int) -> bool:
    """Whether n and m observations rule out, at 95 %, an AUC of QUIET or more.

    An AUC below 0.5 is judged as 0.5: no cache makes hits slow, so it is luck, and luck must not count as evidence.
    """
    return auc_interval(max(auc, 0.5), n, m)[1] < QUIET


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a share of which `events` of `trials` were seen (Clopper and Pearson).

    With no event it is 1 - (1 - confidence) ** (1 / trials), about 3 / trials: what silence leaves possible.
    """
    if trials <= 0 or events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(60):  # halving 60 times exhausts a double
        middle = (low + high) / 2
        if _at_most(events, trials, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(events: int, trials: int, share: float) -> float:
    """P(X <= events) of a binomial, summed in logarithms so that many trials do not overflow."""
    log_yes, log_no = math.log(share), math.log1p(-share) if share < 1 else -math.inf
    total = 0.0
    for count in range(events + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        total += math.exp(ways + count * log_yes + (trials - count) * log_no)
    return min(1.0, total)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the midrank of each value, from 2 up."""
    first: dict[float, int] = {}
    for place, value in enumerate(sorted(values), start=1):
        first.setdefault(value, place)
    counts = Counter(values)
    return [2 * first[value] + counts[value] - 1 for value in values]


def _exact_p(doubled: Sequence[int], n: int, rank_sum: int) -> float:
    """Share of the ways to choose n ranks whose sum is at least as far from the middle as this one's."""
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(n))]  # by how many, then by sum
    for rank in doubled:
        for chosen in range(n, 0, -1):
            for total, count in ways[chosen - 1].items():
                ways[chosen][total + rank] += count
    middle = n * sum(doubled) / len(doubled)
    far = abs(rank_sum - middle)
    as_far = sum(count for total, count in ways[n].items() if abs(total - middle) >= far - 1e-9)
    return as_far / math.comb(len(doubled), n)
