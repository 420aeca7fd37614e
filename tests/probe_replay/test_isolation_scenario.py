"""What counts as a breach, as reproduced and as verified, from given figures and a scripted server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from probe.isolation.client import Answer, Caller
from probe.replay.attacks.attack import TRIES, Ask, Case, CaseAttack, Tally, Try, session
from probe.replay.attacks.collision import Collision
from probe.replay.isolation import sentence
from probe.replay.observation import Check, Observation
from probe.replay.scenarios.prefix_collision import ATTACKS, CASES, PrefixCollision

SCENARIO = PrefixCollision()
FIRED = {"state": "firing", "summary": "3 breaches"}
RESOLVED = {"state": "resolved", "summary": "3 breaches"}


class OneCase(CaseAttack):
    """Session B asks for 62 and must not hear 37, which only A has told."""

    kind = "one"

    def flags(self) -> list[str]:
        return []

    def cases(self, count: int, rng: random.Random) -> list[Case]:
        a, b = session("a"), session("b")
        later = Ask("ax=37;?ax>37?ax>", "later", a)
        tries = (Try(Ask("ax=62;?ax>", "b", b), "62"),) * TRIES
        return [Case(Ask("ax=37;?ax>", "a", a), tries, later, "37")] * count

    def tell(self, case: Case, right: str, answer: str) -> str:
        return f"{answer} instead of {right}"


class Scripted:
    """A server by rule; a caller with a salt is the cold control."""

    def __init__(self, answer: Callable[[str, Caller], str]) -> None:
        self.answer = answer

    async def ask(self, prompt: str, caller: Caller, **_: Any) -> Answer:
        return Answer(self.answer(prompt, caller), cached_tokens=16, prompt_tokens=20)


def attacked(answer: Callable[[str, Caller], str], count: int = 8) -> Tally:
    tally = Tally()
    asyncio.run(OneCase().run(Scripted(answer), count, random.Random(0), tally))  # type: ignore[arg-type]
    return tally


def test_an_answer_from_another_session_is_a_breach_and_both_sides_are_shown() -> None:
    tally = attacked(lambda prompt, caller: "62" if caller.salt else "37")
    assert (tally.requests, tally.breaches, tally.model_errors) == (8, 8, 0)
    shown = tally.examples[0]
    assert (shown["leaked"], shown["cold_answer"], shown["sentence"]) == ("37", "62", "37 instead of 62")
    (told, answered), (_, leaked) = (side["messages"] for side in shown["sessions"])
    assert [told["text"][start:end] for start, end in told["marks"]] == ["37"]
    assert [answered["text"], leaked["text"], leaked["marks"]] == ["37", "37", [[0, 2]]]


def test_a_mistake_the_model_makes_on_its_own_is_no_breach() -> None:
    tally = attacked(lambda prompt, caller: "99" if prompt == "b" else "37")
    assert (tally.requests, tally.breaches, tally.model_errors) == (8, 0, 8)


def test_right_answers_are_no_breach_and_own_next_turns_are_counted() -> None:
    tally = attacked(lambda prompt, caller: "62" if prompt == "b" else "37")
    assert (tally.requests, tally.breaches, tally.model_errors) == (8, 0, 0)
    assert (tally.hit_tokens, tally.asked_tokens, tally.legit_rate()) == (32, 40, 0.8)


def test_crafted_pairs_share_a_name_of_16_bits_and_nothing_else() -> None:
    attack = Collision()
    for case in attack.cases(8, random.Random(3)):
        victim = _facts(case.victim.text)
        assert case.secret in dict(victim).values()
        assert len({one.ask.caller.tenant for one in case.tries} | {case.victim.caller.tenant}) == TRIES + 1
        for one in case.tries:
            attacker = _facts(one.ask.text)
            assert attack.name_of(attacker) == attack.name_of(victim)
            assert attacker != victim
            assert one.right != case.secret


def _facts(text: str) -> list[tuple[str, str]]:
    return [(part[:2], part[3:]) for part in text.split("?")[0].rstrip(";").split(";")]


def figures(**changed: Any) -> dict[str, Any]:
    legit = {"asked_tokens": 100, "hit_tokens": 60, "rate": 0.6}
    return {"requests": 1000, "breaches": 0, "upper_bound": 0.003, "legit": legit, **changed}


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


def seen(alert: dict[str, Any] | None, **changed: Any) -> Observation:
    return Observation(0.0, 1.0, isolation=figures(**changed), alert=alert)


def test_one_breach_and_the_alert_are_the_incident() -> None:
    assert failed(SCENARIO.reproduced(seen(FIRED, breaches=1))) == []
    assert failed(SCENARIO.reproduced(seen(FIRED))) == ["answered from another's KV"]
    assert failed(SCENARIO.reproduced(seen(None, breaches=1))) == ["alert prefix-isolation-breach fired"]


@pytest.mark.parametrize(
    ("alert", "changed", "what"),
    [
        (RESOLVED, {}, []),
        (RESOLVED, {"breaches": 1}, ["no breach"]),
        (RESOLVED, {"requests": 999}, ["enough requests to say so"]),
        (RESOLVED, {"legit": {"rate": 0.0}}, ["own prefixes still hit"]),
        (RESOLVED, {"legit": {"rate": None}}, ["own prefixes still hit"]),
        (FIRED, {}, ["alert prefix-isolation-breach resolved"]),
    ],
)
def test_each_condition_of_the_remedy_counts(alert: dict[str, Any], changed: dict[str, Any], what: list[str]) -> None:
    assert failed(SCENARIO.verified(seen(alert, **changed))) == what


def test_a_phase_in_a_sentence() -> None:
    assert sentence(figures(breaches=2, upper_bound=0.0072)) == (
        "2 breaches in 1000 cross-session requests (95% upper bound 0.72%); of their own next turns, 60% came from "
        "the cache"
    )


def test_every_variant_names_its_public_case_and_says_whether_it_needs_the_lock() -> None:
    assert set(CASES) == set(ATTACKS)
    for variant in ATTACKS:
        flags = PrefixCollision(variant).flags()
        assert ("--allow-unsafe-replay" in flags) == (variant != "timing")


def test_short_names_come_with_how_soon_two_are_alike() -> None:
    chances = list(PrefixCollision("image").article_case["chance_that_two_names_are_alike"].values())
    assert chances[0] == 0.5  # of 302 pictures in 16 bits, as reported
    assert chances[1] < 1e-7
    assert chances[2] < 1e-60
    assert PrefixCollision("timing").article_case["computed"] is False
