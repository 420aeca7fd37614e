"""Asks an OpenAI endpoint on behalf of made-up callers, one request at a time.

Nothing is asked twice: a request that fails raises `ProbeError`, and the probe decides whether to go on. Every
request counts against `request_limit`, so that a budget that was stated holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text or token ids (a completion), or chat messages."""

_PASSING = frozenset({408, 425, 429})  # statuses below 500 that may be gone at the next request


class ProbeError(Exception):
    """A request, or the whole probe, cannot be carried out; the message is one sentence.

    `final`: the same request would fail again, such as one that was refused.
    """

    def __init__(self, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Caller:
    """Who a request says it comes from; what is None is not sent.

    tenant, session: headers X-Tenant-ID and X-Session-ID. user, salt: fields `user` and `cache_salt` of the body.
    """

    tenant: str | None = None
    session: str | None = None
    user: str | None = None
    salt: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        told = {"X-Tenant-ID": self.tenant, "X-Session-ID": self.session}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def fields(self) -> dict[str, str]:
        told = {"user": self.user, "cache_salt": self.salt}
        return {name: value for name, value in told.items() if value is not None}


NOBODY = Caller()


@dataclass(frozen=True)
class Answer:
    """One answer. `text` is that of the first choice, `choices` are all of them.

    cached_tokens: prompt tokens the server says it took from its cache; None where it does not say.
    ttft_s: from sending to the first token; streams only.
    logprobs: top log-probabilities of each generated token, by the token's text; None where not asked or not told.
    """

    text: str
    cached_tokens: int | None
    prompt_tokens: int | None
    ttft_s: float | None = None
    logprobs: tuple[dict[str, float], ...] | None = None
    choices: tuple[str, ...] = ()


class IsolationClient:
    """One server, one model. Use as an async context manager; `requests_sent` counts every request for an answer."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        extra_headers: Mapping[str, str] | None = None,
        request_limit: int | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.requests_sent = 0
        self._limit = request_limit
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **(extra_headers or {})},
            timeout=httpx.Timeout(timeout_s, connect=5.0, pool=None),
            trust_env=False,
            verify=self.base_url.startswith("https"),  # plain HTTP needs no TLS context, which takes long to build
        )

    async def __aenter__(self) -> IsolationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(
        self,
        prompt: Prompt,
        caller: Caller = NOBODY,
        *,
        max_tokens: int = 8,
        stream: bool = False,
        logprobs: int | None = None,
        n: int = 1,
        seed: int | None = None,
        temperature: float = 0.0,
        model: str | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """One request. `stream` is needed for `ttft_s`; `logprobs`: how many a token; `model`: another than usual.

        Raises `ProbeError` when the server refuses, fails or answers in another shape.
        """
        if self._limit is not None and self.requests_sent >= self._limit:
            raise ProbeError(f"the budget of {self._limit} requests is used up")
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        body: dict[str, Any] = {
            "model": model or self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            **({"messages": [dict(m) for m in prompt if isinstance(m, Mapping)]} if chat else {}),
            **({} if chat else {"prompt": prompt if isinstance(prompt, str) else list(prompt)}),
            **caller.fields,
        }
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
        if n > 1:
            body["n"] = n
        if seed is not None:
            body["seed"] = seed
        if stop:
            body["stop"] = list(stop)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        self.requests_sent += 1
        parts = await (self._stream if stream else self._post)(path, body, caller.headers)
        if not parts.texts:
            raise ProbeError(f"{self.base_url}{path} did not answer in the OpenAI shape")
        return parts.answer()

    async def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> _Parts:
        try:
            response = await self._http.post(path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self._refused(path, response.status_code, response.text)
        parts = _Parts()
        parts.take(_object(response.text))
        return parts

    async def _stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> _Parts:
        parts, done = _Parts(), False
        begin = time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    content = await response.aread()
                    raise self._refused(path, response.status_code, content.decode("utf-8", "replace"))
                async for line in response.aiter_lines():
                    now = time.perf_counter()
                    data = line[5:].strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        done = True
                    elif data:
                        event = _object(data)
                        if "error" in event and "choices" not in event:
                            raise ProbeError(f"{self.base_url}{path} failed midway: {_message(data)}", final=False)
                        if parts.take(event) and parts.ttft_s is None:
                            parts.ttft_s = now - begin
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if not done:
            raise ProbeError(f"{self.base_url}{path} ended its answer before the end", final=False)
        return parts

    def _unreachable(self, error: httpx.HTTPError) -> ProbeError:
        return ProbeError(f"{self.base_url} did not answer ({str(error) or type(error).__name__})", final=False)

    def _refused(self, path: str, status: int, text: str) -> ProbeError:
        message = _message(text)
        said = f"HTTP {status}" + (f", {message}" if message else "")
        return ProbeError(f"{self.base_url}{path} refused: {said}", final=status < 500 and status not in _PASSING)


@dataclass
class _Parts:
    """What has come of an answer so far, whole or in chunks, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[dict[str, float]] = field(default_factory=list)  # of choice 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    ttft_s: float | None = None

    def take(self, value: Mapping[str, Any]) -> bool:
        """Takes a response or a chunk; whether it brought a token (or the end of a choice)."""
        if isinstance(value.get("usage"), Mapping):
            self.usage = value["usage"]
        brought = False
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            index = choice["index"] if isinstance(choice.get("index"), int) else 0
            text = _text(choice)
            self.texts[index] = self.texts.get(index, "") + text
            if index == 0:
                self.logprobs += _top(choice.get("logprobs"))
            # A chat's first chunk may tell the role alone, before any token is computed.
            brought = brought or bool(text) or choice.get("finish_reason") is not None
        return brought

    def answer(self) -> Answer:
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        prompt_tokens = self.usage.get("prompt_tokens")
        texts = tuple(text for _, text in sorted(self.texts.items()))
        return Answer(
            texts[0],
            cached if isinstance(cached, int) else None,
            prompt_tokens if isinstance(prompt_tokens, int) else None,
            self.ttft_s,
            tuple(self.logprobs) or None,
            texts,
        )


def _text(choice: Mapping[str, Any]) -> str:
    """Text of a completion, a chat message or a chunk of either; what a model thinks aloud counts as well."""
    inner = choice.get("message") or choice.get("delta")
    if not isinstance(inner, Mapping):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    said = [inner.get("reasoning_content") or inner.get("reasoning"), inner.get("content")]
    return "".join(part for part in said if isinstance(part, str))


def _top(logprobs: Any) -> list[dict[str, float]]:
    """Top log-probabilities of each token, of either of OpenAI's two shapes."""
    if not isinstance(logprobs, Mapping):
        return []
    if isinstance(logprobs.get("content"), list):  # chat
        tokens = [token for token in logprobs["content"] if isinstance(token, Mapping)]
        tops = [{e.get("token"): e.get("logprob") for e in (*(t.get("top_logprobs") or ()), t)} for t in tokens]
    else:
        told = logprobs.get("top_logprobs")
        tops = [dict(top) for top in told if isinstance(top, Mapping)] if isinstance(told, list) else []
    return [{str(token): float(p) for token, p in top.items() if isinstance(p, int | float)} for top in tops]


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message(text: str) -> str:
    """The message of an error's body where it has one in a known shape, on one line."""
    value = _object(text)
    error = value.get("error", value)
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(message.split())[:300].rstrip(".") if isinstance(message, str) else ""
