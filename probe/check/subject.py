"""One parsed query and all that a check may ask about it; the making of findings and of corrected text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import promql_parser as promql

from probe.check.expression import Comparison, Use, bare, comparisons, uses
from probe.check.finding import CODES, Finding
from probe.check.grafana import ANY_NUMBER, is_variable, variables_in
from probe.check.query import ALERT, PANEL, Query
from probe.check.vocabulary import Resolution, Vocabulary


@dataclass(frozen=True)
class Settings:
    """`scrape_interval_s`: the interval at which the targets are scraped."""

    scrape_interval_s: float = 15.0


@dataclass(frozen=True)
class Absence:
    """What an alert asks `absent()` of: a metric, of one job or any (""), `filtered` by a comparison as `up == 1`."""

    name: str
    job: str
    filtered: bool


@dataclass(frozen=True)
class File:
    """What all queries say together.

    Names of recording rules, what alerts ask the absence of, and which metrics are seen series by series or at their
    highest in which file.
    """

    recorded: frozenset[str]
    absent: frozenset[Absence]
    unhidden: frozenset[tuple[str, str]]  # (file, metric)


@dataclass(frozen=True)
class Subject:
    query: Query
    tree: Any
    vocabulary: Vocabulary
    settings: Settings
    file: File

    @cached_property
    def uses(self) -> list[Use]:
        return uses(self.tree)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Comparisons with a constant that the text really states."""
        return [one for one in comparisons(self.tree) if one.threshold != float(ANY_NUMBER)]

    @property
    def is_alert(self) -> bool:
        return self.query.kind == ALERT

    @property
    def rate_window(self) -> str:
        return "$__rate_interval" if self.query.kind == PANEL else "5m"

    @property
    def effect(self) -> str:
        """What an empty result means here."""
        return {ALERT: "the alert can never fire", PANEL: "the panel stays empty"}.get(
            self.query.kind, "the result is always empty"
        )

    def meaning(self, use: Use) -> Resolution:
        if not use.name or is_variable(use.name) or use.name in self.file.recorded:
            return Resolution(use.name, "foreign")
        return self.vocabulary.resolve(use.name)

    def finding(
        self, code: str, why: str, write: str, *, at: str = "", corrected: str | None = None, severity: str = ""
    ) -> Finding:
        """`at`: a piece of the text that stands where the defect is."""
        text = self.query.text
        match = re.search(rf"(?<![\w:]){re.escape(at)}(?![\w:])", text) if at else None
        line = text.line_at(match.start()) if match else text.line
        return Finding(
            self.query.file, line, self.query.where, code, severity or CODES[code][0], why, write,
            " ".join(text.split()), corrected,
        )  # fmt: skip

    def rename(self, names: Mapping[str, str]) -> str:
        """The text with metric names replaced."""
        text = str(self.query.text)
        for old, new in names.items():
            text = re.sub(rf"(?<![\w:]){re.escape(old)}(?![\w:])", lambda _, new=new: new, text)  # type: ignore[misc]
        return text

    def rewrite(self, old: Any, new: str) -> str | None:
        """The expression with one node replaced by new text; None where variables would be lost by it."""
        if variables_in(self.query.text):
            return None
        written = old.prettify()
        try:
            replacement = promql.parse(new)
            changed = promql.transform(  # after the children: the new text may hold the old node
                self.tree, post_visit=lambda node: replacement if node.prettify() == written else None
            )
            return " ".join(str(changed.prettify()).split())
        except ValueError:
            return None


def job_of(selector: Any) -> str:
    """The value of a selector's matcher of `job`, "" without one."""
    return next((str(matcher.value) for matcher in selector.matchers.matchers if matcher.name == "job"), "")


def text_of(node: Any) -> str:
    """A node as one line of PromQL."""
    return " ".join(str(bare(node).prettify()).split())
