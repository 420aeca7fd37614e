"""Each check over a cache that leaks, one that does not, and ones that let nothing be said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.testbed.tasks import split_tokens
from probe.isolation import canary, salt, side_channel
from probe.isolation.client import Caller, ProbeError
from probe.isolation.options import IsolationOptions, fitted_facts, fitted_prefix, plan_budget
from probe.isolation.result import CheckResult, conclude
from probe.isolation.round import Round
from probe.isolation.twins import make_twins

Rounds = Callable[..., Round]


def side(round_: Round) -> tuple[CheckResult, CheckResult]:
    tokens, ttft = asyncio.run(side_channel.run(round_))
    assert (tokens.check, ttft.check) == ("side-channel-tokens", "side-channel-ttft")
    return tokens, ttft


def the(results: list[CheckResult]) -> CheckResult:
    (result,) = results
    return result


# Side channel


def test_a_shared_cache_is_told_by_counts_and_times_after_a_few_pairs(make_round: Rounds) -> None:
    round_ = make_round()
    tokens, ttft = side(round_)
    assert (tokens.verdict, tokens.probes, tokens.leaks) == ("leak shown", 20, 20)
    assert tokens.effect == pytest.approx(tokens.data["warmed"][0])
    assert (ttft.verdict, ttft.leaks, ttft.upper_bound) == ("leak shown", 1, None)
    assert ttft.p_value is not None
    assert ttft.p_value < 0.001
    assert ttft.effect == 1.0
    asked: Any = round_.client
    callers = {caller.tenant for _, caller in asked.asked}
    assert len(callers) == 2
    assert asked.requests_sent == 1 + 3 * 20 + 5


def test_a_cache_by_session_is_told_by_neither(cache: Any, make_round: Rounds) -> None:
    cache.scope = "session"
    tokens, ttft = side(make_round())
    assert (tokens.verdict, tokens.leaks, tokens.data["own_hits"]) == ("no leak", 0, len(tokens.data["own"]))
    assert tokens.upper_bound == pytest.approx(1 - 0.05 ** (1 / tokens.probes))
    assert (ttft.verdict, ttft.leaks) == ("no leak", 0)
    assert ttft.interval is not None
    assert ttft.interval[1] < 0.65
    assert ttft.data["own_auc"] == 1.0
    assert "own repeat: AUC 1.00)" in ttft.sentence


def test_salts_of_their_own_keep_tenants_apart(make_round: Rounds) -> None:
    tokens, ttft = side(make_round(salted=True))
    assert (tokens.verdict, ttft.verdict) == ("no leak", "no leak")


@pytest.mark.parametrize(("by", "sent"), [("header", 2), ("user", 1), ("salt", 1), ("all", 3)])
def test_tenants_differ_by_what_was_asked_for(make_round: Rounds, by: str, sent: int) -> None:
    round_ = make_round(probes=5, tenants_by=by)
    side(round_)
    told = round_.callers
    assert set(told) == {"a", "b"}
    assert [len(ids) for ids in told.values()] == [sent, sent]
    assert not set(told["a"].values()) & set(told["b"].values())
    assert all(value.startswith(f"kvoncall-probe-{round_.name}-") for value in told["a"].values())


def test_no_prompt_is_warmed_twice(make_round: Rounds) -> None:
    rounds = [make_round(probes=5), make_round(probes=5)]
    for round_ in rounds:
        side(round_)
    clients: list[Any] = [round_.client for round_ in rounds]
    texts = [text for client in clients for text, _ in client.asked]
    assert len(set(texts)) == len(texts)


def test_without_counts_times_decide_alone(cache: Any, make_round: Rounds) -> None:
    cache.tells = False
    tokens, ttft = side(make_round())
    assert (tokens.verdict, tokens.probes, tokens.sentence) == (
        "not run",
        0,
        "the server does not tell cached_tokens",
    )
    assert ttft.verdict == "leak shown"


def test_noise_that_hides_the_channel_is_inconclusive_or_quiet_never_a_leak(cache: Any, make_round: Rounds) -> None:
    cache.tells, cache.noise_s = False, 100.0
    _, ttft = side(make_round(probes=10))
    assert (ttft.verdict, ttft.probes) == ("inconclusive", 20)  # twice: 10 pairs did not decide


def test_few_pairs_deny_nothing(cache: Any, make_round: Rounds) -> None:
    cache.scope = "session"
    tokens, ttft = side(make_round(probes=5))
    assert (tokens.verdict, ttft.verdict) == ("no leak", "inconclusive")
    assert tokens.upper_bound is not None
    assert tokens.upper_bound > 0.2


def test_a_cache_that_is_off_is_said_so(cache: Any, make_round: Rounds) -> None:
    cache.caching = False
    tokens, ttft = side(make_round())
    assert (tokens.verdict, ttft.verdict) == ("no leak", "no leak")
    assert "nor of a tenant's own: the cache is off" in tokens.sentence
    assert "so the cache is off or saves too little to be seen" in ttft.sentence


@pytest.mark.parametrize(("scope", "verdict"), [("global", "leak shown"), ("session", "no leak")])
def test_times_can_be_judged_alone_by_so_many_pairs(cache: Any, make_round: Rounds, scope: str, verdict: str) -> None:
    cache.scope, cache.noise_s = scope, 0.0  # equal times: all ties
    client: Any = make_round().client
    options = side_channel.SideChannelOptions(pairs=60, prefix_tokens=64)
    result = asyncio.run(side_channel.probe_ttft(client, options))
    assert (result.check, result.verdict, result.probes) == ("side-channel-ttft", verdict, 60)
    assert client.requests_sent == 1 + 1 + 3 * 60 + 15


# Salt


def test_a_salt_that_is_honoured(make_round: Rounds) -> None:
    result = the(asyncio.run(salt.run(make_round())))
    assert (result.verdict, result.probes, result.leaks) == ("no leak", 80, 0)
    assert result.data == {"by": "cached_tokens", "trials": 40, "same": 40, "other": 0, "none": 0}


def test_a_salt_that_is_ignored(cache: Any, make_round: Rounds) -> None:
    cache.salted = False
    result = the(asyncio.run(salt.run(make_round())))
    assert (result.verdict, result.probes, result.leaks) == ("leak shown", 80, 80)
    assert result.sentence.startswith("cache_salt is not honoured")


@pytest.mark.parametrize(("salted", "verdict"), [(True, "no leak"), (False, "leak shown")])
def test_times_tell_of_salts_where_counts_do_not(cache: Any, make_round: Rounds, salted: bool, verdict: str) -> None:
    cache.tells, cache.salted = False, salted
    result = the(asyncio.run(salt.run(make_round())))
    assert (result.verdict, result.leaks, result.data["by"]) == (verdict, int(not salted), "ttft")


@pytest.mark.parametrize("tells", [True, False])
def test_a_cache_that_is_off_says_nothing_of_salts(cache: Any, make_round: Rounds, tells: bool) -> None:
    cache.caching, cache.tells = False, tells
    result = the(asyncio.run(salt.run(make_round())))
    assert result.verdict == "not run"
    assert result.sentence.startswith("nothing to see: the same salt is not")


# Leak canary


def test_another_tenants_answer_is_a_leak(cache: Any, make_round: Rounds) -> None:
    cache.leaks = True
    result = the(asyncio.run(canary.run(make_round(probes=10))))
    assert (result.verdict, result.probes, result.leaks) == ("leak shown", 10, 10)
    assert result.sentence == "10 answers with another tenant's text in 10 probes"
    example = result.data["examples"][0]
    assert (example["got"], example["cold"]) == (example["answer_a"], example["answer_b"])
    assert len(result.data["examples"]) == 3


def test_a_sound_cache_has_no_leak_in_so_many_probes(make_round: Rounds) -> None:
    result = the(asyncio.run(canary.run(make_round(probes=10))))
    assert (result.verdict, result.probes, result.leaks, result.effect) == ("no leak", 10, 0, 0.0)
    assert result.upper_bound == pytest.approx(1 - 0.05 ** (1 / 10))
    assert result.data["own_repeats_cached"] == 10


def test_a_model_that_answers_so_by_itself_leaks_nothing(cache: Any, make_round: Rounds) -> None:
    """Every answer names both tenants' values: the control says that no cache is needed for that."""
    cache.answer = lambda prompt, right: " ".join(f"{n:02d}" for n in range(100))
    result = the(asyncio.run(canary.run(make_round(probes=5))))
    assert (result.verdict, result.leaks, result.probes) == ("inconclusive", 0, 0)
    assert "answers only 0 of 5 cold prompts rightly" in result.sentence


