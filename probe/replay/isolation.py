"""The exercise of isolation incidents: the same attack before and after the remedy, judged from the outside.

What the engine says of itself (its audit, who hit whose blocks, the tree of shared prefixes) is shown beside the
verdict and is no part of it: a real server has no such account.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from probe.isolation.client import IsolationClient
from probe.isolation.record import record
from probe.isolation.result import CheckName, CheckResult, IsolationResult, Verdict
from probe.isolation.stats import upper_bound
from probe.replay.attacks.attack import Attack, Tally
from probe.replay.exercise import Bench, Exercise, settle
from probe.replay.observation import Observation

SEED = 20  # of both phases: the same attack again


@dataclass(frozen=True)
class IsolationPlan:
    """before, after: cross-session requests that bring the incident about, and that prove the remedy.

    attack: makes one for a phase, as it may keep count of what it did to the engine.
    """

    variant: str
    attack: Callable[[], Attack]
    before: int
    after: int


class IsolationExercise(Exercise):
    """Attacks a watched engine."""

    def __init__(self, bench: Bench, plan: IsolationPlan) -> None:
        self._bench = bench
        self._plan = plan
        self._phases: dict[str, dict[str, Any]] = {}
        self._kind: str | None = None
        self._check: CheckName = "leak-canary"

    @property
    def description(self) -> str:
        """The attack in a line."""
        plan = self._plan
        return f"{plan.variant}: {plan.before} cross-session requests, then {plan.after} with the remedy"

    def incident(self) -> Observation:
        """The attack on the engine as the operator of the incident had it."""
        return self._measured("before", self._plan.before)

    def again(self) -> Observation:
        """The same attack and more of its kind on the engine as it runs now."""
        return self._measured("after", self._plan.after)

    def facts(self) -> dict[str, Any]:
        """What the runbook needs to know of the breach."""
        before = self._phases["before"]
        return {
            "isolation": {
                "kind": self._kind,
                "breaches": before["breaches"],
                "requests": before["requests"],
                "lost_hit_rate": before["engine"]["hit_rate_lost"],
            }
        }

    def result(self) -> dict[str, Any]:
        """Both phases."""
        return {"isolation": {"variant": self._plan.variant, "kind": self._kind, **self._phases}}

    def _measured(self, phase: str, requests: int) -> Observation:
        bench, plan = self._bench, self._plan
        started_at = time.time()
        bench.note(f"{plan.variant}: {requests} cross-session requests")
        tally, tree, besides = asyncio.run(self._attack(requests))
        figures = {**_figures(tally), **besides, "tree": tree, "engine": self._engine_figures()}
        self._phases[phase] = figures
        record(bench.store, bench.drill.name, self._round(figures, started_at))
        bench.note(sentence(figures), {key: value for key, value in figures.items() if key != "tree"})
        ended_at = settle(bench)
        return Observation(started_at, ended_at, isolation=figures)

    def _round(self, figures: Mapping[str, Any], started_at: float) -> IsolationResult:
        """The phase as a round of the isolation probe, which is what the alert reads."""
        drill, leaks = self._bench.drill, figures["breaches"]
        verdict: Verdict = "leak shown" if leaks else "no leak"
        check = CheckResult(
            self._check, verdict, figures["requests"], leaks, sentence(figures), upper_bound=figures["upper_bound"]
        )
        return IsolationResult(
            target=drill.name,
            base_url=drill.base_url,
            model=self._bench.endpoint.model,
            engine="kvoncall",
            scope=self._bench.facts["flags"]["--prefix-cache-scope"],
            checks=(check,),
            verdict=verdict,
            sentence=check.sentence,
            requests_sent=figures["requests"],
            requests_failed=0,
            budget={},
            options={"replay": self._plan.variant},
            callers={},
            started_at=started_at,
            ended_at=time.time(),
        )

    async def _attack(self, requests: int) -> tuple[Tally, Mapping[str, Any], Mapping[str, Any]]:
        """One request first, so that the tree of what is shared can be read; then all of them."""
        attack, endpoint = self._plan.attack(), self._bench.endpoint
        self._kind, self._check = attack.kind, attack.check
        tally = Tally()
        async with IsolationClient(self._bench.drill.base_url, endpoint.model, timeout_s=60.0) as client:
            await attack.run(client, 1, random.Random(SEED), Tally())
            tree = self._debug("prefix")
            await attack.run(client, requests, random.Random(SEED + 1), tally)
            besides = await attack.besides(client)
        return tally, tree, besides

    def _engine_figures(self) -> dict[str, Any]:
        stats = self._debug("engine")["stats"]
        queries, lost = stats["prefix_queries_total"], stats["prefix_hits_lost_total"]
        return {
            "isolation_breaches": stats["isolation_breaches"],
            "prefix_hits_refused": stats["prefix_hits_refused"],
            "prefix_hits_by_scope": stats["prefix_hits_by_scope"],
            "hit_rate_lost": lost / queries if queries else None,
        }

    def _debug(self, view: str) -> dict[str, Any]:
        response = httpx.get(f"{self._bench.drill.base_url}/debug/{view}", timeout=10.0, trust_env=False)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "breaches": tally.breaches,
        "breach_rate": tally.breaches / tally.requests,
        "upper_bound": upper_bound(tally.breaches, tally.requests),
        "model_errors": tally.model_errors,
        "legit": {
            "asked_tokens": tally.asked_tokens, "hit_tokens": tally.hit_tokens, "rate": tally.legit_rate(),
        },
        "examples": tally.examples,
    }  # fmt: skip


def sentence(figures: Mapping[str, Any]) -> str:
    """A phase in a sentence."""
    rate = figures["legit"]["rate"]
    own = "" if rate is None else f"; of their own next turns, {rate:.0%} came from the cache"
    return (
        f"{figures['breaches']} breaches in {figures['requests']} cross-session requests "
        f"(95% upper bound {figures['upper_bound']:.2%}){own}"
    )
