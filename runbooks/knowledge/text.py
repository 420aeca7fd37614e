"""Texts in two languages, read from the YAML files beside this module.

A text is `{en: ..., zh: ...}` with the same `{placeholders}` in both; `Text.filled` puts figures in.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Text:
    """One sentence or paragraph in English and Chinese."""

    en: str
    zh: str

    def filled(self, **figures: Any) -> Text:
        """With figures in place of the placeholders; a figure that is a text itself is taken in its language."""
        en = {name: value.en if isinstance(value, Text) else value for name, value in figures.items()}
        zh = {name: value.zh if isinstance(value, Text) else value for name, value in figures.items()}
        return Text(self.en.format(**en), self.zh.format(**zh))

    def plus(self, other: Text) -> Text:
        """Followed by another text; Chinese needs no space between sentences."""
        return Text(f"{self.en} {other.en}", f"{self.zh}{other.zh}")

    def placeholders(self) -> tuple[set[str], set[str]]:
        """Names of the placeholders in English and in Chinese."""
        return _names(self.en), _names(self.zh)


def _names(text: str) -> set[str]:
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name}


def text_of(entry: Mapping[str, str]) -> Text:
    """The text of an entry with the keys `en` and `zh`."""
    return Text(" ".join(entry["en"].split()), "".join(line.strip() for line in entry["zh"].splitlines()))


@functools.cache
def data(name: str) -> Any:
    """The content of `NAME.yaml` beside this module."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))


@functools.cache
def phrases(name: str) -> dict[str, Text]:
    """The texts of `NAME.yaml`, by key."""
    return {key: text_of(entry) for key, entry in data(name).items()}


def in_both(**texts: Text) -> dict[str, Any]:
    """`{field: English, ..., "zh": {field: Chinese, ...}}`: how every object here carries its texts."""
    return {**{name: text.en for name, text in texts.items()}, "zh": {name: text.zh for name, text in texts.items()}}


def localized(value: Any, lang: str) -> Any:
    """Data of a `to_dict` in one language: with "zh" the fields named under `zh` are replaced; `zh` itself goes."""
    if isinstance(value, Mapping):
        translated = value.get("zh") if isinstance(value.get("zh"), Mapping) else {}
        kept = {key: localized(item, lang) for key, item in value.items() if key != "zh"}
        return {**kept, **(translated or {})} if lang == "zh" else kept
    if isinstance(value, list | tuple):
        return [localized(item, lang) for item in value]
    return value


def gib(count: float) -> str:
    """Bytes as GiB (MiB below a tenth of one)."""
    return f"{count / (1 << 30):.2f} GiB" if abs(count) >= 0.1 * (1 << 30) else f"{count / (1 << 20):.1f} MiB"
