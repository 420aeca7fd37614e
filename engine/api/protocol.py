"""What a client may ask: OpenAI's completion and chat fields, and vLLM's extensions.

A field is honoured, or ignored because it cannot change the answer, or refused with its name; nothing
that would change the answer is dropped silently.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.api.errors import APIError, bad_field
from engine.api.fields import INT64, Fields, check_token_ids
from engine.api.identity import checked_id
from engine.request import SamplingParams

MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit
MAX_N = 128  # OpenAI's limit

# Routing, billing and bookkeeping of OpenAI's service: no influence on the tokens.
HARMLESS = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "parallel_tool_calls", "prompt_cache_options"}
)  # fmt: skip


@dataclass(frozen=True)
class GenerationOptions:
    """What both endpoints share. `max_tokens` is `None` for "as many as fit"."""

    model: str | None
    params: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str | None
    user: str | None
    priority: int
    return_token_ids: bool

    def params_for(self, prompt_length: int, choice: int, max_model_len: int, param: str) -> SamplingParams:
        """The parameters of one choice: `max_tokens` clamped to what fits, the seed moved per choice."""
        if prompt_length >= max_model_len:
            raise APIError(
                400,
                f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
                f"{prompt_length} tokens, which leaves no room for output. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )
        room = max_model_len - prompt_length
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = self.params.seed
        return dataclasses.replace(
            self.params,
            max_tokens=max_tokens,
            min_tokens=min(self.params.min_tokens, max_tokens),
            seed=None if seed is None else INT64[0] + (seed - INT64[0] + choice) % 2**64,
        )


@dataclass(frozen=True)
class CompletionRequest:
    """`/v1/completions`: each prompt is text or token ids."""

    options: GenerationOptions
    prompts: list[str | list[int]]


class Images:
    """Pictures of chat messages, and the marks that hold their places while a chat template is applied.

    A mark cannot be guessed, so no text of a client can pass for one.
    """

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.paths: list[str] = []  # of the fields they came in, for messages
        self._nonce = secrets.token_hex(16)

    def add(self, url: str, path: str) -> str:
        """Keeps a picture; returns its mark."""
        self.urls.append(url)
        self.paths.append(path)
        return f"\0{self._nonce}:{len(self.urls) - 1}\0"

    def split(self, text: str) -> list[str]:
        """Text and indices of pictures by turns, beginning and ending with text."""
        return re.split(f"\0{self._nonce}:([0-9]+)\0", text)


@dataclass(frozen=True)
class ChatRequest:
    """`/v1/chat/completions`. Message contents are plain text with marks where the pictures are."""

    options: GenerationOptions
    messages: list[dict[str, Any]]
    images: Images


@dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    priority_scheduling: bool


def parse_completion(body: Mapping[str, Any], limits: Limits) -> CompletionRequest:
    """Reads `/v1/completions`; raises `APIError`."""
    fields = Fields(body)
    prompts = parse_prompts(fields.require("prompt"), limits.vocab_size)
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.only("best_of", 1, body.get("n"))
    fields.only("add_special_tokens", True)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_tokens", 16, 1)
    return CompletionRequest(_parse_options(fields, limits, max_tokens, logprobs), prompts)


def parse_chat(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
    """Reads `/v1/chat/completions`; raises `APIError`."""
    fields = Fields(body)
    images = Images()
    messages = parse_messages(fields.require("messages"), images)
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("functions", [])
    fields.only("function_call", "none", "auto")
    fields.only("modalities", ["text"])
    fields.only("reasoning_effort", "none")
    fields.only("add_generation_prompt", True)
    fields.only("add_special_tokens", False)
    fields.only("continue_final_message", False)
    fields.only("echo", False)
    wants_logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top_logprobs is not None and not wants_logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    logprobs = (top_logprobs or 0) if wants_logprobs else None
    max_tokens = fields.integer("max_tokens", None, 1)
    max_tokens = fields.integer("max_completion_tokens", max_tokens, 1)
    return ChatRequest(_parse_options(fields, limits, max_tokens, logprobs), messages, images)


def parse_prompts(value: Any, vocab_size: int) -> list[str | list[int]]:
    """`prompt` in its four forms: text, list of texts, token ids, list of token-id lists."""
    if isinstance(value, str):
        return [checked_text("prompt", value)]
    if not isinstance(value, list) or not value:
        raise bad_field("prompt", "must be text, a non-empty list of texts, token ids, or a list of token-id lists")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [check_token_ids("prompt", value, vocab_size)]
    prompts: list[str | list[int]] = []
    for item in value:
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append(checked_text("prompt", item))
        elif isinstance(item, list) and isinstance(value[0], list):
            if not item:
                raise bad_field("prompt", "a list of token ids is empty")
            prompts.append(check_token_ids("prompt", item, vocab_size))
        else:
            raise bad_field("prompt", "a list must hold only texts, only token ids, or only token-id lists")
    return prompts


def parse_messages(value: Any, images: Images) -> list[dict[str, Any]]:
    """Chat messages with their content as plain text; pictures go to `images`, their marks stay in the text.

    Text parts are joined by newlines, as vLLM does, unless there are pictures between them.
    """
    if not isinstance(value, list) or not value:
        raise bad_field("messages", "must be a non-empty list of messages")
    messages = []
    for position, message in enumerate(value):
        path = f"messages[{position}]"
        if not isinstance(message, dict):
            raise bad_field(path, "must be an object with role and content")
        fields = Fields(message, path + ".")
        role = fields.string("role")
        if not role:
            raise bad_field(path + ".role", "this field is required")
        content = _parse_content(fields.raw("content"), path + ".content", images)
        fields.only("tool_calls", [])
        name = fields.string("name")
        fields.reject_rest(("refusal", "annotations", "audio", "reasoning_content"))
        messages.append({"role": role, "content": content} | ({"name": name} if name else {}))
    return messages


def _parse_content(value: Any, path: str, images: Images) -> str:
    if isinstance(value, str):
        return checked_text(path, value)
    if not isinstance(value, list):
        raise bad_field(path, "must be text or a list of parts")
    num_images = len(images.urls)
    parts = [_parse_part(part, f"{path}[{position}]", images) for position, part in enumerate(value)]
    return ("\n" if len(images.urls) == num_images else "").join(parts)


def _parse_part(value: Any, path: str, images: Images) -> str:
    """One part of a message's content: its text, or the mark of its picture."""
    if not isinstance(value, dict):
        raise bad_field(path, "must be an object with type")
    fields = Fields(value, path + ".")
    kind = fields.string("type")
    if kind == "text":
        text = fields.string("text")
        if text is None:
            raise bad_field(path + ".text", "this field is required")
        part = checked_text(path + ".text", text)
    elif kind == "image_url":
        image = fields.nested("image_url")
        url = None if image is None else image.string("url")
        if image is None or url is None:
            raise bad_field(path + ".image_url.url", "this field is required")
        image.reject_rest(("detail",))
        part = images.add(url, path + ".image_url.url")
    else:
        raise bad_field(path + ".type", "only parts of type text and image_url are supported")
    fields.reject_rest()
    return part


