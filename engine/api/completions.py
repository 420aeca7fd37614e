"""`/v1/completions`: text or token ids in, text out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.errors import bad_field
from engine.api.fields import read_json_object
from engine.api.logprobs import completion_logprobs, prompt_logprobs
from engine.api.protocol import CompletionRequest, parse_completion
from engine.api.serving import EventStream, Prompt, Serving, UsageCounter, finish, new_id, serving_of
from engine.async_engine import Generation

if TYPE_CHECKING:
    from engine.engine import RequestOutput


async def create_completion(request: Request) -> Response:
    """POST /v1/completions."""
    serving = serving_of(request)
    asked = parse_completion(await read_json_object(request), serving.limits)
    serving.find_model(asked.options.model)
    tokenizer = serving.llm.tokenizer
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    if not all(prompts):
        raise bad_field("prompt", "has no tokens")
    answer = _Answer(serving, asked, prompts)
    generation = serving.submit(request, answer.id, [Prompt(ids) for ids in prompts], asked.options, "prompt")
    if asked.options.stream:
        await generation.admitted()
        return EventStream(generation, answer.chunks(generation))
    return JSONResponse(answer.whole(await finish(request, generation)))


class _Answer:
    """Builds the response objects of one request."""

    def __init__(self, serving: Serving, asked: CompletionRequest, prompts: list[list[int]]) -> None:
        self.id = new_id("cmpl")
        self._tokenizer = serving.llm.tokenizer
        self._options = asked.options
        self._prompts = prompts
        self._usage = UsageCounter(asked.options.n)
        self._text_offset = [0] * len(prompts) * asked.options.n
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.options.model or serving.model_name,
        }

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
            choice = self._choice(index, output)
            if self._options.params.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(output, self._tokenizer)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self._usage.to_dict()}

    async def chunks(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        options = self._options
        async for index, delta in generation.deltas():
            self._usage.add(index, delta)
            chunk: dict[str, Any] = {**self._head, "choices": [self._choice(index, delta)]}
            if options.include_usage:
                chunk["usage"] = self._usage.to_dict() if options.continuous_usage else None
            yield chunk
        if options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage.to_dict()}

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": output.new_text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._options.params.logprobs is not None:
            choice["logprobs"], self._text_offset[index] = completion_logprobs(
                output, self._tokenizer, self._text_offset[index]
            )
        if self._options.return_token_ids:
            choice["token_ids"] = output.new_token_ids
            choice["prompt_token_ids"] = self._prompts[index // self._options.n]
        return choice
