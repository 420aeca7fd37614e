"""A server with a prefix cache that keeps callers apart as well as the test wants, in memory or over HTTP."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.testbed.tasks import split_tokens
from probe.isolation.client import Answer, Caller, ProbeError

BLOCK = 16


@dataclass
class Reply:
    text: str
    cached: int
    tokens: int
    ttft_s: float
    top: dict[str, float]


class FakeCache:
    """The cache. `scope` "global" or "session"; `leaks`: callers get the answer first given to a prompt of that shape.

    token_s: time a computed token takes in `Reply.ttft_s` (nobody sleeps); noise_s: its spread.
    """

    def __init__(self) -> None:
        self.scope = "global"
        self.salted = True
        self.caching = True
        self.tells = True
        self.leaks = False
        self.token_s, self.noise_s = 0.001, 0.005
        self.answer: Callable[[str, str], str] = lambda prompt, right: right
        self.surprise = 0.0  # how far a first token's distribution is off when the text is not
        self._rng = random.Random(5)
        self._blocks: set[tuple[object, ...]] = set()
        self._shapes: dict[str, str] = {}

    def reply(self, prompt: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Reply:
        tokens = split_tokens(prompt) if prompt.endswith(">") else prompt.split()
        own = (headers.get("x-session-id"), body.get("user")) if self.scope == "session" else ()
        namespace = (own, body.get("cache_salt") if self.salted else None)
        chain = [(namespace, *tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
        cached = BLOCK * sum(block in self._blocks for block in chain) if self.caching else 0
        self._blocks.update(chain)
        right = self._solved(prompt)
        text, off = self.answer(prompt, right), 0.0
        shape = re.sub(r"\d", "#", prompt)
        if self.leaks:
            text = self._shapes.setdefault(shape, text)
        if self.surprise and self._shapes.setdefault(f"of {shape}", prompt) != prompt and not body.get("cache_salt"):
            off = self.surprise
        ttft_s = (len(tokens) - cached) * self.token_s + self._rng.random() * self.noise_s
        return Reply(text, cached, len(tokens), ttft_s, {"x": -0.01 - off, "y": -5.0})

    @staticmethod
    def _solved(prompt: str) -> str:
        asked = re.search(r"\?(\w\w)>$", prompt)
        found = re.search(rf"{asked[1]}=(\d\d);", prompt) if asked else None
        return found[1] if found else "word"


class StubClient:
    """`IsolationClient` without a network: times are the fake's, so verdicts on them repeat."""

    def __init__(self, cache: FakeCache, fault: Callable[[int], str] = lambda n: "") -> None:
        """`fault(n)`: how request n fails: "" (not), "passing" or "final"."""
        self.cache = cache
        self.fault = fault
        self.base_url, self.model = "http://fake", "testbed"
        self.requests_sent = 0
        self.asked: list[tuple[str, Caller]] = []

    async def ask(self, prompt: Any, caller: Caller, *, logprobs: int | None = None, **_: Any) -> Answer:
        self.requests_sent += 1
        fault = self.fault(self.requests_sent - 1)
        if fault:
            raise ProbeError(f"the test says {fault}", final=fault == "final")
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        self.asked.append((text, caller))
        headers = {name.lower(): value for name, value in caller.headers.items()}
        reply = self.cache.reply(text, headers, caller.fields)
        told = reply.cached if self.cache.tells else None
        top = (reply.top,) if logprobs else None
        return Answer(reply.text, told, reply.tokens, reply.ttft_s, top, (reply.text,))


class FakeServer:
    """The cache behind an OpenAI API on a free port. `fault(n)`: HTTP status of request n (0: answer it)."""

    def __init__(self) -> None:
        self.cache = FakeCache()
        self.fault: Callable[[int], int] = lambda n: 0
        self.knows_logprobs = True
        self.breaks_streams = False
        self.model, self.max_model_len = "testbed", 2048
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", port=0)
        self._server = uvicorn.Server(config)
        socket = config.bind_socket()
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([socket],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        status = self.fault(len(self.bodies))
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if status:
            return JSONResponse({"error": {"message": "the test says so."}}, status)
        if "logprobs" in body and not self.knows_logprobs:
            return JSONResponse({"error": {"message": "logprobs are unknown here"}}, 400)
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        reply = self.cache.reply(prompt, self.headers[-1], body)
        details = {"cached_tokens": reply.cached} if self.cache.tells else None
        usage = {"prompt_tokens": reply.tokens, "prompt_tokens_details": details}
        if body.get("stream"):
            return StreamingResponse(self._events(reply, usage, chat), media_type="text/event-stream")
        choices = [_choice(reply, n, chat, "message", "logprobs" in body) for n in range(body.get("n", 1))]
        return JSONResponse({"choices": choices, "usage": usage})

    def _events(self, reply: Reply, usage: dict[str, Any], chat: bool) -> Iterator[str]:
        if chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        yield _event({"choices": [_choice(reply, 0, chat, "delta", False)]})
        if self.breaks_streams:
            return
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _choice(reply: Reply, index: int, chat: bool, inner: str, logprobs: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": "stop"}
    choice |= {inner: {"role": "assistant", "content": reply.text}} if chat else {"text": reply.text}
    if logprobs and chat:
        top = [{"token": token, "logprob": value} for token, value in reply.top.items()]
        choice["logprobs"] = {"content": [{"token": "x", "logprob": reply.top["x"], "top_logprobs": top}]}
    elif logprobs:
        choice["logprobs"] = {"tokens": ["x"], "top_logprobs": [reply.top]}
    return choice


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
