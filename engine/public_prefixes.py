"""Prefixes the operator declares public: text that every tenant and session may know is cached, as a system prompt.

Blocks that lie wholly within one are shared by everybody, whatever the scope; what follows them is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.config import ConfigError
from engine.tokenizer import ChatTemplateError, Tokenizer

MAX_PREFIXES = 64


class PublicPrefixes:
    """The token lists that are public, at most MAX_PREFIXES; `apply` is told the whole list whenever it changes."""

    def __init__(self, apply: Callable[[Sequence[Sequence[int]]], None]) -> None:
        self._apply = apply
        self._prefixes: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def lengths(self) -> list[int]:
        """Tokens of each, in the order they came."""
        return [len(prefix) for prefix in self._prefixes]

    def add(self, token_ids: Sequence[int]) -> None:
        """Makes a prefix public; does nothing when it is already. `ValueError` when there are too many."""
        if list(token_ids) in self._prefixes:
            return
        if len(self._prefixes) == MAX_PREFIXES:
            raise ValueError(f"there are {MAX_PREFIXES} public prefixes, which is the limit; clear them first")
        self._prefixes = [*self._prefixes, list(token_ids)]
        self._apply(self._prefixes)

    def clear(self) -> None:
        """Makes nothing public any more: what is cached as public is not found by later requests."""
        self._prefixes = []
        self._apply(self._prefixes)

    def add_file(self, path: str, tokenizer: Tokenizer) -> None:
        """Adds a file of `--prefix-cache-public`: text, or a JSON list of chat messages where its name ends in .json.

        Text is encoded as a prompt of /v1/completions, messages as a prompt of /v1/chat/completions begins.
        Raises `ConfigError`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            if path.endswith(".json"):
                text = tokenizer.apply_chat_template(json.loads(text), add_generation_prompt=False)
                token_ids = tokenizer.encode(text, add_special_tokens=False)
            else:
                token_ids = tokenizer.encode(text)
        except OSError as error:
            raise ConfigError(f"--prefix-cache-public {path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            what = "its messages make no prompt" if isinstance(error, ChatTemplateError | TypeError) else "is damaged"
            raise ConfigError(f"--prefix-cache-public {path}: {what} ({error})") from None
        if not text:
            raise ConfigError(f"--prefix-cache-public {path} is empty")
        try:
            self.add(token_ids)
        except ValueError as error:
            raise ConfigError(f"--prefix-cache-public: {error}") from None
