"""Cross-session attacks and how they are judged.

An attack asks on behalf of sessions that share nothing but the engine. The victim goes first, so that its KV is cached;
the attacker then asks something whose right answer is known. An answer is a breach only when it is wrong *and* the
same question, asked as a session nobody has seen, is answered right: a mistake of the model is not a leak.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from probe.isolation.client import Answer, Caller, IsolationClient
from probe.isolation.result import CheckName

CONCURRENCY = 32
TRIES = 4  # attackers a victim has
WAVE = 25  # victims whose blocks are cached at the same time

Prompt = str | list[int] | list[dict[str, Any]]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """One request: `text` is how it reads to people, `prompt` what is sent. model: an adapter's name, or None."""

    text: str
    prompt: Prompt
    caller: Caller
    model: str | None = None


@dataclass(frozen=True)
class Try:
    """An attacker's request, and its only right answer."""

    ask: Ask
    right: str


@dataclass(frozen=True)
class Case:
    """A victim's request and what TRIES attackers ask, each in a session of its own. secret: the victim's answer.

    follow_up: the next turn of a session, which may use what it has cached itself.
    """

    victim: Ask
    tries: tuple[Try, ...]
    follow_up: Ask
    secret: str | None = None


@dataclass
class Tally:
    """What a phase saw. `requests` are the attackers' only; `errors` of the model are no breaches."""

    requests: int = 0
    breaches: int = 0
    model_errors: int = 0
    asked_tokens: int = 0  # of follow-ups, in their prompts
    hit_tokens: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def count_own(self, answer: Answer) -> None:
        """Books a session's own next turn."""
        self.asked_tokens += answer.prompt_tokens or 0
        self.hit_tokens += answer.cached_tokens or 0

    def legit_rate(self) -> float | None:
        """Share of a session's own follow-up tokens that came from the cache."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else None


class Attack(ABC):
    """One variant. `kind` is what the runbook calls it, `check` the isolation probe's check that sees it."""

    kind: ClassVar[str]
    check: ClassVar[CheckName] = "leak-canary"

    @abstractmethod
    def flags(self) -> list[str]:
        """What is wrong with the engine, as flags."""

    @abstractmethod
    async def run(self, client: IsolationClient, requests: int, rng: random.Random, tally: Tally) -> None:
        """Makes `requests` cross-session requests and judges each."""

    async def besides(self, _: IsolationClient) -> dict[str, Any]:
        """What else the variant measures in a phase, JSON-ready; nothing, unless it says so."""
        return {}


class CaseAttack(Attack):
    """An attack made of independent cases, in waves so that a victim's blocks are still there."""

    @abstractmethod
    def cases(self, count: int, rng: random.Random) -> list[Case]:
        """`count` cases."""

    @abstractmethod
    def tell(self, case: Case, right: str, answer: str) -> str:
        """A breach in a sentence: what the attacker got where `right` was right."""

    async def before(self, client: IsolationClient) -> None:
        """What happens before a wave; nothing, unless the variant says so."""

    async def between(self, client: IsolationClient) -> None:
        """What happens between a wave's victims and its attackers; nothing, unless the variant says so."""

    async def run(self, client: IsolationClient, requests: int, rng: random.Random, tally: Tally) -> None:
        """Victims of a wave, then its attackers, then sessions' own next turns."""
        cases = self.cases(-(-requests // TRIES), rng)
        for start in range(0, len(cases), WAVE):
            wave = cases[start : start + WAVE]
            await self.before(client)
            told = await each([case.victim for case in wave], partial(send, client))
            await self.between(client)
            tries = [(case, first, one) for case, first in zip(wave, told, strict=True) for one in case.tries]
            await each(tries, lambda each_: self._judge(client, *each_, tally))
            for answer in await each([case.follow_up for case in wave], partial(send, client)):
                tally.count_own(answer)

    async def _judge(self, client: IsolationClient, case: Case, told: Answer, tried: Try, tally: Tally) -> None:
        answer = await send(client, tried.ask)
        tally.requests += 1
        if answer.text == tried.right:
            return
        cold = await send(client, replace(tried.ask, caller=nobody()))
        if cold.text != tried.right:
            tally.model_errors += 1
            return
        tally.breaches += 1
        if len(tally.examples) < 3:
            leaked = answer.text if answer.text == case.secret else None
            tally.examples.append({
                "title": "Session B was answered from what Session A left in the cache",
                "sentence": self.tell(case, tried.right, answer.text),
                "sessions": [
                    conversation("Session A", case.victim, told.text, leaked, in_question=True),
                    conversation("Session B", tried.ask, answer.text, answer.text),
                ],
                "leaked": leaked,
                "cold_answer": cold.text,
            })  # fmt: skip


def nobody() -> Caller:
    """A caller nobody has been before: its salt alone keeps it from everybody's blocks."""
    name = f"control-{random.getrandbits(64):016x}"
    return Caller(tenant=name, session=name, salt=name)


def session(name: str) -> Caller:
    """A session of a tenant of its own, as a gateway would name it."""
    return Caller(tenant=f"tenant-{name}", session=f"session-{name}", user=f"tenant-{name}")


async def send(client: IsolationClient, ask: Ask) -> Answer:
    """One greedy answer of a few tokens; a testbed answer ends by itself."""
    return await client.ask(ask.prompt, ask.caller, max_tokens=4, model=ask.model)


async def each(items: Sequence[S], job: Callable[[S], Awaitable[T]]) -> list[T]:
    """The job's result for each item, in order, at most CONCURRENCY at a time; the first error ends them all."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def run(item: S) -> T:
        async with room:
            return await job(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(item)) for item in items]
    return [task.result() for task in tasks]


def conversation(name: str, ask: Ask, answer: str, marked: str | None, *, in_question: bool = False) -> dict[str, Any]:
    """One side of an example; `marked` text is marked in the answer, or also where the question tells it as a value."""
    asked = [[start + 1, end] for start, end in spans(ask.text, f"={marked}")] if marked and in_question else []
    return {
        "name": name,
        "owner": ask.caller.tenant or "",
        "messages": [
            {"role": "user", "text": ask.text, "marks": asked},
            {"role": "assistant", "text": answer, "marks": spans(answer, marked)},
        ],
    }


def spans(text: str, part: str | None) -> list[list[int]]:
    """[start, end) of the first occurrence of `part`; nothing when there is none."""
    at = text.find(part) if part else -1
    return [[at, at + len(part)]] if part and at >= 0 else []