def checked_text(path: str, text: str) -> str:
    """`text` when it can be tokenized; 400 for the lone surrogates that JSON lets through."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_field(path, "holds a lone surrogate; send valid Unicode") from None
    return text


def _parse_options(fields: Fields, limits: Limits, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    stream = fields.boolean("stream")
    include_usage, continuous_usage = _parse_stream_options(fields, stream)
    prompt_logprobs = fields.integer("prompt_logprobs", None, 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise bad_field("prompt_logprobs", "is not available when stream is true")
    min_tokens = fields.integer("min_tokens", 0, 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    params = SamplingParams(
        max_tokens=max(1, min_tokens),
        min_tokens=min_tokens,
        temperature=fields.number("temperature", 1.0, 0.0),
        top_p=_parse_top_p(fields),
        top_k=fields.integer("top_k", 0, -1) or 0,
        seed=fields.integer("seed", None),
        stop=fields.strings("stop"),
        stop_token_ids=fields.token_ids("stop_token_ids", limits.vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    options = GenerationOptions(
        model=fields.string("model"),
        params=params,
        max_tokens=max_tokens,
        n=fields.integer("n", 1, 1, MAX_N) or 1,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache_salt=_parse_id(fields, "cache_salt"),
        user=_parse_id(fields, "user"),
        priority=_parse_priority(fields, limits),
        return_token_ids=fields.boolean("return_token_ids"),
    )
    _refuse_unsupported(fields)
    fields.reject_rest(HARMLESS)
    return options


def _parse_top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise bad_field("top_p", "must be above 0")
    return top_p


def _parse_stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.nested("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise bad_field("stream_options", "needs stream to be true")
    include_usage = options.boolean("include_usage")
    continuous = options.boolean("continuous_usage_stats")
    options.boolean("include_obfuscation")  # padding against traffic analysis of OpenAI's service
    options.reject_rest()
    return include_usage, include_usage and continuous


def _parse_id(fields: Fields, name: str) -> str | None:
    value = fields.raw(name)
    return None if value is None else checked_id(name, value)


def _parse_priority(fields: Fields, limits: Limits) -> int:
    priority = fields.integer("priority", 0) or 0
    if priority and not limits.priority_scheduling:
        raise bad_field("priority", "needs an engine started with --scheduling-policy priority")
    return priority


def _refuse_unsupported(fields: Fields) -> None:
    """Fields of OpenAI and vLLM that would change the answer and are not implemented: only neutral values pass."""
    for name in ("frequency_penalty", "presence_penalty", "min_p"):
        fields.only(name, 0, 0.0)
    fields.only("repetition_penalty", 1, 1.0)
    fields.only("length_penalty", 1, 1.0)
    fields.only("use_beam_search", False)
    fields.only("logit_bias", {})
    fields.only("response_format", {"type": "text"})
    fields.only("include_stop_str_in_output", False)
    fields.only("skip_special_tokens", True)
    fields.only("spaces_between_special_tokens", True)
    fields.only("truncate_prompt_tokens")
    fields.only("bad_words", [])
