"""What computing a claim gave: figures, the arithmetic, and a verdict where figures alone do not decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runbooks.knowledge.text import Text

NOTHING = Text("", "")


@dataclass(frozen=True)
class Outcome:
    """number: the figure in the unit of the article's. verdict None: it follows from comparing the two numbers.

    shown: what stands for the number where the claim is none; figures: values of the text's placeholders.
    """

    lines: tuple[str, ...]
    number: float | None = None
    verdict: Literal["right", "half", "wrong"] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    shown: Text = NOTHING
    source: Text | None = None


def same(shown: str) -> Text:
    """A text that is the same in both languages: a name, a figure, a formula."""
    return Text(shown, shown)
