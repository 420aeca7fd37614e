"""What a tokenizer is made of, read from a Hugging Face directory; `engine.gguf_tokenizer` reads it from GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from engine.config import ConfigError, read_hf_config


@dataclass(frozen=True)
class TokenizerFiles:
    """specials: names such as `bos_token` with their text, for the chat template. source: for messages."""

    source: str
    tokenizer: tokenizers.Tokenizer
    specials: dict[str, Any]
    chat_template: str | None
    eos_token_ids: list[int]


def read_directory(directory: Path) -> TokenizerFiles:
    """Reads `tokenizer.json` and what is beside it; raises `ConfigError` when there is none to read."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{str(directory)!r} holds no tokenizer.json; the engine needs one to read and write text")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise ConfigError(f"{str(file)!r} is not a readable tokenizer: {error}") from None
    config = _read_json(directory / "tokenizer_config.json")
    return TokenizerFiles(
        source=str(directory),
        tokenizer=tokenizer,
        specials={key: _content(value) for key, value in config.items() if key.endswith("_token")},
        chat_template=_template_source(directory, config),
        eos_token_ids=_eos_token_ids(directory, tokenizer, config),
    )


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
            ids = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(token, int) for token in ids):
                raise ConfigError(
                    f"{str(directory)!r}: eos_token_id must be a token id or a list of them, found {eos!r}"
                )
            return ids
    token = _content(config.get("eos_token"))
    token_id = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return [] if token_id is None else [token_id]


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as text: {error}") from None
    if isinstance(source, list):  # several named templates
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    return source if isinstance(source, str) else None
