"""The loop over targets: each has a task of its own, so that a slow one delays no other.

Runs in the caller's asyncio loop and keeps its rhythm by the monotonic clock: targets are spread over their interval
by a hash of their names, as Prometheus spreads them. Every attempt, good or bad, becomes one `Observation`; `facts`
reports what a target says about itself after its first good scrape, after a restart, and every minute.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from probe.collect.access import Access, AccessError, access_from
from probe.collect.changes import START_TIME, Finding, Observation
from probe.collect.clock import SteadyClock
from probe.collect.exposition import ExpositionReader, ScrapeError
from probe.collect.facts import read_facts
from probe.collect.nvml import GpuReader
from probe.collect.prometheus import PrometheusServer
from probe.collect.prometheus_target import PrometheusTarget
from probe.collect.scrape import Scrape, dialect_of, scrape
from probe.dialects import DialectError
from probe.store import Sample, Target

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 10.0
FACTS_EVERY_S, FACTS_RETRY_S = 60.0, 5.0
GPU_TIMEOUT_S = 2.0
SPREAD_FROM = 5  # with fewer new targets at once the first scrape need not wait for its turn
LATE_S = 0.5
# Servers close idle connections after 5 s (uvicorn): one that may just be closing is not used again.
KEEP_ALIVE_S = 4.0

Read = Callable[[Target], Awaitable[list[Observation]]]

log = logging.getLogger("kvoncall.collect")


def scrape_timeout(interval_s: float) -> float:
    """Seconds a scrape may take: the interval, within 5 to 10 s (an engine under load answers late)."""
    return min(max(interval_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)


@dataclass
class CollectorStats:
    """What the collector did since it began.

    `seconds`: from the begin to the end of scrapes, summed. `late` counts scrapes that began more than 0.5 s after
    their turn, `max_late_s` is the worst. `missed` counts turns left out because the scrape before was not over.
    `refused` are samples left out, by what `Scrape.refused` says.
    """

    scrapes: int = 0
    failures: int = 0
    samples: int = 0
    refused: int = 0
    seconds: float = 0.0
    late: int = 0
    max_late_s: float = 0.0
    missed: int = 0


class Collector:
    """Call `sync` with the targets to watch, as often as they may change, and `close` in the end."""

    def __init__(
        self,
        handle: Callable[[Observation], Awaitable[None]],
        facts: Callable[[Target, dict[str, Any]], Awaitable[None]],
        clock: SteadyClock | None = None,
        gpus: GpuReader | None = None,
    ) -> None:
        self._handle = handle
        self._facts = facts
        self._clock = clock or SteadyClock()
        self._gpus = gpus or GpuReader()
        # Of its own: a driver that hangs must not hold a thread that others need, or that a stop waits for.
        self._gpu_thread = ThreadPoolExecutor(1, thread_name_prefix="kvoncall-nvml")
        self._gpu_read: asyncio.Future[list[Sample]] | None = None
        self._said_absent: set[str] = set()
        self._contexts: dict[bool | str, ssl.SSLContext] = {}
        self._clients: dict[str, tuple[bool | str, httpx.AsyncClient]] = {}  # by target
        self._servers: list[tuple[str, Access, PrometheusServer]] = []
        self._targets: dict[str, Target] = {}
        self._tasks: dict[str, tuple[tuple[object, ...], asyncio.Task[None]]] = {}
        self._stats = CollectorStats()

    def stats(self) -> CollectorStats:
        """A copy of the counters; safe from any thread."""
        return replace(self._stats)

    async def sync(self, targets: Iterable[Target]) -> None:
        """Watch exactly these targets; one whose address, engine, options or interval changed starts over."""
        wanted = self._targets = {t.name: t for t in targets}
        for name, (_, task) in self._tasks.items():
            if task.done() and (error := task.exception()) is not None:
                log.error("Watching %s failed and starts again: %r", name, error)
        gone = [
            name
            for name, (key, task) in self._tasks.items()
            if name not in wanted or key != _key(wanted[name]) or task.done()
        ]
        await self._cancel(gone)
        new = [target for name, target in wanted.items() if name not in self._tasks]
        for target in new:
            delay_s = _phase_s(target) if len(new) >= SPREAD_FROM else 0.0
            self._tasks[target.name] = (_key(target), asyncio.create_task(self._watch(target.name, delay_s)))

    async def close(self) -> None:
        """Stop watching."""
        await self._cancel(list(self._tasks))
        for _, _, server in self._servers:
            server.close()
        if self._gpu_read is None or self._gpu_read.done():
            self._gpus.close()
        self._gpu_thread.shutdown(wait=False)

    async def _cancel(self, names: list[str]) -> None:
        tasks = [self._tasks.pop(name)[1] for name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in names:
            await self._close_client(name)

    async def _watch(self, name: str, delay_s: float) -> None:
        target = self._targets[name]
        read = self._prometheus() if target.source == "prometheus" else self._metrics()
        facts_task: asyncio.Task[bool] | None = None
        facts_at, started = float("-inf"), None
        due = time.monotonic() + delay_s
        try:
            while True:
                await asyncio.sleep(due - time.monotonic())
                self._began(due)
                target = self._targets[name]  # facts may be newer
                seen: Observation | None = None
                for seen in await read(target):
                    self._count(seen)
                    await self._handle(seen)
                if seen is not None and seen.scrape is not None:
                    begun = _start_time(seen.scrape)
                    age = time.monotonic() - facts_at
                    done = facts_task is None or facts_task.done()
                    failed = facts_task is not None and facts_task.done() and not facts_task.result()
                    if done and (begun != started or age >= (FACTS_RETRY_S if failed else FACTS_EVERY_S)):
                        facts_task = asyncio.create_task(self._read_facts(target, seen.scrape.info))
                        facts_at, started = time.monotonic(), begun
                due = self._next_turn(due, target.scrape_interval_s)
        finally:
            if facts_task is not None:
                facts_task.cancel()

    def _began(self, due: float) -> None:
        late_s = max(0.0, time.monotonic() - due)
        self._stats.late += late_s > LATE_S
        self._stats.max_late_s = max(self._stats.max_late_s, late_s)

    def _next_turn(self, due: float, interval_s: float) -> float:
        """The next turn in the rhythm; turns that passed meanwhile are missed, not made up for."""
        passed = int(max(0.0, time.monotonic() - due) // interval_s)
        self._stats.missed += passed
        return due + (passed + 1) * interval_s

    def _count(self, seen: Observation) -> None:
        stats = self._stats
        stats.scrapes += 1
        stats.seconds += seen.duration_s
        stats.samples += len(seen.samples)
        if seen.scrape is None:
            stats.failures += 1
        else:
            stats.refused += sum(seen.scrape.refused.values())

    def _metrics(self) -> Read:
        """Reads the target's own exposition, and its GPUs where it asks for them."""
        reader = ExpositionReader()

        async def read(target: Target) -> list[Observation]:
            ts, begun = self._clock.now(), time.monotonic()
            gpus = target.kind == "embedded" or target.options.get("nvml")
            devices = asyncio.create_task(self._read_gpus(target, ts)) if gpus else None
            found: Scrape | None = None
            error: str | None = None
            try:
                access = access_from(target.options, target.url)
                found = await scrape(
                    await self._client(target.name, access),
                    target.url,
                    dialect_of(target),
                    target.name,
                    ts=ts,
                    timeout_s=scrape_timeout(target.scrape_interval_s),
                    headers=access.headers,
                    reader=reader,
                )
            except (ScrapeError, DialectError, AccessError) as failure:
                error = str(failure)
            duration_s = time.monotonic() - begun
            extra, findings = await devices if devices else ((), ())
            return [Observation(target, ts, found, error, duration_s, True, extra, findings)]

        return read

    def _prometheus(self) -> Read:
        """Reads what a Prometheus server scraped from the target."""
        source: list[PrometheusTarget] = []

        async def read(target: Target) -> list[Observation]:
            now = self._clock.now()
            try:
                server = self._server(target.url, access_from(target.options, target.url))
                if not source or source[0].server is not server:
                    source[:] = [PrometheusTarget(server)]
                return await server.run(lambda: source[0].read(target, now))
            except (DialectError, AccessError) as error:
                return [Observation(target, now, None, str(error), known=False)]

        return read

    async def _read_gpus(self, target: Target, ts: float) -> tuple[tuple[Sample, ...], tuple[Finding, ...]]:
        """Samples of the GPUs; none while a driver that hangs has not answered the read before."""
        if self._gpu_read is not None and not self._gpu_read.done():
            return (), ()
        loop = asyncio.get_running_loop()
        self._gpu_read = loop.run_in_executor(self._gpu_thread, self._gpus.read, target.name, ts)
        try:
            samples = await asyncio.wait_for(asyncio.shield(self._gpu_read), GPU_TIMEOUT_S)
        except TimeoutError:
            return (), ()
        findings = [
            Finding("gpu_xid", f"GPU {gpu} reported XID {xid}.", "critical", {"gpu": gpu, "xid": xid})
            for gpu, xid in self._gpus.new_xids()
        ]
        absent = self._gpus.absent
        if absent and target.options.get("nvml") and target.name not in self._said_absent:
            self._said_absent.add(target.name)
            findings.append(Finding("gpu_absent", absent, "info"))
        return tuple(samples), tuple(findings)

    async def _read_facts(self, target: Target, info: dict[str, str]) -> bool:
        timeout_s = scrape_timeout(target.scrape_interval_s)
        try:
            access = access_from(target.options, target.url)
            client = await self._client(target.name, access)
        except AccessError:
            return False  # every scrape says so
        found = await read_facts(client, target, info, timeout_s=timeout_s, headers=access.headers)
        if found:
            await self._facts(target, found)
        return bool(found)

    async def _client(self, name: str, access: Access) -> httpx.AsyncClient:
        """The target's client; raises `AccessError`.

        Each has one: a pool looks at all its connections at every request. Contexts, which are dear, are shared.
        """
        verify, client = self._clients.get(name, (None, None))
        if client is None or verify != access.verify:
            await self._close_client(name)
            if access.verify not in self._contexts:
                self._contexts[access.verify] = access.ssl_context()
            client = httpx.AsyncClient(
                trust_env=False,  # targets are reached directly: a proxy would answer in place of a dead one
                verify=self._contexts[access.verify],
                timeout=MAX_TIMEOUT_S,
                limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
            )
            self._clients[name] = access.verify, client
        return client

    async def _close_client(self, name: str) -> None:
        known = self._clients.pop(name, None)
        if known is not None:
            await known[1].aclose()

    def _server(self, url: str, access: Access) -> PrometheusServer:
        for known, how, server in self._servers:
            if (known, how) == (url, access):
                return server
        server = PrometheusServer(url, access, timeout_s=MAX_TIMEOUT_S)
        self._servers.append((url, access, server))
        return server


def _key(target: Target) -> tuple[object, ...]:
    return target.url, target.engine, target.scrape_interval_s, target.source, repr(sorted(target.options.items()))


def _phase_s(target: Target) -> float:
    """Where in its interval a target is scraped: the same after every start."""
    return zlib.crc32(target.name.encode()) / 2**32 * target.scrape_interval_s


def _start_time(read: Scrape) -> float | None:
    return next((s.value for s in read.samples if s.metric == START_TIME), None)
