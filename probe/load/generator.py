"""Sends requests to an OpenAI-compatible server and measures what a client feels.

Open loop (`timed=True`): each request goes out at its own arrival time whatever the server does; that is how an
overload shows. Closed loop: `concurrency` requests are always in flight. Every run is bounded in count (the plan)
and in time (`max_duration_s`), and ends early when the server is gone. Streams are read event by event; only the
first and last events are parsed, so that the client costs little beside the engine it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from probe.load.report import LoadReport, RequestRecord
from probe.load.traces import LoadRequest

CONNECT_FAILURES_BEFORE_DEAD = 3


@dataclass(frozen=True)
class LoadOptions:
    """How to send. Times in seconds; `concurrency` caps requests in flight in both loops (None: no cap)."""

    concurrency: int | None = None
    timed: bool = False
    speedup: float = 1.0
    model: str = "testbed"
    api_key: str | None = None
    request_timeout_s: float = 60.0
    max_duration_s: float = 120.0
    ignore_eos: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.timed and self.speedup <= 0:
            raise ValueError(f"speedup must be above 0, got {self.speedup}")
        if not self.timed and (self.concurrency is None or self.concurrency < 1):
            raise ValueError("a closed loop needs a concurrency of at least 1")


@dataclass
class _Run:
    """State of one run; everything happens on one event loop."""

    base_url: str
    options: LoadOptions
    client: httpx.AsyncClient
    on_record: Callable[[RequestRecord], None] | None
    started: float = field(default_factory=time.perf_counter)
    records: list[RequestRecord] = field(default_factory=list)
    connect_failures: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str | None = None
    server_died: bool = False

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def halt(self, reason: str) -> None:
        if self.stop_reason is None:
            self.stop_reason = reason
        self.stop.set()

    def keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)
        if record.error in ("connect", "disconnected"):
            self.connect_failures += 1
        elif record.status is not None:
            self.connect_failures = 0


async def run_load(
    base_url: str,
    requests: Sequence[LoadRequest],
    options: LoadOptions,
    *,
    on_record: Callable[[RequestRecord], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> LoadReport:
    """Sends all `requests` to `base_url` (without /v1) and returns what was measured; never raises on server errors.

    `on_record` is called for each finished request; `cancelled` is asked often and ends the run when true.
    """
    started_at = time.time()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(options.request_timeout_s, connect=5.0, pool=None)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    # Plain HTTP needs no TLS context, which takes longer to build than a short run.
    tls = base_url.startswith("https")
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, headers=headers, trust_env=False, verify=tls
    ) as client:
        run = _Run(base_url.rstrip("/"), options, client, on_record)
        guard = asyncio.create_task(_guard(run, cancelled))
        try:
            await _send_all(run, requests)
        finally:
            guard.cancel()
        if run.connect_failures and not run.server_died and not await _alive(run):
            run.server_died = True
        return LoadReport(
            started_at, run.elapsed(), len(requests), tuple(run.records), run.server_died, run.stop_reason
        )


async def _send_all(run: _Run, requests: Sequence[LoadRequest]) -> None:
    """Starts each request in its turn; when the run is halted, cancels those in flight (they count as failed)."""
    slots = asyncio.Semaphore(run.options.concurrency) if run.options.concurrency else None
    tasks: set[asyncio.Task[None]] = set()
    for request in requests:
        if run.options.timed:
            await _wait(run.stop, request.arrival_s / run.options.speedup - run.elapsed())
        if slots is not None and not run.stop.is_set():
            await _first_of(slots.acquire(), run.stop.wait())
        if run.stop.is_set():
            break
        task = asyncio.create_task(_send(run, request, slots))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    waiting = asyncio.create_task(run.stop.wait())
    while tasks and not run.stop.is_set():
        await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)


async def _first_of(*awaitables: Any) -> None:
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _guard(run: _Run, cancelled: Callable[[], bool] | None) -> None:
    """Halts the run when its time is over, the caller wants it, or the server stopped answering."""
    while True:
        await asyncio.sleep(0.1)
        if run.elapsed() > run.options.max_duration_s:
            run.halt(f"time limit of {run.options.max_duration_s:g} s reached")
        elif cancelled is not None and cancelled():
            run.halt("stopped by the caller")
        elif run.connect_failures >= CONNECT_FAILURES_BEFORE_DEAD and not await _alive(run):
            run.server_died = True
            run.halt("the server does not answer any more")


async def _alive(run: _Run) -> bool:
    try:
        await run.client.get(f"{run.base_url}/health", timeout=2.0)
    except httpx.HTTPError:
        return False
    return True


async def _send(run: _Run, request: LoadRequest, slots: asyncio.Semaphore | None) -> None:
    started_s = run.elapsed()
    try:
        record = await _stream_one(run, request, started_s)
    except asyncio.CancelledError:
        run.keep(RequestRecord(request.request_id, started_s, error="cancelled", e2e_s=run.elapsed() - started_s))
        raise
    except httpx.HTTPError as error:
        kind = _kind_of(error)
        record = RequestRecord(
            request.request_id,
            started_s,
            error=kind,
            error_message=str(error) or type(error).__name__,
            e2e_s=run.elapsed() - started_s,
        )
    finally:
        if slots is not None:
            slots.release()
    run.keep(record)


def _kind_of(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "disconnected"


def request_body(request: LoadRequest, options: LoadOptions, *, stream: bool) -> dict[str, Any]:
    """The JSON of a `/v1/completions` call; streams ask for usage in their last event."""
    body: dict[str, Any] = {
        "model": options.model,
        "prompt": list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return body


async def _stream_one(run: _Run, request: LoadRequest, started_s: float) -> RequestRecord:
    """One streamed completion; HTTP errors and broken streams become records, transport errors are raised."""
    begin = time.perf_counter()
    events = _Events()
    body = request_body(request, run.options, stream=True)
    async with run.client.stream("POST", f"{run.base_url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            message = error_message(await response.aread())
            return RequestRecord(
                request.request_id,
                started_s,
                response.status_code,
                f"http_{response.status_code}",
                message,
                e2e_s=time.perf_counter() - begin,
            )
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                events.take(line[5:].strip(), time.perf_counter())
    return events.record(request, started_s, begin)


@dataclass
class _Events:
    """The events of one stream, read cheaply: text events are timed, not parsed, except the newest one."""

    first: float | None = None
    last: float | None = None
    last_text: str = ""
    usage_text: str = ""
    error_text: str = ""
    done: bool = False

    def take(self, data: str, now: float) -> None:
        if data == "[DONE]":
            self.done = True
        elif '"error"' in data and '"choices"' not in data:
            self.error_text = data
        elif '"choices":[]' in data or '"choices": []' in data:
            self.usage_text = data
        else:
            self.first = now if self.first is None else self.first
            self.last, self.last_text = now, data

    def record(self, request: LoadRequest, started_s: float, begin: float) -> RequestRecord:
        end = time.perf_counter()
        usage = (_json(self.usage_text) or _json(self.last_text)).get("usage") or {}
        choices = _json(self.last_text).get("choices") or [{}]
        finish_reason = choices[0].get("finish_reason")
        output = int(usage.get("completion_tokens") or 0)
        error, message = None, ""
        if self.error_text:
            error, message = "stream_error", error_message(self.error_text.encode())
        elif not self.done or finish_reason is None:
            error, message = "incomplete", "the stream ended before its last event"
        itl = None
        if self.first is not None and self.last is not None and output > 1:
            itl = (self.last - self.first) / (output - 1)
        return RequestRecord(
            request.request_id,
            started_s,
            200,
            error,
            message,
            ttft_s=None if self.first is None else self.first - begin,
            itl_mean_s=itl,
            e2e_s=end - begin,
            prompt_tokens=int(usage.get("prompt_tokens") or request.prompt_tokens),
            output_tokens=output,
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            finish_reason=finish_reason,
        )


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def error_message(body: bytes) -> str:
    """The sentence of an OpenAI-shaped error, or the start of whatever came."""
    error = _json(body.decode("utf-8", "replace")).get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))[:300]
    return (str(error) if error else body.decode("utf-8", "replace"))[:300]
