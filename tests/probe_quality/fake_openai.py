"""An OpenAI server that knows the testbed's answers, for as long as the test lets it."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.testbed.tasks import BOS, CLOSING, split_tokens

VOCAB = 1000


def solve(prompt: str) -> str:
    """The right answer to a testbed prompt."""
    question = re.split(r"<eos>|;", prompt)[-1].removesuffix(">")
    if question.startswith("?"):
        return str(re.findall(rf"(?:^|;|<eos>){question[1:]}=(\d\d);", prompt)[0])
    if "+" in question:
        return str(sum(map(int, question.split("+"))))
    return "".join(CLOSING[c] for c in reversed(question))


class FakeOpenAI:
    """`answer(prompt, right)` gives the text; `fault(n)` the HTTP status of completion n (0: answer it)."""

    def __init__(self) -> None:
        self.answer: Callable[[str, str], str] = lambda prompt, right: right
        self.solve: Callable[[str], str] = solve
        self.fault: Callable[[int], int] = lambda n: 0
        self.has_logprobs = True
        self.sureness = 0.9  # probability of the judged token in prompt_logprobs
        self.debug: dict[str, Any] | None = None
        self.metrics: str | None = None
        self.model = "testbed"
        self.max_model_len: int | None = 512
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self._ids = {BOS: 0}
        self._texts = {0: BOS}
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listens, on the same port once it has one."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/debug/engine", self._debug),
                Route("/metrics", self._metrics),
            ]
        )
        config = uvicorn.Config(app, port=self._port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        socket = config.bind_socket()
        self._port = socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([socket],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _debug(self, request: Request) -> Response:
        return JSONResponse(self.debug, 200 if self.debug else 404)

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics or "", 200 if self.metrics else 404)

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        words = split_tokens(body["prompt"]) if "testbed" in self.model else body["prompt"].split()
        words = [BOS, *words] if body["add_special_tokens"] else words
        for word in words:
            self._texts[self._ids.setdefault(word, len(self._ids))] = word
        return JSONResponse({"tokens": [self._ids[word] for word in words]})

    async def _complete(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization", ""))
        return await self._in_flight(await request.json(), lambda body: body["prompt"], "text")

    async def _chat(self, request: Request) -> Response:
        return await self._in_flight(await request.json(), lambda body: body["messages"][-1]["content"], "message")

    async def _in_flight(self, *asked: Any) -> Response:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= 1
        return self._answer(*asked)

    def _answer(self, body: dict[str, Any], prompt_of: Callable[[dict[str, Any]], Any], shape: str) -> Response:
        status = self.fault(len(self.bodies))
        self.bodies.append(body)
        if status:
            return JSONResponse({"error": {"message": "the test says so"}}, status)
        prompt = prompt_of(body)
        if "prompt_logprobs" in body:
            if not self.has_logprobs:
                return JSONResponse({"error": {"message": "prompt_logprobs is unknown here"}}, 400)
            return JSONResponse({"choices": [{"text": "x", "prompt_logprobs": [None, *map(self._told, prompt[1:])]}]})
        text = self.answer(prompt, self.solve(prompt))
        choice = {"text": text} if shape == "text" else {"message": {"role": "assistant", "content": text}}
        return JSONResponse({"choices": [{**choice, "finish_reason": "stop"}]})

    def _told(self, token: int) -> dict[str, Any]:
        other = (token + 1) % VOCAB
        sure = self.sureness
        ranked = sorted(((sure, token), (1 - sure, other)), reverse=True)
        return {str(t): {"logprob": math.log(p), "rank": rank} for rank, (p, t) in enumerate(ranked, start=1)}
