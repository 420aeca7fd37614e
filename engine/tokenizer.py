"""Text to token ids and back, chat templates, and incremental decoding. `tokenizers` and jinja2 only.

Chat templates come from whoever made the model, so they run in jinja2's immutable sandbox. What is read from which
files is the matter of `engine.tokenizer_files` and `engine.gguf_tokenizer`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.sandbox
import tokenizers

from engine.config import ConfigError
from engine.gguf_file import is_gguf
from engine.gguf_tokenizer import read_gguf_tokenizer
from engine.tokenizer_files import read_directory


class ChatTemplateError(ValueError):
    """Messages that the model's chat template refuses, or a model without one; the message is for the user."""


class Tokenizer:
    """The tokenizer of one model directory or GGUF file. Raises `ConfigError` when there is none to read."""

    def __init__(self, model: str | Path) -> None:
        path = Path(model)
        files = read_gguf_tokenizer(path) if is_gguf(path) else read_directory(path)
        self._source = files.source
        self._tokenizer = files.tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._specials = files.specials
        self._template = _compile_template(files.source, files.chat_template)
        self.eos_token_ids = files.eos_token_ids
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_bytes = _token_bytes(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence token, None when the model names none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def refuse_other_vocabulary(self, vocab_size: int) -> None:
        """Raises `ConfigError` when text can become token ids that a model with this many embeddings does not have.

        Tokens added beyond the vocabulary pass (Gemma 3's text models have one for images): no text needs them.
        """
        num_tokens = self._tokenizer.get_vocab_size(with_added_tokens=False)
        largest = max([num_tokens - 1, *self.encode("")])
        if largest >= vocab_size:
            raise ConfigError(
                f"the tokenizer of {self._source!r} gives token ids up to {largest}, but the model has embeddings for "
                f"{vocab_size}; tokenizer and weights do not belong together"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens the model wants around a prompt (BOS) unless told otherwise."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary give nothing."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token on its own, special tokens spelt out, as logprobs show it."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of chat messages, special tokens included: encode it with `add_special_tokens=False`.

        Raises `ChatTemplateError` when the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                **self._specials, messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program of somebody else's: it may raise anything
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from None

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """A decoder for the tokens that follow `prompt_token_ids`."""
        if self._token_bytes is not None:
            return ByteStream(self._token_bytes)
        return WindowStream(self, prompt_token_ids)


class DecodeStream(Protocol):
    """Decodes a growing list of tokens into text that only ever gets longer.

    Text is held back while it ends inside a character, so that no piece holds half of one. The pieces and `flush`
    together are the text of all tokens.
    """

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is held back, with U+FFFD for bytes that never became a character."""
        ...


class ByteStream:
    """For byte-level tokenizers (GPT-2, Llama 3, Qwen): a token is a run of bytes whatever its neighbours."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes.get(token_id, b""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any tokenizer, also those that look at neighbouring tokens (leading spaces, runs of bytes).

    Each piece is the difference between the text of a short window of tokens with and without the new ones.
    """

    _CONTEXT = 6  # prompt tokens the first new token is decoded after

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._window = list(prompt_token_ids[-self._CONTEXT :])
        self._num_read = len(self._window)  # tokens of the window whose text is out already
        self._read_text = self._decode(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new_text = text[len(self._read_text) :]
        if new_text:
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._read_text = self._decode(self._window)
        return new_text


def _compile_template(model: str, source: str | None) -> jinja2.Template | None:
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {model!r} is not valid jinja: {error}") from None


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As Hugging Face's filter: unescaped, unlike jinja2's, which is for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """The bytes of every token that is text, when the tokenizer is byte-level; otherwise `None`.

    Byte-level vocabularies spell a byte as a printable character: itself where it is one, else the next free
    code point from 256 on. An added token with other characters stands for its own text.
    """
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        return None
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return {
        token_id: bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
        for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
        if token_id not in special
    }
