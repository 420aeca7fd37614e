"""The loop over targets: each has a task of its own, so that a slow one delays no other.

Runs in the caller's asyncio loop. Every attempt, good or bad, becomes one `Observation`; `facts` reports what
a target says about itself after its first good scrape, after a restart, and every minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

from probe.collect.changes import START_TIME, Observation
from probe.collect.facts import read_facts
from probe.collect.scrape import Scrape, ScrapeError, scrape
from probe.dialects import DialectError, load_dialect
from probe.store import Target

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 10.0
FACTS_EVERY_S, FACTS_RETRY_S = 60.0, 5.0

log = logging.getLogger("kvoncall.collect")


def scrape_timeout(interval_s: float) -> float:
    """Seconds a scrape may take: the interval, within 5 to 10 s (an engine under load answers late)."""
    return min(max(interval_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)


class Collector:
    """Call `sync` with the targets to watch, as often as they may change, and `close` in the end."""

    def __init__(
        self,
        handle: Callable[[Observation], Awaitable[None]],
        facts: Callable[[Target, dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._handle = handle
        self._facts = facts
        # Targets are reached directly: a proxy would answer in place of a dead one.
        self._client = httpx.AsyncClient(trust_env=False, timeout=MAX_TIMEOUT_S)
        self._tasks: dict[str, tuple[tuple[object, ...], asyncio.Task[None]]] = {}

    async def sync(self, targets: Iterable[Target]) -> None:
        """Watch exactly these targets; one whose address, engine or interval changed starts over."""
        wanted = {t.name: t for t in targets}
        for name, (_, task) in self._tasks.items():
            if task.done() and (error := task.exception()) is not None:
                log.error("Watching %s failed and starts again: %r", name, error)
        gone = [
            name
            for name, (key, task) in self._tasks.items()
            if name not in wanted or key != _key(wanted[name]) or task.done()
        ]
        await self._cancel(gone)
        for name, target in wanted.items():
            if name not in self._tasks:
                self._tasks[name] = (_key(target), asyncio.create_task(self._watch(target)))

    async def close(self) -> None:
        """Stop watching."""
        await self._cancel(list(self._tasks))
        await self._client.aclose()

    async def _cancel(self, names: list[str]) -> None:
        tasks = [self._tasks.pop(name)[1] for name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, target: Target) -> None:
        facts_task: asyncio.Task[bool] | None = None
        facts_at, started = float("-inf"), None
        next_at = time.monotonic()
        try:
            while True:
                seen = await self._observe(target)
                await self._handle(seen)
                if seen.scrape is not None:
                    begun = _start_time(seen.scrape)
                    age = time.monotonic() - facts_at
                    done = facts_task is None or facts_task.done()
                    failed = facts_task is not None and facts_task.done() and not facts_task.result()
                    if done and (begun != started or age >= (FACTS_RETRY_S if failed else FACTS_EVERY_S)):
                        facts_task = asyncio.create_task(self._read_facts(target, seen.scrape.info))
                        facts_at, started = time.monotonic(), begun
                # Keep the rhythm; after a slow answer go on from now rather than catching up.
                next_at = max(next_at + target.scrape_interval_s, time.monotonic())
                await asyncio.sleep(next_at - time.monotonic())
        finally:
            if facts_task is not None:
                facts_task.cancel()

    async def _observe(self, target: Target) -> Observation:
        ts = time.time()
        try:
            read = await scrape(
                self._client,
                target.url,
                load_dialect(target.engine),
                target.name,
                ts=ts,
                timeout_s=scrape_timeout(target.scrape_interval_s),
            )
        except (ScrapeError, DialectError) as error:
            return Observation(target, ts, None, str(error))
        return Observation(target, ts, read)

    async def _read_facts(self, target: Target, info: dict[str, str]) -> bool:
        timeout_s = scrape_timeout(target.scrape_interval_s)
        found = await read_facts(self._client, target, info, timeout_s=timeout_s)
        if found:
            await self._facts(target, found)
        return bool(found)


def _key(target: Target) -> tuple[object, ...]:
    return target.url, target.engine, target.scrape_interval_s


def _start_time(read: Scrape) -> float | None:
    return next((s.value for s in read.samples if s.metric == START_TIME), None)
