"""Can tenant B tell that tenant A's prefix is cached, from `cached_tokens` or from the time to the first token?

A warms a prefix nobody sent before; B, who knows its text, asks for it and for one that nobody warmed, in random
order, with a new pair of prefixes each time. Token counts are exact: one hit on a prefix of A's shows the channel.
Times are judged by a rank test, at up to three looks (a few pairs, all, twice as many), so that a loud channel is
shown with little load. To show a leak takes p < P_VALUE at a look, which three looks raise to at most three times
that; to deny one takes enough pairs to rule out an AUC of QUIET, from all pairs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from probe.isolation.client import Answer, Caller, IsolationClient
from probe.isolation.options import DEFAULT_PREFIX_TOKENS, DEFAULT_PROBES, OWN_EVERY, IsolationOptions, Setting, is_hit
from probe.isolation.result import CheckName, CheckResult, Verdict
from probe.isolation.round import Round
from probe.isolation.stats import LOUD, P_VALUE, auc_interval, is_quiet, rank_test, upper_bound

FIRST_LOOK = 20


@dataclass(frozen=True)
class Pair:
    """B's answers to a warmed and an unwarmed prefix, and A's to its own warmed one (some pairs only)."""

    warmed: Answer
    unwarmed: Answer
    own: Answer | None


async def run(round_: Round) -> list[CheckResult]:
    """Both checks: "side-channel-tokens" and "side-channel-ttft". Never raises on a server's errors."""
    probes = round_.options.probes
    pairs = await _look(round_, sorted({min(FIRST_LOOK, probes), probes, 2 * probes}))
    if not pairs:
        return [_not_run("side-channel-tokens", round_.stopped), _not_run("side-channel-ttft", round_.stopped)]
    return [_by_tokens(round_, pairs), _by_time(pairs, enough=len(pairs) >= probes)]


@dataclass(frozen=True)
class SideChannelOptions:
    """A number of pairs decided on beforehand: one look. `vocab_size` None: prompts are text."""

    pairs: int = DEFAULT_PROBES
    prefix_tokens: int = DEFAULT_PREFIX_TOKENS
    vocab_size: int | None = None


async def probe_ttft(client: IsolationClient, options: SideChannelOptions) -> CheckResult:
    """The check "side-channel-ttft" alone, with one look. Raises `ProbeError` when the first request fails."""
    setting = Setting("plain", options.prefix_tokens, options.vocab_size)
    round_ = Round(client, IsolationOptions(("side-channel",)), setting)
    await round_.calibrate()
    pairs = await _look(round_, [options.pairs])
    if not pairs:
        return _not_run("side-channel-ttft", round_.stopped)
    return _by_time(pairs, enough=len(pairs) >= options.pairs)


async def _look(round_: Round, looks: Sequence[int]) -> list[Pair]:
    """Pairs until a look at their times decides; `looks`: how many there are at each."""
    pairs: list[Pair] = []
    victim, attacker = round_.member("a"), round_.member("b")
    await round_.attempt(_ask(round_, round_.fresh("first"), attacker))  # a first connection is slow, and no pair
    for look in looks:
        while len(pairs) < look and not round_.over():
            pair = await round_.attempt(_pair(round_, victim, attacker, own=len(pairs) % OWN_EVERY == 0))
            if pair is not None:
                pairs.append(pair)
                round_.count("side-channel", len(pairs), look)
        enough = look >= round_.options.probes
        if round_.over() or _by_time(pairs, enough=enough).verdict != "inconclusive":
            break
        if look != looks[-1]:
            round_.report(f"side-channel: {len(pairs)} pairs do not decide yet")
    return pairs


async def _ask(round_: Round, prefix: str, caller: Caller) -> Answer:
    return await round_.client.ask(round_.prompt(prefix, round_.fresh("tail")), caller, max_tokens=1, stream=True)


async def _pair(round_: Round, victim: Caller, attacker: Caller, *, own: bool) -> Pair:
    warm, cold = round_.fresh("prefix"), round_.fresh("prefix")
    await _ask(round_, warm, victim)
    asked = [warm, cold]
    round_.rng.shuffle(asked)
    answers = {prefix: await _ask(round_, prefix, attacker) for prefix in asked}
    return Pair(answers[warm], answers[cold], await _ask(round_, warm, victim) if own else None)


def _times(answers: Sequence[Answer | None]) -> list[float]:
    return [answer.ttft_s for answer in answers if answer is not None and answer.ttft_s is not None]


