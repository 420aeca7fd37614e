"""The thread that owns the LLMEngine, and the asyncio face of it.

Invariants: only the engine thread touches the LLMEngine; everybody else sends it commands, which run
between two steps. All outputs of a step reach the event loop in one `call_soon_threadsafe`. Requests
that do not stream are collected in the thread and wake the loop once, when the last of their group ends.
The thread sleeps on its command queue when no request is unfinished.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from engine.cache_identity import ANONYMOUS, CacheIdentity
from engine.scheduler import QueueFull

if TYPE_CHECKING:
    from engine.engine import LLMEngine, RequestOutput
    from engine.request import SamplingParams
    from engine.scheduler import SchedulerStats

log = logging.getLogger("engine")
T = TypeVar("T")

STATS_INTERVAL_S = 0.1  # how old the published statistics may grow while steps run


STOPPED = "the engine has stopped"
Command = Callable[["LLMEngine | None"], None]  # runs in the engine thread; None: the engine is no more


class EngineDead(RuntimeError):  # noqa: N818 (a state, which the API reports)
    """The engine thread has ended; no request can be served by this process."""


class RequestRefused(Exception):  # noqa: N818 (the client's error, not ours)
    """The engine cannot serve this request; the message is for the client."""


class ClientGone(Exception):  # noqa: N818 (not an error: the client hung up)
    """The request was aborted because its client disconnected."""


@dataclass(frozen=True)
class Submission:
    """One sequence to generate: what `LLMEngine.add_request` takes."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    identity: CacheIdentity = ANONYMOUS
    priority: int = 0
    fork_of: str | None = None  # the request whose blocks it may start from
    model_token_ids: list[int] | None = None


