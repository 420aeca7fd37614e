"""Texts that are there in two languages, in the one that was chosen."""

from __future__ import annotations

from runbooks.knowledge.text import Text


def in_language(text: Text, language: str) -> str:
    """The text in "en" or "zh"."""
    return text.zh if language == "zh" else text.en
