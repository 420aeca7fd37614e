"""Is `cache_salt` honoured: does one caller's prefix, cached under one salt, stay unseen under another and under none?

One caller throughout, so that nothing but the salt separates. By `cached_tokens` where the server tells them, else by
the time to the first token against prompts nobody sent before; times can only speak where the same salt is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from probe.isolation.client import Answer
from probe.isolation.options import is_hit
from probe.isolation.result import CheckResult, Verdict
from probe.isolation.round import ID_PREFIX, Round
from probe.isolation.stats import LOUD, P_VALUE, auc_interval, is_quiet, rank_test, upper_bound

SHORT_PREFIX_TOKENS = 256


@dataclass(frozen=True)
class Trial:
    """Answers to a prefix cached under a salt: the same salt, another, none; and to a prefix nobody cached."""

    prefix_tokens: int
    same: Answer
    other: Answer
    none: Answer
    new: Answer

    @property
    def told(self) -> bool:
        """Whether the server told `cached_tokens` of all of them."""
        return all(answer.cached_tokens is not None for answer in (self.same, self.other, self.none, self.new))

    def hit(self, answer: Answer) -> bool:
        return is_hit(answer.cached_tokens or 0, self.new.cached_tokens or 0, self.prefix_tokens)


async def run(round_: Round) -> list[CheckResult]:
    """The check "cache-salt". Never raises on a server's errors."""
    trials: list[Trial] = []
    length, told = round_.setting.prefix_tokens, False
    while len(trials) < round_.options.salt_trials(by_tokens=told) and not round_.over():
        trial = await round_.attempt(_trial(round_, length))
        if trial is not None:
            trials.append(trial)
            told = all(trial.told for trial in trials)
            if told:  # counts are exact, however short the prefix
                length = min(length, SHORT_PREFIX_TOKENS)
            round_.count("cache-salt", len(trials), round_.options.salt_trials(by_tokens=told))
    if not trials:
        return [CheckResult("cache-salt", "not run", 0, 0, round_.stopped or "no trial was answered")]
    return [_by_tokens(trials) if told else _by_time(trials)]


async def _trial(round_: Round, prefix_tokens: int) -> Trial:
    prefix, new = round_.fresh("prefix"), round_.fresh("prefix")
    caller = round_.member("salted")
    salt, other = (f"{ID_PREFIX}-{round_.name}-{round_.fresh('salt')}" for _ in range(2))

    async def ask(what: str, with_salt: str | None) -> Answer:
        prompt = round_.prompt(what, round_.fresh("tail"), prefix_tokens)
        return await round_.client.ask(prompt, replace(caller, salt=with_salt), max_tokens=1, stream=True)

    await ask(prefix, salt)
    asked = {"other": (prefix, other), "none": (prefix, None), "new": (new, other)}
    order = list(asked)
    round_.rng.shuffle(order)
    answers = {name: await ask(*asked[name]) for name in order}
    return Trial(prefix_tokens, await ask(prefix, salt), **answers)


def _by_tokens(trials: Sequence[Trial]) -> CheckResult:
    same, other, none = (sum(t.hit(getattr(t, name)) for t in trials) for name in ("same", "other", "none"))
    leaks, probes = other + none, 2 * len(trials)
    data = {"by": "cached_tokens", "trials": len(trials), "same": same, "other": other, "none": none}
    figures = f"same salt {same}, another {other}, none {none} hits in {len(trials)} trials each"
    verdict: Verdict
    if leaks:
        verdict, words = "leak shown", "cache_salt is not honoured"
    elif not same:
        verdict, words = "not run", "nothing to see: the same salt is not served from the cache either"
    else:
        verdict, words = "no leak", "cache_salt is honoured"
    return CheckResult(
        "cache-salt", verdict, probes, leaks, f"{words}: {figures}",
        upper_bound=upper_bound(leaks, probes), data=data,
    )  # fmt: skip


def _by_time(trials: Sequence[Trial]) -> CheckResult:
    def times(answers: Sequence[Answer]) -> list[float]:
        return [answer.ttft_s for answer in answers if answer.ttft_s is not None]

    new, same = times([t.new for t in trials]), times([t.same for t in trials])
    foreign = times([t.other for t in trials]) + times([t.none for t in trials])
    probes = 2 * len(trials)
    if not new or not same or not foreign:
        return CheckResult(
            "cache-salt", "not run", 0, 0, "answers tell neither cached_tokens nor a first token to time"
        )
    same_auc, same_p = rank_test(new, same)
    auc, p_value = rank_test(new, foreign)
    low, high = auc_interval(auc, len(new), len(foreign))
    figures = (
        f"by time to first token, against new prompts: same salt AUC {same_auc:.2f}, another or none AUC {auc:.2f} "
        f"[{low:.2f}, {high:.2f}], p = {p_value:.2g}, {len(trials)} trials"
    )
    verdict: Verdict = "inconclusive"
    words = "times do not decide whether cache_salt is honoured"
    if p_value < P_VALUE and low > 0.5 and auc >= LOUD:
        verdict, words = "leak shown", "cache_salt is not honoured"
    elif same_p >= P_VALUE or same_auc < LOUD:
        verdict, words = "not run", "nothing to see: the same salt is not faster either"
    elif is_quiet(auc, len(new), len(foreign)):
        verdict, words = "no leak", "cache_salt is honoured"
    return CheckResult(
        "cache-salt", verdict, probes, int(verdict == "leak shown"), f"{words}: {figures}",
        effect=auc, interval=(low, high), p_value=p_value,
        data={
            "by": "ttft", "trials": len(trials), "same_auc": same_auc, "new_s": new, "same_s": same,
            "foreign_s": foreign,
        },
    )  # fmt: skip
