"""What goes over the wire for a caller, and what is read from an answer of either shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from probe.isolation.client import Answer, Caller, IsolationClient, ProbeError

PROMPT = "ax=37;" * 8 + "?ax>"  # 27 tokens: one full block
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def ask(server: Any) -> Callable[..., Answer]:
    """One request, by a client of its own."""

    def once(*args: Any, **more: Any) -> Answer:
        async def go() -> Answer:
            async with IsolationClient(server.url + "/v1/", "testbed", api_key="key") as client:
                return await client.ask(*args, **more)

        return asyncio.run(go())

    return once


def test_a_caller_is_told_by_headers_and_fields(server: Any, ask: Callable[..., Answer]) -> None:
    ask(PROMPT, Caller("acme", "s1", "ann", "salt"), seed=3)
    assert server.headers[0]["x-tenant-id"] == "acme"
    assert server.headers[0]["x-session-id"] == "s1"
    assert server.headers[0]["authorization"] == "Bearer key"
    body = server.bodies[0]
    assert (body["user"], body["cache_salt"], body["seed"], body["model"]) == ("ann", "salt", 3, "testbed")
    ask(PROMPT, Caller())
    assert not {"x-tenant-id", "x-session-id"} & server.headers[1].keys()
    assert not {"user", "cache_salt", "seed", "n", "logprobs"} & server.bodies[1].keys()


@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["completion", "chat"])
def test_answers_whole_and_streamed_tell_the_same(server: Any, ask: Callable[..., Answer], prompt: Any) -> None:
    whole = ask(prompt, logprobs=5)
    assert (whole.text, whole.cached_tokens, whole.prompt_tokens, whole.ttft_s) == ("37", 0, 27, None)
    assert whole.logprobs == ({"x": -0.01, "y": -5.0},)
    streamed = ask(prompt, stream=True)
    assert (streamed.text, streamed.cached_tokens, streamed.prompt_tokens) == ("37", 16, 27)
    assert streamed.ttft_s is not None
    assert streamed.ttft_s > 0
    assert streamed.logprobs is None
    asked = [(body.get("logprobs"), body.get("top_logprobs")) for body in server.bodies]
    assert asked[0] == ((5, None) if prompt is PROMPT else (True, 5))
    assert server.bodies[1]["stream_options"] == {"include_usage": True}


def test_all_choices_are_told(ask: Callable[..., Answer]) -> None:
    assert ask(PROMPT, n=3).choices == ("37", "37", "37")


def test_counts_a_server_keeps_to_itself_are_none(server: Any, ask: Callable[..., Answer]) -> None:
    server.cache.tells = False
    assert ask(PROMPT).cached_tokens is None
    assert ask(PROMPT, stream=True).cached_tokens is None


@pytest.mark.parametrize(("status", "final"), [(400, True), (404, True), (429, False), (500, False)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_says_what_the_server_said(
    server: Any, ask: Callable[..., Answer], status: int, final: bool, stream: bool
) -> None:
    server.fault = lambda n: status
    with pytest.raises(ProbeError, match=f"refused: HTTP {status}, the test says so$") as told:
        ask(PROMPT, stream=stream)
    assert told.value.final is final


def test_broken_answers_are_one_sentence(server: Any, ask: Callable[..., Answer]) -> None:
    server.breaks_streams = True
    with pytest.raises(ProbeError, match="ended its answer before the end"):
        ask(PROMPT, stream=True)
    server.stop()
    with pytest.raises(ProbeError, match="did not answer") as told:
        ask(PROMPT)
    assert not told.value.final


def test_no_request_goes_beyond_the_limit(server: Any) -> None:
    async def go(client: IsolationClient) -> None:
        async with client:
            await client.ask(PROMPT)
            with pytest.raises(ProbeError, match="budget of 1 requests is used up"):
                await client.ask(PROMPT)
            assert client.requests_sent == 1

    asyncio.run(go(IsolationClient(server.url, "testbed", request_limit=1)))
    assert len(server.bodies) == 1