def test_a_model_that_cannot_answer_proves_nothing(cache: Any, make_round: Rounds) -> None:
    cache.answer = lambda prompt, right: "?"
    result = the(asyncio.run(canary.run(make_round(probes=5))))
    assert (result.verdict, result.upper_bound) == ("inconclusive", None)


def test_first_tokens_that_stray_from_cold_ones_are_inconclusive(cache: Any, make_round: Rounds) -> None:
    cache.surprise = 0.5
    result = the(asyncio.run(canary.run(make_round(probes=5))))
    assert (result.verdict, result.data["strange"]) == ("inconclusive", 5)
    assert result.effect == pytest.approx(0.195, abs=0.01)
    assert "in 5 of 5 probes the first token was chosen otherwise" in result.sentence


def test_probes_are_cold_cached_and_across(make_round: Rounds) -> None:
    round_ = make_round(probes=5)
    asyncio.run(canary.run(round_))
    client: Any = round_.client
    (a1, first), (a2, again), (b1, cross), (b2, cold), (b3, colder) = client.asked[:5]
    assert a1 == a2 != b1 == b2 == b3
    assert first == again
    assert len({first.tenant, cross.tenant, cold.tenant, colder.tenant}) == 4
    assert (cross.salt, cold.salt is None) == (None, False)
    assert isinstance(cold, Caller)