def _by_time(pairs: Sequence[Pair], *, enough: bool) -> CheckResult:
    """`enough`: so many pairs that silence may be called no leak."""
    warmed, unwarmed = _times([p.warmed for p in pairs]), _times([p.unwarmed for p in pairs])
    if not warmed or not unwarmed:
        return _not_run("side-channel-ttft", "answers came without a first token to time")
    auc, p_value = rank_test(unwarmed, warmed)
    low, high = auc_interval(auc, len(unwarmed), len(warmed))
    own = _times([p.own for p in pairs])
    own_auc = rank_test(unwarmed, own)[0] if own else None
    figures = (
        f"median time to first token {median(warmed) * 1000:.1f} ms warmed by another tenant against "
        f"{median(unwarmed) * 1000:.1f} ms new, AUC {auc:.2f} [{low:.2f}, {high:.2f}], p = {p_value:.2g}, "
        f"{len(pairs)} pairs"
    )
    quiet = enough and is_quiet(auc, len(unwarmed), len(warmed))
    verdict, words = _judged(auc, p_value, low, high, quiet=quiet)
    if verdict == "no leak" and own_auc is not None:
        words += f" (a tenant's own repeat: AUC {own_auc:.2f}"
        words += ")" if own_auc >= LOUD else ", so the cache is off or saves too little to be seen)"
    return CheckResult(
        "side-channel-ttft", verdict, len(pairs), int(verdict == "leak shown"), f"{words}: {figures}",
        effect=auc, interval=(low, high), p_value=p_value,
        data={
            "own_auc": own_auc, "median_warmed_s": median(warmed), "median_unwarmed_s": median(unwarmed),
            "median_own_s": median(own) if own else None, "warmed_s": warmed, "unwarmed_s": unwarmed, "own_s": own,
        },
    )  # fmt: skip


def _judged(auc: float, p_value: float, low: float, high: float, *, quiet: bool) -> tuple[Verdict, str]:
    if p_value < P_VALUE and low > 0.5 and auc >= LOUD:
        return "leak shown", "another tenant's cached prefix is told by the time to the first token"
    if p_value < P_VALUE and high < 0.5:
        return "inconclusive", "prefixes warmed by another tenant come later than new ones, which no cache explains"
    if quiet:
        return "no leak", "another tenant's cached prefix is not told by the time to the first token"
    return "inconclusive", "times do not decide whether another tenant's prefix is cached"


def _by_tokens(round_: Round, pairs: Sequence[Pair]) -> CheckResult:
    told = [
        (pair.warmed.cached_tokens, pair.unwarmed.cached_tokens)
        for pair in pairs
        if pair.warmed.cached_tokens is not None and pair.unwarmed.cached_tokens is not None
    ]
    if not told:
        return _not_run("side-channel-tokens", "the server does not tell cached_tokens")
    length = round_.setting.prefix_tokens
    leaks = sum(is_hit(warmed, unwarmed, length) for warmed, unwarmed in told)
    effect = fmean(warmed - unwarmed for warmed, unwarmed in told)
    _, p_value = rank_test([warmed for warmed, _ in told], [unwarmed for _, unwarmed in told])
    own = [
        (pair.own.cached_tokens, pair.unwarmed.cached_tokens or 0)
        for pair in pairs
        if pair.own is not None and pair.own.cached_tokens is not None
    ]
    data: dict[str, Any] = {
        "prefix_tokens": length, "warmed": [w for w, _ in told], "unwarmed": [u for _, u in told],
        "own": [cached for cached, _ in own], "own_hits": sum(is_hit(cached, new, length) for cached, new in own),
    }  # fmt: skip
    mean_warmed = fmean(warmed for warmed, _ in told)
    verdict: Verdict = "leak shown" if leaks else "no leak"
    if leaks:
        sentence = (
            f"cached_tokens told of another tenant's prefix in {leaks} of {len(told)} probes "
            f"({mean_warmed:.0f} of {length} tokens on average)"
        )
    else:
        sentence = f"cached_tokens told of another tenant's prefix in none of {len(told)} probes"
        if own and not data["own_hits"]:
            sentence += ", nor of a tenant's own: the cache is off, or its blocks are gone at once"
    return CheckResult(
        "side-channel-tokens", verdict, len(told), leaks, sentence,
        upper_bound=upper_bound(leaks, len(told)), effect=effect, p_value=p_value, data=data,
    )  # fmt: skip


def _not_run(check: CheckName, why: str | None) -> CheckResult:
    return CheckResult(check, "not run", 0, 0, why or "no pair of prompts was answered")
