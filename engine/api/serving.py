"""What the handlers of `/v1/*` share: the serving context, running a generation, SSE, and `usage`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.api.errors import APIError, as_api_error
from engine.api.identity import caller_of
from engine.api.protocol import GenerationOptions, Limits
from engine.async_engine import AsyncEngine, Generation, Submission
from engine.cache_identity import Adapter, ImageSpan

if TYPE_CHECKING:
    from engine.engine import LLMEngine, RequestOutput
    from engine.metrics import EngineMetrics


_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Prompt:
    """What a request asks the model to continue.

    token_ids: what counts as the prompt. With images in it, model_token_ids is what the model reads in their place.
    """

    token_ids: list[int]
    model_token_ids: list[int] | None = None
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True)
class Serving:
    """One served model. Of `llm` only what never changes is read here: config, dims, plan, tokenizer."""

    engine: AsyncEngine
    llm: LLMEngine
    metrics: EngineMetrics
    started_at: float  # Unix time

    @property
    def model_name(self) -> str:
        return self.llm.config.served_model_name

    @property
    def max_model_len(self) -> int:
        return self.llm.plan.max_model_len

    @property
    def limits(self) -> Limits:
        return Limits(self.llm.dims.vocab_size, self.llm.config.scheduling_policy == "priority")

    def find_model(self, model: str | None) -> Adapter | None:
        """The adapter that `model` names, `None` for the served model itself; 404 for a name that is not served."""
        if model is None or model == self.model_name:
            return None
        adapter = self.llm.adapters.find(model)
        if adapter is not None:
            return adapter
        names = [self.model_name, *(served.adapter.name for served in self.llm.adapters.served())]
        raise APIError(
            404,
            f"The model {model!r} does not exist here; this engine serves {', '.join(map(repr, names))}.",
            param="model",
            code="model_not_found",
        )

    def submit(
        self, request: Request, response_id: str, prompts: Sequence[Prompt], options: GenerationOptions, param: str
    ) -> Generation:
        """Queues n sequences for each prompt; sequence `p * n + c` is choice c of prompt p, a fork of its choice 0."""
        caller = caller_of(request.headers, options.user, options.cache_salt)
        adapter = self.find_model(options.model)
        submissions: list[Submission] = []
        for prompt in prompts:
            identity = caller.identity(self.llm.identity_policy, adapter, prompt.images)
            leader = f"{response_id}-{len(submissions)}"
            for choice in range(options.n):
                params = options.params_for(len(prompt.token_ids), choice, self.max_model_len, param)
                self.metrics.on_submitted(options.n, params.max_tokens)
                submissions.append(
                    Submission(
                        f"{response_id}-{len(submissions)}",
                        prompt.token_ids,
                        params,
                        identity,
                        options.priority,
                        fork_of=leader if choice else None,
                        model_token_ids=prompt.model_token_ids,
                    )
                )
        return self.engine.submit(submissions, streaming=options.stream)


def serving_of(request: Request) -> Serving:
    """The serving context the application was made with."""
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving


def new_id(prefix: str) -> str:
    """`cmpl-...`, `chatcmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def finish(request: Request, generation: Generation) -> list[RequestOutput]:
    """Waits for a generation that does not stream; aborts it when the client hangs up or the handler is cancelled."""
    watcher = asyncio.create_task(_abort_on_disconnect(request, generation))
    try:
        return await generation.results()
    finally:
        watcher.cancel()
        generation.abort()


async def _abort_on_disconnect(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.abort()


class EventStream(StreamingResponse):
    """Server-sent events: one `data:` line a chunk, an error as the last chunk if there is one, `[DONE]`."""

    def __init__(self, generation: Generation, chunks: AsyncIterator[Mapping[str, Any]]) -> None:
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.abort()  # the client may hang up before the first chunk is asked for


async def _events(chunks: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        yield _event(as_api_error(error).body)
    yield b"data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return f"data: {_encode(chunk)}\n\n".encode()


class UsageCounter:
    """Counts tokens as outputs arrive. Each prompt counts once, whatever `n`; its cached tokens are those
    of its first choice, the one that could not profit from its siblings."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion: dict[int, int] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        """Takes an output or a delta of sequence `index`."""
        prompt, choice = divmod(index, self._n)
        self._prompt[prompt] = output.num_prompt_tokens
        if choice == 0:
            self._cached[prompt] = max(0, output.num_cached_tokens)
        self._completion[index] = output.num_output_tokens

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        prompt, completion = sum(self._prompt.values()), sum(self._completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