# Failures


def test_one_failure_is_passed_over_and_three_in_a_row_stop(make_round: Rounds) -> None:
    round_ = make_round(probes=5, fault=lambda n: "passing" if n == 7 else "")
    result = the(asyncio.run(canary.run(round_)))
    assert (result.probes, round_.failed, round_.stopped) == (5, 1, None)
    round_ = make_round(probes=5, fault=lambda n: "passing" if n >= 10 else "")
    result = the(asyncio.run(canary.run(round_)))
    assert (result.probes, round_.failed, round_.stopped) == (2, 3, "the test says passing")


def test_a_refusal_stops_at_once(make_round: Rounds) -> None:
    round_ = make_round(fault=lambda n: "final" if n >= 31 else "")
    tokens, ttft = side(round_)
    assert (tokens.probes, round_.failed, round_.stopped) == (9, 1, "the test says final")
    assert ttft.verdict == "leak shown"
    round_ = make_round(fault=lambda n: "final")
    tokens, ttft = side(round_)
    assert (tokens.verdict, ttft.verdict, tokens.sentence) == ("not run", "not run", "the test says final")


# A round's verdict and budget


def test_a_leak_stands_whatever_else_happened() -> None:
    leak = CheckResult("leak-canary", "leak shown", 10, 2, "2 answers")
    quiet = CheckResult("cache-salt", "no leak", 80, 0, "honoured", upper_bound=0.0367)
    tokens = CheckResult("side-channel-tokens", "no leak", 80, 0, "none", upper_bound=0.05)
    ttft = CheckResult("side-channel-ttft", "no leak", 80, 0, "none", interval=(0.4, 0.6))
    doubt = CheckResult("side-channel-ttft", "inconclusive", 80, 0, "times do not decide")
    skipped = CheckResult("cache-salt", "not run", 0, 0, "off")
    assert conclude([quiet, leak], "gone") == ("leak shown", "leak shown: 2 answers")
    timed = CheckResult("side-channel-ttft", "leak shown", 20, 1, "told by times")
    assert conclude([leak, timed], None)[1] == "leak shown: 2 answers; also by side-channel-ttft"
    assert conclude([quiet], "gone") == ("inconclusive", "inconclusive: stopped early, gone")
    assert conclude([quiet, doubt], None)[0] == "inconclusive"
    assert conclude([skipped], None)[0] == "inconclusive"
    verdict, sentence = conclude([quiet, tokens, ttft], None)
    assert verdict == "no leak"
    assert sentence == "no leak in 160 probes (upper bound 5.0% of such requests, with 95% confidence)"
    assert conclude([ttft, skipped], None)[1] == "no leak in 80 probes (AUC at most 0.60)"


@pytest.mark.parametrize("leaks", [True, False])
def test_a_round_stays_within_its_budget(cache: Any, make_round: Rounds, leaks: bool) -> None:
    cache.leaks, cache.tells, cache.noise_s = leaks, False, 100.0  # every suspicion, every extension
    round_ = make_round(probes=10)
    asyncio.run(canary.run(round_))
    budget = plan_budget(round_.options, round_.setting)
    assert round_.client.requests_sent <= budget.by_check["leak-canary"]
    before = round_.client.requests_sent
    side(round_)
    assert round_.client.requests_sent - before == budget.by_check["side-channel"]
    before = round_.client.requests_sent
    asyncio.run(salt.run(round_))
    assert round_.client.requests_sent - before == budget.by_check["cache-salt"]
    client: Any = round_.client
    words = sum(len(text.split()) if not text.endswith(">") else 150 for text, _ in client.asked)
    assert words <= budget.prompt_tokens


def test_prompts_fit_the_context() -> None:
    options = IsolationOptions()
    assert [fitted_prefix(options, length) for length in (None, 4096, 512)] == [1024, 1024, 256]
    assert (fitted_facts("testbed", 2048), fitted_facts("plain", None)) == (48, 8)
    assert len(split_tokens(make_twins("testbed", 1, fitted_facts("testbed", 128)).control_b)) < 128 - 4
    with pytest.raises(ProbeError, match="too short for this probe"):
        fitted_prefix(options, 100)
    with pytest.raises(ProbeError, match="too short for twin prompts"):
        fitted_facts("plain", 200)
