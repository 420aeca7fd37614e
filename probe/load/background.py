"""A small, endless load from a real trace, so that an idle engine has something to show.

One daemon thread with its own event loop. It cycles the trace for ever, each cycle with new prompts, at `rate`
requests a second on average with the trace's own bursts. It never gives up: while the server is away (restart,
crash, not started yet) it asks again every second, and reads the context length anew when the server is back.
Requests are not streamed, which keeps the client's share of the CPU low.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from probe.load.endpoint import Endpoint, EndpointError, describe
from probe.load.generator import LoadOptions, error_message, request_body
from probe.load.traces import LoadRequest, cut, fit, load_trace, request_at

RETRY_S = 1.0
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BackgroundStatus:
    """`state` is stopped, waiting (no server yet), paused or running; counts are of this object's life."""

    state: str
    rate: float
    sent: int
    completed: int
    failed: int
    last_error: str


class BackgroundLoad:
    """Endless trace traffic against one server; thread-safe."""

    def __init__(
        self,
        base_url: str | Callable[[], str | None],
        *,
        trace: str = "mooncake_conversation",
        rate: float = 1.0,
        concurrency: int = 8,
        api_key: str | None = None,
    ) -> None:
        """`base_url` may be a function that answers None while there is no server. `rate` is requests a second."""
        if rate <= 0 or concurrency < 1:
            raise ValueError("rate must be above 0 and concurrency at least 1")
        self._base_url = base_url
        self._trace = load_trace(trace)
        self._rate = rate
        self._concurrency = concurrency
        self._api_key = api_key
        self._lock = threading.Lock()
        self._counts = {"sent": 0, "completed": 0, "failed": 0}
        self._last_error = ""
        self._waiting = True
        self._running = threading.Event()
        self._running.set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; does nothing when it runs."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            self._stop.clear()
            self._thread = threading.Thread(target=self._main, name="background-load", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; requests in flight are dropped."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def pause(self) -> None:
        """Sends nothing new until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Sends again after `pause`."""
        self._running.set()

    def status(self) -> BackgroundStatus:
        """A snapshot for the page that shows it."""
        alive = self._thread is not None and self._thread.is_alive() and not self._stop.is_set()
        state = "stopped" if not alive else "paused" if not self._running.is_set() else "running"
        if state == "running" and self._waiting:
            state = "waiting"
        with self._lock:
            return BackgroundStatus(state, self._rate, **self._counts, last_error=self._last_error)

    def _main(self) -> None:
        asyncio.run(self._cycle_forever())

    async def _cycle_forever(self) -> None:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        cycle = 0
        async with httpx.AsyncClient(headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            while not self._stop.is_set():
                url = self._base_url if isinstance(self._base_url, str) else self._base_url()
                endpoint = await self._describe(url)
                self._waiting = endpoint is None
                if url is None or endpoint is None:
                    await self._sleep(RETRY_S)
                    continue
                await self._one_cycle(client, url, endpoint, cycle)
                cycle += 1

    async def _describe(self, url: str | None) -> Endpoint | None:
        if url is None:
            return None
        try:
            return await asyncio.to_thread(describe, url, api_key=self._api_key)
        except EndpointError as error:
            self._note_error(str(error))
            return None

    async def _one_cycle(self, client: httpx.AsyncClient, url: str, endpoint: Endpoint, cycle: int) -> None:
        """The whole trace once; returns early when the server is gone."""
        trace = cut(fit(self._trace, endpoint.max_model_len))
        mean_gap = trace.duration_s / max(1, len(trace.rows) - 1)
        lost = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        before = 0.0
        for index, row in enumerate(trace.rows):
            gap, before = row.arrival_s - before, row.arrival_s
            await self._sleep(gap / mean_gap / self._rate if mean_gap > 0 else 1 / self._rate)
            while not self._stop.is_set() and not lost.is_set() and self._held(tasks):
                await asyncio.sleep(0.05)
            if self._stop.is_set() or lost.is_set():
                break
            request = request_at(trace, index, vocab_size=endpoint.vocab_size, seed=cycle)
            task = asyncio.create_task(self._send(client, url, endpoint, request, lost))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks and not self._stop.is_set() and not lost.is_set():
            await asyncio.wait(tasks, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _held(self, tasks: set[asyncio.Task[None]]) -> bool:
        return not self._running.is_set() or len(tasks) >= self._concurrency

    async def _send(
        self, client: httpx.AsyncClient, url: str, endpoint: Endpoint, request: LoadRequest, lost: asyncio.Event
    ) -> None:
        options = LoadOptions(concurrency=self._concurrency, model=endpoint.model)
        self._count("sent")
        try:
            response = await client.post(f"{url}/v1/completions", json=request_body(request, options, stream=False))
        except httpx.TimeoutException:
            self._note_error(f"no answer within {REQUEST_TIMEOUT_S:g} s")
            self._count("failed")
        except httpx.HTTPError as error:
            self._note_error(str(error) or type(error).__name__)
            self._count("failed")
            lost.set()
        else:
            ok = response.status_code == 200
            self._count("completed" if ok else "failed")
            if not ok:
                self._note_error(f"HTTP {response.status_code}: {error_message(response.content)}")

    async def _sleep(self, seconds: float) -> None:
        """Sleeps in short steps, so that `stop` is quick."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self._stop.is_set() and (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, 0.25))

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _note_error(self, text: Any) -> None:
        with self._lock:
            self._last_error = str(text)
