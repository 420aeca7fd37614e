"""Text to token ids and back, chat templates, and incremental decoding. `tokenizers` and jinja2 only.

Reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja` of a Hugging
Face directory. Chat templates come from whoever made the model, so they run in jinja2's immutable sandbox.
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

from engine.config import ConfigError, read_hf_config


class ChatTemplateError(ValueError):
    """Messages that the model's chat template refuses, or a model without one; the message is for the user."""


class Tokenizer:
    """The tokenizer of one model directory. Raises `ConfigError` when there is none to read."""

    def __init__(self, model_dir: str | Path) -> None:
        directory = Path(model_dir)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{str(directory)!r} holds no tokenizer.json; the engine needs one to read and write text"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"{str(file)!r} is not a readable tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(directory / "tokenizer_config.json")
        self._template = _compile_template(directory, self._config)
        self.eos_token_ids = _eos_token_ids(directory, self._tokenizer, self._config)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_bytes = _token_bytes(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence token, None when the model names none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

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
        specials = {key: _content(value) for key, value in self._config.items() if key.endswith("_token")}
        try:
            return self._template.render(
                **specials, messages=list(messages), add_generation_prompt=add_generation_prompt
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object")
    return content


def _content(token: Any) -> Any:
    """A special token as text; tokenizer_config.json holds text or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _eos_token_ids(directory: Path, tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[int]:
    """End tokens from the first of generation_config.json, config.json, tokenizer_config.json that names some."""
    sources = (_read_json(directory / "generation_config.json"), read_hf_config(directory))
    for eos in (source.get("eos_token_id") for source in sources):
        if eos is not None:
            return [int(token) for token in (eos if isinstance(eos, list) else [eos])]
    token = _content(config.get("eos_token"))
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return [] if token_id is None else [token_id]


def _compile_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {str(directory)!r} is not valid jinja: {error}") from None


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
