"""The YAML files of texts: both languages everywhere, and no comma that cut a text in two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import runbooks.knowledge

FILES = sorted(Path(runbooks.knowledge.__file__).parent.glob("*.yaml"))


def texts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "en" in value or "zh" in value:
            yield value
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_texts_are_whole_and_in_both_languages(file: Path) -> None:
    for text in texts(yaml.safe_load(file.read_text(encoding="utf-8"))):
        assert {"en", "zh"} <= set(text), text
        assert None not in text.values(), f"an unquoted comma ends the text: {text}"
