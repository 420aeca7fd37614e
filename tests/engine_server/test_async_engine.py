"""The engine thread and its asyncio face, over a fake LLMEngine that can be slow, stuck or fatal on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.api.app import create_app
from engine.api.serving import Serving
from engine.async_engine import AsyncEngine, ClientGone, EngineDead, Generation, RequestRefused, Submission
from engine.cache_identity import IdentityPolicy
from engine.config import EngineConfig, ModelDims
from engine.metrics import EngineMetrics
from engine.output import RequestOutput
from engine.request import SamplingParams
from engine.scheduler import QueueFull, SchedulerStats

STATS = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, {"free": 1})


class FakeEngine:
    """Gives each request the tokens 0, 1, 2, ... one a step. `gate` holds the thread inside a step."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.identity_policy = IdentityPolicy()
        self.dims = ModelDims("Fake", 1, 1, 1, 1, 1, 1, 256, 64, "float32")
        self.plan = SimpleNamespace(max_model_len=10**9)
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        self.live: dict[str, list[int]] = {}  # request id -> [tokens so far, max_tokens]
        self.aborted: list[str] = []
        self.steps = self.stats_calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.capacity = 100
        self.fatal: BaseException | None = None

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, **_: Any) -> None:
        if len(self.live) >= self.capacity:
            raise QueueFull("the queue is full")
        if not prompt_token_ids:
            raise ValueError("the prompt is empty")
        self.live[request_id] = [0, params.max_tokens]

    def abort_request(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.aborted.append(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[RequestOutput]:
        self.gate.wait()
        if self.fatal is not None:
            raise self.fatal
        self.steps += 1
        outputs = []
        for request_id, state in list(self.live.items()):
            token, limit = state[0], state[1]
            state[0] += 1
            finished = state[0] == limit
            if finished:
                del self.live[request_id]
            outputs.append(
                RequestOutput(
                    request_id,
                    new_text=f"{token} ",
                    new_token_ids=[token],
                    logprobs=None,
                    finished=finished,
                    finish_reason="length" if finished else None,
                    stop_reason=None,
                    num_prompt_tokens=3,
                    num_cached_tokens=0,
                    num_output_tokens=token + 1,
                )
            )
        return outputs

    def stats(self) -> SchedulerStats:
        self.stats_calls += 1
        return STATS


def submission(name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3)) -> Submission:
    return Submission(name, list(prompt), SamplingParams(max_tokens=max_tokens))


class Harness:
    def __init__(self) -> None:
        self.fake = FakeEngine()
        self.deaths: list[BaseException] = []
        self.rejections = 0
        self.engine = AsyncEngine(
            lambda: self.fake,  # type: ignore[arg-type, return-value]
            on_death=self.deaths.append,
            on_rejected=self._reject,
        )
        self.engine.start()

    def _reject(self) -> None:
        self.rejections += 1


@pytest.fixture
def harness() -> Any:
    harness = Harness()
    yield harness
    harness.fake.gate.set()
    assert harness.engine.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def count_wakes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with every `call_soon_threadsafe` on the running loop."""
    loop = asyncio.get_running_loop()
    original, wakes = loop.call_soon_threadsafe, []

    def counted(callback: Any, *args: Any, **options: Any) -> asyncio.Handle:
        wakes.append(callback)
        return original(callback, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    return wakes


async def text_of(generation: Generation) -> str:
    return "".join([delta.new_text async for _, delta in generation.deltas()])


def test_whole_answers_are_merged_and_ordered(harness: Harness) -> None:
    async def test() -> None:
        generation = harness.engine.submit([submission("a", 3), submission("b", 5)], streaming=False)
        first, second = await generation.results()
        assert (first.new_text, first.new_token_ids, first.finish_reason) == ("0 1 2 ", [0, 1, 2], "length")
        assert (second.request_id, second.num_output_tokens) == ("b", 5)

    run(test)


def test_the_loop_wakes_once_for_an_answer_that_does_not_stream(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        wakes = count_wakes(monkeypatch)
        group = [submission(str(i), 50) for i in range(8)]
        results = await harness.engine.submit(group, streaming=False).results()
        assert [len(result.new_token_ids) for result in results] == [50] * 8
        assert len(wakes) == 1

    run(test)


def test_one_wake_a_step_for_all_streams(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        harness.fake.gate.clear()
        streams = [harness.engine.submit([submission(str(i), 20)], streaming=True) for i in range(4)]
        await streams[0].admitted()  # the thread now waits in the first step, or is about to
        wakes = count_wakes(monkeypatch)
        harness.fake.gate.set()
        texts = await asyncio.gather(*map(text_of, streams))
        assert texts == [" ".join(map(str, range(20))) + " "] * 4
        assert len(wakes) <= harness.fake.steps + 3  # and up to three admissions

    run(test)


def test_a_slow_reader_gets_merged_deltas(harness: Harness) -> None:
    async def test() -> None:
        generation = harness.engine.submit([submission("slow", 30)], streaming=True)
        await generation.admitted()
        while harness.fake.live:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        deltas = [delta async for _, delta in generation.deltas()]
        assert len(deltas) == 1
        assert deltas[0].new_token_ids == list(range(30))
        assert deltas[0].finished

    run(test)


def test_refusals_undo_the_whole_group(harness: Harness) -> None:
    async def test() -> None:
        harness.fake.capacity = 2
        for streaming in (False, True):
            group = harness.engine.submit([submission(f"{streaming}{i}") for i in range(3)], streaming=streaming)
            with pytest.raises(QueueFull):
                await (group.admitted() if streaming else group.results())
        assert harness.rejections == 2
        assert len(harness.fake.aborted) == 4
        with pytest.raises(RequestRefused, match="empty"):
            await harness.engine.submit([submission("x", prompt=())], streaming=False).results()
        assert harness.rejections == 2

    run(test)


def test_abort_reaches_the_engine_and_frees_the_waiter(harness: Harness) -> None:
    async def test() -> None:
        generation = harness.engine.submit([submission("a", 10**9)], streaming=False)
        waiter = asyncio.create_task(generation.results())
        while not harness.fake.live:
            await asyncio.sleep(0.01)
        generation.abort()
        with pytest.raises(ClientGone):
            await waiter
        while not harness.fake.aborted:
            await asyncio.sleep(0.01)
        generation.abort()  # a second one does nothing
        await harness.engine.call(lambda _: None)
        assert harness.fake.aborted == ["a"]

    run(test)


def test_call_runs_between_steps_and_keeps_exceptions_to_the_caller(harness: Harness) -> None:
    async def test() -> None:
        harness.engine.submit([submission("a", 10**9)], streaming=False)
        names = {await harness.engine.call(lambda _: threading.current_thread().name) for _ in range(5)}
        assert names == {"engine"}
        with pytest.raises(ZeroDivisionError):
            await harness.engine.call(lambda _: 1 // 0)
        assert harness.engine.is_alive
        assert await harness.engine.call(lambda engine: engine is harness.fake)

    run(test)


def test_a_stuck_step_does_not_hold_up_a_scrape(harness: Harness) -> None:
    async def test() -> None:
        harness.fake.gate.clear()
        harness.engine.submit([submission("a")], streaming=False)
        await harness.engine.refresh_stats(timeout_s=0.05)
        assert harness.engine.stats is STATS
        assert harness.engine.is_alive

    run(test)


def test_idle_engine_sleeps(harness: Harness) -> None:
    async def test() -> None:
        await harness.engine.submit([submission("a")], streaming=False).results()
        await harness.engine.call(lambda _: None)
        await asyncio.sleep(0.1)
        steps, stats_calls = harness.fake.steps, harness.fake.stats_calls
        await asyncio.sleep(0.5)
        assert (harness.fake.steps, harness.fake.stats_calls) == (steps, stats_calls)

    run(test)


def test_death_answers_everybody(harness: Harness) -> None:
    async def test() -> None:
        harness.fake.gate.clear()
        whole = harness.engine.submit([submission("w")], streaming=False)
        stream = harness.engine.submit([submission("s")], streaming=True)
        fatal = RuntimeError("kernel fault")
        harness.fake.fatal = fatal
        late = asyncio.gather(
            *(harness.engine.submit([submission(f"late{i}")], streaming=False).results() for i in range(3)),
            harness.engine.call(lambda _: None),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        harness.fake.gate.set()
        for waiting in (whole.results(), text_of(stream)):
            with pytest.raises(EngineDead):
                await waiting
        assert all(isinstance(error, EngineDead) or error is None for error in await late)
        assert harness.deaths == [fatal]
        assert not harness.engine.is_alive
        with pytest.raises(EngineDead, match="kernel fault"):
            harness.engine.submit([submission("after")], streaming=False)
        with pytest.raises(EngineDead):
            await harness.engine.call(lambda _: None)
        await harness.engine.refresh_stats(1)  # a scrape still works

    run(test)


def test_abort_all_ends_what_is_in_flight(harness: Harness) -> None:
    async def test() -> None:
        stream = harness.engine.submit([submission("s", 10**9)], streaming=True)
        await stream.admitted()
        harness.engine.abort_all()
        with pytest.raises(EngineDead, match="shutting down"):
            await text_of(stream)
        assert harness.engine.is_alive

    run(test)


def test_a_failed_build_is_raised_by_start() -> None:
    def build() -> Any:
        raise MemoryError("no room")

    engine = AsyncEngine(build, on_death=lambda _: None)
    with pytest.raises(MemoryError):
        engine.start()


def test_http_face_of_a_dying_engine(harness: Harness) -> None:
    """200 with an error as the last event for a stream, 503 for the rest, and an unhealthy /health."""
    metrics = EngineMetrics(harness.fake.config, lambda: harness.engine.stats)
    app = create_app(Serving(harness.engine, harness.fake, metrics, time.time()))  # type: ignore[arg-type]
    body = {"prompt": "abc", "max_tokens": 10**8}

    async def test() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            assert (await client.get("/health")).status_code == 200
            stream = asyncio.create_task(client.post("/v1/completions", json=body | {"stream": True}))
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(harness.fake.live) < 2:
                await asyncio.sleep(0.001)
            harness.fake.fatal = RuntimeError("kernel fault")
            events = (await stream).text.split("\n\n")
            assert (await stream).status_code == 200
            assert events[-2] == "data: [DONE]"
            assert json.loads(events[-3][6:])["error"]["code"] == "engine_dead"
            answer = await whole
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200
            assert (await client.get("/debug/scheduler")).status_code == 503

    run(test)