class Generation:
    """A group of sequences answered together (prompts x n), as the event loop sees it.

    `parts` and `unfinished` belong to the engine thread, everything else to the event loop.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        *,
        streaming: bool,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[Generation], None],
    ) -> None:
        self.submissions = submissions
        self.streaming = streaming
        self.loop = loop
        self.unfinished = len(submissions)
        self.parts: list[list[RequestOutput]] = [[] for _ in submissions]
        self._cancel = cancel
        self._pending: list[tuple[int, RequestOutput]] = []
        self._wake = asyncio.Event()
        self._admitted: asyncio.Future[None] = loop.create_future()
        self._finished: asyncio.Future[list[RequestOutput]] = loop.create_future()

    async def admitted(self) -> None:
        """Returns once the scheduler has the group; raises what refused it (`QueueFull`, `RequestRefused`)."""
        await self._admitted

    async def results(self) -> list[RequestOutput]:
        """One merged output a submission, in order.

        Raises `QueueFull`, `RequestRefused`, `EngineDead` or `ClientGone`.
        """
        return await self._finished

    async def deltas(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the submission, delta) as they come; what piled up for one index is merged."""
        unfinished = len(self.submissions)
        while unfinished:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, []
            by_index: dict[int, list[RequestOutput]] = {}
            for index, output in pending:
                by_index.setdefault(index, []).append(output)
            for index, outputs in by_index.items():
                delta = merge_outputs(outputs)
                unfinished -= delta.finished
                yield index, delta
            if self._finished.done() and unfinished and not self._pending:
                self._finished.result()  # raises what ended the stream early

    def abort(self) -> None:
        """Stops the work for a client that is gone; does nothing on a finished generation. Event loop only."""
        if not self._finished.done():
            self.fail(ClientGone())
            self._cancel(self)

    def push(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """Takes deltas of a stream. Event loop only."""
        self._pending += outputs
        self._wake.set()

    def finish(self, results: list[RequestOutput]) -> None:
        """Takes the end of the group. Event loop only."""
        if not self._finished.done():
            self._finished.set_result(results)

    def admit(self) -> None:
        """Notes that the scheduler has the group. Event loop only."""
        if not self._admitted.done():
            self._admitted.set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends the group with an error. Event loop only."""
        for future in (self._admitted, self._finished):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: not every path awaits both
        self._wake.set()


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that says what consecutive deltas of one request said."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs = None
    if last.logprobs is not None:
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return dataclasses.replace(
        last,
        new_text="".join(output.new_text for output in outputs),
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        logprobs=logprobs,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


class AsyncEngine:
    """Runs an LLMEngine in a thread of its own.

    `build` constructs the LLMEngine inside that thread, so that torch's thread pools and the measured
    memory are those of the steps. `on_death` is called in the thread when a step or a command raises.
    """

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        *,
        on_death: Callable[[BaseException], None],
        on_rejected: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._on_death = on_death
        self._on_rejected = on_rejected
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closed = False  # guarded by _sending: no command is queued once the thread stopped reading
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready: Future[LLMEngine] = Future()
        self._active: dict[str, tuple[Generation, int]] = {}
        self._error: BaseException | None = None
        self._stopping = False
        self._next_stats = 0.0
        self.stats: SchedulerStats | None = None

    # Called from the event loop or the main thread.

    def start(self) -> LLMEngine:
        """Starts the thread and waits for the engine to be built; raises what building raised.

        The returned engine may be read for what never changes (config, dims, plan, tokenizer).
        """
        self._thread.start()
        return self._ready.result()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread after the step in progress; False when it has not ended in time."""
        self._stopping = True
        with contextlib.suppress(EngineDead):
            self._send(lambda _: None)  # wakes it
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._error is None and not self._stopping and self._thread.is_alive()

    def submit(self, submissions: Sequence[Submission], *, streaming: bool) -> Generation:
        """Hands a group of sequences to the engine. Call it on the event loop; raises `EngineDead`."""
        loop = asyncio.get_running_loop()
        generation = Generation(submissions, streaming=streaming, loop=loop, cancel=self._cancel)
        self._send(lambda engine: self._admit(generation, engine))
        return generation

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Runs `function(engine)` between two steps and returns what it returns; raises `EngineDead`.

        An exception of `function` is the caller's and does not end the engine, except `MemoryError`.
        """
        future: Future[T] = Future()

        def command(engine: LLMEngine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise EngineDead(STOPPED)
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, MemoryError):
                    raise

        self._send(command)
        return await asyncio.wrap_future(future)

    async def refresh_stats(self, timeout_s: float) -> None:
        """Brings `stats` up to date, unless a step takes longer than `timeout_s` or the engine is dead."""
        if self.is_alive:
            try:
                await asyncio.wait_for(self.call(self._publish_stats), timeout_s)
            except (TimeoutError, EngineDead):
                return

    def die(self, error: BaseException) -> None:
        """Reports a failure outside the engine thread that the process must not survive, as memory running out."""
        self._error = error
        self._on_death(error)

    def abort_all(self) -> None:
        """Ends every request in flight with `EngineDead`, as a shutdown does."""
        with contextlib.suppress(EngineDead):
            self._send(lambda engine: self._drop_all(EngineDead("the engine is shutting down"), engine))

    def _cancel(self, generation: Generation) -> None:
        with contextlib.suppress(EngineDead):
            self._send(lambda engine: self._drop(generation, engine))

    def _send(self, command: Command) -> None:
        with self._sending:
            if self._closed:
                raise EngineDead(STOPPED if self._error is None else f"the engine died: {self._error}")
            self._commands.put(command)

    # Engine thread only, from here on.

    def _run(self) -> None:
        try:
            engine = self._build()
            self.stats = engine.stats()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        try:
            while not self._stopping:
                self._run_commands(engine)
                if engine.has_unfinished_requests():
                    self._deliver(engine.step())
                    if time.monotonic() >= self._next_stats:
                        self._publish_stats(engine)
        except BaseException as error:
            self._error = error
            self._on_death(error)
        self._close()

    def _run_commands(self, engine: LLMEngine) -> None:
        """Runs what was asked meanwhile; sleeps when there is nothing else to do."""
        idle = not engine.has_unfinished_requests()
        if idle:
            self._publish_stats(engine)
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                self._commands.get(block=idle)(engine)
                idle = False

    def _close(self) -> None:
        """Answers everybody who still waits."""
        with self._sending:
            self._closed = True
        while not self._commands.empty():
            self._commands.get()(None)
        self._drop_all(EngineDead(STOPPED), None)

    def _admit(self, generation: Generation, engine: LLMEngine | None) -> None:
        try:
            if engine is None:
                raise EngineDead(STOPPED)
            for index, item in enumerate(generation.submissions):
                engine.add_request(
                    item.request_id,
                    item.prompt_token_ids,
                    item.params,
                    identity=item.identity,
                    priority=item.priority,
                    fork_of=item.fork_of,
                    model_token_ids=item.model_token_ids,
                )
                self._active[item.request_id] = (generation, index)
        except (QueueFull, ValueError, EngineDead) as error:
            if isinstance(error, QueueFull):
                self._on_rejected()
            refusal = RequestRefused(str(error)) if isinstance(error, ValueError) else error
            self._drop(generation, engine)
            self._post(generation.loop, functools.partial(generation.fail, refusal))
        else:
            if generation.streaming:
                self._post(generation.loop, generation.admit)

    def _drop(self, generation: Generation, engine: LLMEngine | None) -> None:
        """Forgets what is left of a group, and tells the engine while there is one."""
        for item in generation.submissions:
            if self._active.pop(item.request_id, None) is not None and engine is not None:
                engine.abort_request(item.request_id)

    def _drop_all(self, error: Exception, engine: LLMEngine | None) -> None:
        groups = {id(generation): generation for generation, _ in self._active.values()}
        for generation in groups.values():
            self._drop(generation, engine)
            self._post(generation.loop, functools.partial(generation.fail, error))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        streams: dict[int, tuple[Generation, list[tuple[int, RequestOutput]]]] = {}
        finished: list[Generation] = []
        for output in outputs:
            generation, index = self._active.get(output.request_id, (None, 0))
            if generation is None:
                continue  # aborted meanwhile
            if generation.streaming:
                streams.setdefault(id(generation), (generation, []))[1].append((index, output))
            else:
                generation.parts[index].append(output)
            if output.finished:
                del self._active[output.request_id]
                generation.unfinished -= 1
                if not generation.unfinished:
                    finished.append(generation)
        if streams or finished:
            loop = (finished[0] if finished else next(iter(streams.values()))[0]).loop
            self._post(loop, lambda: _hand_over(list(streams.values()), finished))

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("event loop is closed; an output was dropped")

    def _publish_stats(self, engine: LLMEngine) -> None:
        self.stats = engine.stats()
        self._next_stats = time.monotonic() + STATS_INTERVAL_S


def _hand_over(streams: list[tuple[Generation, list[tuple[int, RequestOutput]]]], finished: list[Generation]) -> None:
    """Runs on the event loop: gives each generation what a step brought it."""
    for generation, outputs in streams:
        generation.push(outputs)
    for generation in finished:
        generation.finish([merge_outputs(parts) for parts in generation.parts if parts])
