"""Leak canary: does tenant B, who told the model one value, ever get tenant A's value back?

Each probe is a new pair of twin prompts. A asks its own twice (computed, then from cache), B asks the other one, and
two callers nobody knows ask B's prompt again under fresh salts: what B should have got, and how much two cold answers
differ. An answer of B's with A's value counts as a leak only if a prompt that no cache can know is answered otherwise.

The first token's distribution tells more than the text: where B's is further from the cold one than cold ones are
from each other, and than A's cached one is from its computed one, something else than B's prompt was read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probe.isolation.client import Answer, Caller
from probe.isolation.result import CheckResult, Verdict
from probe.isolation.round import Round
from probe.isolation.stats import upper_bound
from probe.isolation.twins import Twin, classify, make_twins

TOP = 5  # log-probabilities asked for: what OpenAI's completions give at most
NOISE_TIMES = 3.0
LEAST_DISTANCE = 0.02  # of two first-token distributions (total variation); below it, rounding explains it
FEWEST_ANSWERED = 0.5  # of the probes: a model that answers fewer of its cold controls rightly shows nothing
EXAMPLES = 3


@dataclass(frozen=True)
class Probe:
    """The answers of one probe; `control` is set where B's answer was suspicious."""

    twin: Twin
    computed: Answer
    cached: Answer
    cross: Answer
    cold: Answer
    cold_again: Answer
    control: Answer | None

    @property
    def leaked(self) -> bool:
        return self.control is not None and classify(self.control.text, self.twin) != "leak"

    @property
    def answered(self) -> bool:
        """Whether the model answers cold as it should, so that a leak would show."""
        reference = self.control or self.cold
        return classify(reference.text, self.twin) == "own" and classify(self.computed.text, self.twin, "a") == "own"


async def run(round_: Round) -> list[CheckResult]:
    """The check "leak-canary". Never raises on a server's errors."""
    logprobs: int | None = TOP
    probes: list[Probe] = []
    a, b = round_.member("a"), round_.member("b")
    while len(probes) < round_.options.probes and not round_.over():
        probe = await round_.attempt(_probe(round_, a, b, logprobs))
        if probe is not None:
            probes.append(probe)
            round_.count("leak-canary", len(probes), round_.options.probes)
        elif not probes and logprobs is not None and round_.refused:
            logprobs = None  # some servers refuse the field: answers alone must do
            round_.forgive()
    if not probes:
        return [CheckResult("leak-canary", "not run", 0, 0, round_.stopped or "no probe was answered")]
    return [judge(probes)]


async def _probe(round_: Round, a: Caller, b: Caller, logprobs: int | None) -> Probe:
    twin = make_twins(round_.setting.kind, round_.fresh(round_.name), round_.setting.facts)

    async def ask(prompt: str, caller: Caller) -> Answer:
        return await round_.client.ask(round_.said(prompt), caller, max_tokens=twin.max_tokens, logprobs=logprobs)

    def stranger() -> Caller:
        return round_.caller(round_.fresh("cold"), salted=True)

    computed = await ask(twin.prompt_a, a)
    cached = await ask(twin.prompt_a, a)
    cross = await ask(twin.prompt_b, b)
    cold, cold_again = await ask(twin.prompt_b, stranger()), await ask(twin.prompt_b, stranger())
    suspicious = classify(cross.text, twin) == "leak"
    control = await ask(twin.control_b, stranger()) if suspicious else None
    return Probe(twin, computed, cached, cross, cold, cold_again, control)


def judge(probes: list[Probe]) -> CheckResult:
    """What the probes show; `probes` counts those in which the model answered its controls rightly."""
    leaked = [probe for probe in probes if probe.leaked]
    answered = [probe for probe in probes if probe.answered or probe.leaked]
    noise = _distances([(p.cold, p.cold_again) for p in probes])
    own = _distances([(p.computed, p.cached) for p in probes])
    cross = _distances([(p.cross, p.cold) for p in probes])
    tolerance = max(LEAST_DISTANCE, NOISE_TIMES * max([*noise, *own], default=0.0))
    strange = sum(distance > tolerance for distance in cross)
    repeats = [p.cached.cached_tokens for p in probes if p.cached.cached_tokens is not None]
    data: dict[str, Any] = {
        "asked": len(probes), "answered": len(answered), "tolerance": tolerance if cross else None,
        "largest_distance": {
            "cold_cold": max(noise, default=None), "own_cached": max(own, default=None),
            "cross_cold": max(cross, default=None),
        },
        "strange": strange, "own_repeats_cached": sum(tokens > 0 for tokens in repeats) if repeats else None,
        "own_answer_changed": sum(p.computed.text != p.cached.text for p in probes),
        "examples": [_example(probe) for probe in leaked[:EXAMPLES]],
    }  # fmt: skip
    verdict, sentence = _judged(len(leaked), len(answered), len(probes), strange)
    if verdict == "no leak" and repeats and not data["own_repeats_cached"]:
        sentence += "; no repeat was served from the cache either"
    return CheckResult(
        "leak-canary", verdict, len(answered), len(leaked), sentence,
        upper_bound=upper_bound(len(leaked), len(answered)) if answered else None,
        effect=max(cross, default=None), data=data,
    )  # fmt: skip


def _judged(leaks: int, answered: int, asked: int, strange: int) -> tuple[Verdict, str]:
    if leaks:
        return "leak shown", f"{leaks} answers with another tenant's text in {answered} probes"
    if answered < FEWEST_ANSWERED * asked:
        return (
            "inconclusive",
            f"the model answers only {answered} of {asked} cold prompts rightly, so a leak may not show",
        )
    if strange:
        return "inconclusive", (
            f"no answer names another tenant's value, but in {strange} of {asked} probes the first token was chosen "
            "otherwise than from a cold cache, beyond what repeats differ by"
        )
    return "no leak", f"no answer with another tenant's text in {answered} probes"


def _distances(pairs: list[tuple[Answer, Answer]]) -> list[float]:
    firsts = [(left.logprobs[0], right.logprobs[0]) for left, right in pairs if left.logprobs and right.logprobs]
    return [_distance(left, right) for left, right in firsts]


def _distance(left: Mapping[str, float], right: Mapping[str, float]) -> float:
    """Total variation of two distributions of which the likeliest tokens are known (others count as 0)."""
    return sum(abs(_share(left, token) - _share(right, token)) for token in left.keys() | right.keys()) / 2


def _share(top: Mapping[str, float], token: str) -> float:
    return math.exp(min(0.0, top[token])) if token in top else 0.0


def _example(probe: Probe) -> dict[str, str]:
    """Texts of one leak: all made up by the probe, apart from what the model answered."""
    return {
        "prompt_a": probe.twin.prompt_a, "prompt_b": probe.twin.prompt_b, "answer_a": probe.twin.answer_a,
        "answer_b": probe.twin.answer_b, "got": probe.cross.text,
        "cold": probe.control.text if probe.control else probe.cold.text,
    }  # fmt: skip
