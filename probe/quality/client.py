"""Asks an OpenAI-compatible server; waits for one that went away, and says what it cannot tell.

A server that does not answer (refused, cut, timed out, 429, 5xx) is asked again until `patience_s` have passed
without any answer to anybody; then every call raises `EndpointDown`. A 4xx is final: `EndpointRefused`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from probe.quality.likelihood import TOP

RETRY_S = 0.3
REQUEST_TIMEOUT_S = 120.0
_RETRIED = frozenset({408, 425, 429})


class EndpointDown(Exception):  # noqa: N818
    """The server stayed away for longer than the caller's patience."""


class EndpointRefused(Exception):  # noqa: N818
    """The server answered and refused; the message is one sentence."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """`finish_reason` "stop" or "length"."""

    text: str
    finish_reason: str | None


class QualityClient:
    """One server, one model. Use as an async context manager; `model` is set by `probe.quality.server.describe`."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, patience_s: float = 20.0, concurrency: int = 16
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self._patience_s = patience_s
        self._last_answer = time.monotonic()
        self._slots = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=5.0, pool=None),
            trust_env=False,
            verify=self.base_url.startswith("https"),  # plain HTTP needs no TLS context, which takes long to build
        )

    async def __aenter__(self) -> QualityClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: str, max_tokens: int, stop: Sequence[str] = ()) -> Reply:
        """Greedy completion of a text."""
        choice = await self._choice("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, stop)
        return Reply(_text(choice.get("text"), self.base_url), choice.get("finish_reason"))

    async def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, stop: Sequence[str] = ()) -> Reply:
        """Greedy answer to chat messages."""
        choice = await self._choice(
            "/v1/chat/completions", {"messages": list(messages), "max_tokens": max_tokens}, stop
        )
        message = choice.get("message")
        content = message.get("content") if isinstance(message, Mapping) else None
        return Reply(_text(content or "", self.base_url), choice.get("finish_reason"))

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids by the server's `/tokenize`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        tokens = (await self.post("/tokenize", body)).get("tokens")
        if not isinstance(tokens, list):
            raise EndpointRefused(f"{self.base_url}/tokenize did not answer with tokens", 200)
        return [int(token) for token in tokens]

    async def prompt_logprobs(self, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs` of a prompt of token ids: an entry a token, the first None."""
        body = {"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": TOP}
        found = (await self._choice("/v1/completions", body)).get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(tokens):
            raise EndpointRefused(f"{self.base_url} answers without prompt_logprobs", 200)
        return found

    async def _choice(self, path: str, body: dict[str, Any], stop: Sequence[str] = ()) -> dict[str, Any]:
        asked = {"model": self.model, "temperature": 0, **body, **({"stop": list(stop)} if stop else {})}
        choices = (await self.post(path, asked)).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise EndpointRefused(f"{self.base_url}{path} did not answer in the OpenAI shape", 200)
        return choices[0]

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object a POST answers with."""
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object a GET answers with."""
        return await self._ask("GET", path)

    async def get_text(self, path: str) -> str | None:
        """The body of a GET, or None when there is none to have; asked once."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._slots:
            response = await self._until_answered(method, path, body)
        if response.status_code >= 400:
            raise EndpointRefused(f"{self.base_url}{path} refused: {_reason(response)}", response.status_code)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EndpointRefused(f"{self.base_url}{path} did not answer with a JSON object", response.status_code)
        return value

    async def _until_answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        asked_at = time.monotonic()
        while True:
            trouble: str
            try:
                response = await self._http.request(method, path, json=body)
                if response.status_code < 500 and response.status_code not in _RETRIED:
                    self._last_answer = time.monotonic()
                    return response
                trouble = _reason(response)
            except httpx.HTTPError as error:
                trouble = str(error) or type(error).__name__
            silent_s = time.monotonic() - max(self._last_answer, asked_at)
            if silent_s >= self._patience_s:
                raise EndpointDown(f"{self.base_url} did not answer for {silent_s:.0f} s ({trouble})")
            await asyncio.sleep(min(RETRY_S, self._patience_s))


def _text(value: Any, base_url: str) -> str:
    if not isinstance(value, str):
        raise EndpointRefused(f"{base_url} answered without text", 200)
    return value


def _reason(response: httpx.Response) -> str:
    """The error's message where the body has one in a known shape, else the status."""
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    words = " ".join(str(message).split()) if isinstance(message, str) else ""
    return f"HTTP {response.status_code}" + (f", {words[:300].rstrip('.')}" if words else "")
