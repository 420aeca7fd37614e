"""`/v1/chat/completions`: the model's chat template makes the prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.errors import APIError, bad_field
from engine.api.fields import read_json_object
from engine.api.logprobs import chat_logprobs, prompt_logprobs
from engine.api.protocol import ChatRequest, Images, parse_chat
from engine.api.serving import EventStream, Prompt, Serving, UsageCounter, finish, new_id, serving_of
from engine.async_engine import Generation
from engine.cache_identity import ImageSpan
from engine.images import ImageError

if TYPE_CHECKING:
    from engine.engine import RequestOutput


async def create_chat_completion(request: Request) -> Response:
    """POST /v1/chat/completions."""
    serving = serving_of(request)
    asked = parse_chat(await read_json_object(request), serving.limits)
    serving.find_model(asked.options.model)
    prompt = chat_prompt(serving, asked.messages, asked.images)
    answer = _Answer(serving, asked, prompt.token_ids)
    generation = serving.submit(request, answer.id, [prompt], asked.options, "messages")
    if asked.options.stream:
        await generation.admitted()
        return EventStream(generation, answer.chunks(generation))
    return JSONResponse(answer.whole(await finish(request, generation)))


def chat_prompt(
    serving: Serving, messages: list[dict[str, Any]], images: Images, *, add_generation_prompt: bool = True
) -> Prompt:
    """The prompt that messages make; 400 when the model has no chat template, it refuses them, or a picture is bad."""
    tokenizer = serving.llm.tokenizer
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    except ValueError as error:
        raise APIError(400, str(error), param="messages") from None
    if images.urls:
        return _prompt_with_images(serving, text, images)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    if not prompt:
        raise bad_field("messages", "the chat template made an empty prompt of them")
    return Prompt(prompt)


def _prompt_with_images(serving: Serving, text: str, images: Images) -> Prompt:
    """The prompt of a template's text: placeholders where the pictures are, and what the model reads there."""
    reader = serving.llm.image_reader
    if reader is None:
        raise bad_field(images.paths[0], "this model reads no images; of the engine's models only the testbed does")
    pictures = []
    for url, path in zip(images.urls, images.paths, strict=True):
        try:
            pictures.append(reader.read(url))
        except ImageError as error:
            raise bad_field(path, str(error)) from None
    token_ids: list[int] = []
    model_token_ids: list[int] = []
    spans: list[ImageSpan] = []
    for position, part in enumerate(images.split(text)):
        if position % 2:
            picture = pictures[int(part)]
            spans.append(ImageSpan(len(token_ids), len(picture.token_ids), picture.digest))
            token_ids += [reader.placeholder_id] * len(picture.token_ids)
            model_token_ids += picture.token_ids
        else:
            between = serving.llm.tokenizer.encode(part, add_special_tokens=False)
            token_ids += between
            model_token_ids += between
    return Prompt(token_ids, model_token_ids, tuple(spans))


class _Answer:
    """Builds the response objects of one request."""

    def __init__(self, serving: Serving, asked: ChatRequest, prompt: list[int]) -> None:
        self.id = new_id("chatcmpl")
        self._tokenizer = serving.llm.tokenizer
        self._options = asked.options
        self._prompt = prompt
        self._usage = UsageCounter(asked.options.n)
        self._created = int(time.time())
        self._model = asked.options.model or serving.model_name

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
            message = {"role": "assistant", "content": output.new_text, "refusal": None}
            choices.append(self._choice(index, "message", message, output))
        answer = {**self._head("chat.completion"), "choices": choices, "usage": self._usage.to_dict()}
        if self._options.params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(outputs[0], self._tokenizer)
        if self._options.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    async def chunks(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        started = [False] * self._options.n
        async for index, delta in generation.deltas():
            if not started[index]:
                started[index] = True
                opening = {"role": "assistant", "content": ""}
                yield self._chunk({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
            self._usage.add(index, delta)
            yield self._chunk(self._choice(index, "delta", {"content": delta.new_text}, delta))
        if self._options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage.to_dict()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._usage.to_dict() if self._options.continuous_usage else None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, key: str, content: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            key: content,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._options.params.logprobs is not None:
            choice["logprobs"] = chat_logprobs(output, self._tokenizer)
        if self._options.return_token_ids:
            choice["token_ids"] = output.new_token_ids
        return choice
