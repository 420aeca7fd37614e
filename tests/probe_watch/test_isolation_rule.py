"""The isolation rule: breaches the engine counted, leaks a probe has shown, and what ends the alert."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from probe.alerts.evaluate import Outcome, View, evaluate
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.isolation import newest
from probe.alerts.rule import BreachSignal, scaled
from probe.alerts.rules import DEFAULT_RULES, PREFIX_ISOLATION_BREACH
from probe.alerts.window import Window
from probe.store import Sample, Target

T0 = 1_800_000_000.0
TARGET = Target(1, "t", "http://h:1", "external", "vllm", [], {}, 1.0, 1.0, True, T0 - 9_000)
DAY = 86_400.0
RULE = "prefix-isolation-breach"


def counter(at: float, value: float, kind: str = "namespace") -> Sample:
    return Sample("t", "isolation_breaches_total", {"kind": kind}, T0 + at, value)


def up(at: float, value: float = 1.0) -> Sample:
    return Sample("t", "up", {}, T0 + at, value)


def probe(at: float, probes: int, leaks: int, check: str = "leak-canary") -> list[Sample]:
    names = {"isolation_probes": probes, "isolation_leaks": leaks}
    return [Sample("t", name, {"check": check}, T0 + at, float(value)) for name, value in names.items()]


def read(samples: Iterable[Sample], now: float = 1_000.0) -> Outcome:
    window = Window(dict.fromkeys(PREFIX_ISOLATION_BREACH.metrics, 10 * DAY))
    window.add(sorted(samples, key=lambda s: s.ts))
    return evaluate(PREFIX_ISOLATION_BREACH, View(TARGET, window, [], T0 + now))


def test_one_hit_on_anothers_block_is_a_breach_and_says_whose() -> None:
    outcome = read([up(998), counter(998, 3), counter(999, 4), counter(1_000, 4), counter(1_000, 0, "adapter")])
    assert (outcome.verdict, outcome.value) == ("breach", 1.0)
    assert outcome.summary == (
        "Prefix cache serves one customer's context to another: 1 block of another tenant or session served"
    )
    assert outcome.coverage == "1 of 1 engine counting breaches, 600 s; no isolation probe ran in the last 24 h"


def test_kinds_add_up_over_engines_and_each_is_named() -> None:
    kinds = ("namespace", "adapter", "image", "weights", "tokens")
    outcome = read([counter(at, at - 998 + i * (at - 998), k) for at in (998, 1_000) for i, k in enumerate(kinds)])
    assert outcome.value == 2 + 4 + 6 + 8 + 10
    for words in (
        "2 blocks of another tenant or session served",
        "4 blocks of another adapter served",
        "6 blocks of another image served",
        "8 blocks of other weights served",
        "10 blocks of another text served",
    ):
        assert words in outcome.summary


def test_a_counter_that_does_not_grow_is_an_old_breach() -> None:
    outcome = read([up(300), *(counter(at, 12) for at in range(300, 1_001, 100))])
    assert (outcome.verdict, outcome.value) == ("ok", 0.0)


def test_an_increase_counts_as_long_as_it_is_in_the_window() -> None:
    grown = [counter(at, 0 if at < 400 else 5) for at in range(2_000)]
    assert read(grown[:1_000], now=999).verdict == "breach"  # 399 to 400 is inside
    assert read(grown[:1_001], now=1_000).verdict == "ok"


def test_a_series_that_begins_with_its_first_breach_has_grown_from_zero() -> None:
    assert read([up(990), up(1_000), counter(1_000, 12)]).value == 12.0
    # Found at the first scrape of all: nobody knows when it happened.
    assert read([up(1_000), counter(1_000, 12)]).verdict == "ok"
    assert read([up(990, 0.0), up(1_000), counter(1_000, 12)]).verdict == "ok"
    # Out of the window it is over.
    assert read([up(at) for at in range(1_000)] + [counter(at, 12) for at in range(300, 1_000)], now=999).value == 0.0


def test_a_new_process_counts_from_zero() -> None:
    assert read([up(996), counter(996, 7), counter(998, 7), counter(999, 2), counter(1_000, 2)]).value == 2.0


def test_a_leak_shown_by_the_probe_is_a_breach_without_any_counter() -> None:
    outcome = read(probe(400, 40, 3))
    assert (outcome.verdict, outcome.value, outcome.numerator, outcome.denominator) == ("breach", 3.0, 3.0, 40)
    assert outcome.summary.endswith(": 3 answers with another session's text in 40 probes")
    assert outcome.coverage == (
        "no data: isolation_breaches_total was never read; isolation probe 600 s ago: 40 probes (leak-canary)"
    )


@pytest.mark.parametrize(
    ("check", "leaks", "words"),
    [
        ("leak-canary", 1, "1 answer with another session's text in 40 probes"),
        ("side-channel-tokens", 1, "cached_tokens tells what another tenant has cached (40 probes)"),
        ("side-channel-ttft", 1, "time to first token tells what another tenant has cached (40 probes)"),
        ("cache-salt", 4, "cache_salt not honoured 4 of 40 times"),
        ("other", 2, "other: 2 leaks in 40 probes"),
    ],
)
def test_every_check_says_what_it_saw(check: str, leaks: int, words: str) -> None:
    outcome = read(probe(999, 40, leaks, check))
    assert outcome.verdict == "breach"
    assert words in outcome.summary


def test_a_clean_round_replaces_a_leaking_one() -> None:
    outcome = read([*probe(400, 40, 3), *probe(900, 40, 0)])
    assert (outcome.verdict, outcome.value, outcome.denominator) == ("ok", 0.0, 40)


def test_a_clean_round_of_one_check_does_not_clear_another() -> None:
    outcome = read([*probe(400, 40, 3), *probe(900, 20, 0, "cache-salt")])
    assert (outcome.verdict, outcome.value, outcome.denominator) == ("breach", 3.0, 60)
    assert outcome.coverage.endswith("isolation probe 100 s ago: 60 probes (cache-salt, leak-canary)")


def test_a_check_that_did_not_run_says_nothing() -> None:
    assert read([*probe(400, 40, 3), *probe(900, 0, 0)]).verdict == "breach"
    assert read(probe(900, 0, 0)).verdict == "no_data"


def test_a_round_is_whole_or_not_there() -> None:
    window = Window(dict.fromkeys(PREFIX_ISOLATION_BREACH.metrics, DAY))
    window.add([*probe(100, 40, 3), *probe(200, 40, 0)[:1]])
    assert isinstance(PREFIX_ISOLATION_BREACH.signal, BreachSignal)
    assert [(r.ts, r.leaks) for r in newest(window, PREFIX_ISOLATION_BREACH.signal, T0)] == [(T0 + 100, 3)]


def test_a_leak_outlives_the_window_and_does_not_go_stale() -> None:
    """Time does not mend it: a side channel moves no counter, and would else be over after ten minutes."""
    old = [*probe(0, 40, 1, "side-channel-ttft"), *(counter(at, 0) for at in (DAY - 3, DAY - 2, DAY - 1))]
    assert read(old, now=DAY - 1).verdict == "breach"
    assert read(old, now=DAY + 1).verdict == "ok"  # forgotten after a day, and the engine counts nothing
    assert read(probe(0, 40, 1), now=DAY + 1).verdict == "no_data"


def test_neither_counter_nor_round_is_no_data() -> None:
    outcome = read([up(1_000)])
    assert (outcome.verdict, outcome.value) == ("no_data", None)
    assert outcome.coverage == (
        "no data: isolation_breaches_total was never read; no isolation probe ran in the last 24 h"
    )


def test_an_engine_that_is_gone_keeps_what_it_counted_but_proves_nothing_more() -> None:
    counted = [counter(at, at - 700) for at in range(700, 720)]
    assert read(counted).verdict == "breach"
    assert read([*counted, *probe(900, 40, 0)]).verdict == "breach"
    assert read([counter(at, 0) for at in range(700, 720)]).verdict == "no_data"


def test_a_drill_shrinks_the_window_and_not_the_memory_of_rounds() -> None:
    drill = dataclasses.replace(TARGET, time_scale=0.01, scrape_interval_s=0.5)
    rule = scaled(PREFIX_ISOLATION_BREACH, drill)
    assert (rule.window_s, rule.hold_s, rule.keep_firing_s, rule.rounds_s) == (6.0, 0.0, 0.0, DAY)
    horizons = TargetEvaluator(drill, DEFAULT_RULES).window.horizons_s
    assert horizons["isolation_leaks"] == horizons["isolation_probes"] == DAY
    assert horizons["isolation_breaches_total"] == horizons["up"] < 60


def states(evaluator: TargetEvaluator, now: float) -> dict[str, str]:
    return {u.reading.rule: u.reading.state for u in evaluator.evaluate(T0 + now)}


def test_life_of_the_alert_fires_at_once_and_ends_with_the_window() -> None:
    evaluator = TargetEvaluator(TARGET, DEFAULT_RULES)
    seen = []
    for at in range(700):
        evaluator.add_samples([up(at), counter(at, 0 if at < 50 else 1)])
        now = states(evaluator, at)
        seen.append(now.pop(RULE))
        assert set(now.values()) == {"inactive"}
    assert seen.index("firing") == 50
    assert seen[649:651] == ["firing", "resolved"]


def test_nothing_explains_it_and_it_explains_nothing() -> None:
    assert PREFIX_ISOLATION_BREACH.inhibited_by == ()
    assert not any(RULE in rule.inhibited_by for rule in DEFAULT_RULES)
    evaluator = TargetEvaluator(TARGET, DEFAULT_RULES)
    evaluator.add_samples([up(at, 0.0) for at in range(0, 200, 10)])
    evaluator.add_samples(probe(190, 40, 1))
    now = states(evaluator, 200)
    assert (now["target-missing"], now[RULE]) == ("pending", "firing")
