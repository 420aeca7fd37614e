"""What the lint found in a page: where, what is wrong, what to write."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CODES = {
    "unreadable": "the file is no page",
    "front-matter": "a key of the front matter is missing, unknown or malformed",
    "version-range": "the range holds no version that was read",
    "sections": "the nine sections are not all there, in order and filled",
    "length": "too few or too many words",
    "placeholder": "something was to be filled in",
    "url": "an address is not well formed",
    "unknown-flag": "no version of the engine has the flag",
    "flag-not-in-range": "part of the stated versions lacks the flag, and the page does not say so",
    "flag-span": "since or until is not what was read",
    "flag-direction": "the row moves the flag the way that makes it worse",
    "flag-restart": "the row says that no restart is needed, and one is",
    "flag-gone": "a flag that is gone is recommended, or is not gone",
    "flag-engine": "the row recommends the flag for an engine it is not declared for",
    "flag-value": "part of the stated versions does not take the value, and the row does not say so",
    "flag-table": "the mitigation's table is not complete",
    "unknown-metric": "no version of the engine exposes the metric",
    "metric-not-in-range": "part of the stated versions lacks the metric, and the sentence does not say so",
    "query": "the expression is not PromQL, or its result is always empty or wrong",
    "command": "the command line is refused by its own parser",
    "link": "alert, runbook and replay do not close, or a page is named that does not exist",
    "translation": "the translation is missing, older than its page, or names other things than it",
}


@dataclass(frozen=True)
class LintFinding:
    """One defect. `write` says what to put in its place."""

    file: str
    line: int
    code: str
    what: str
    write: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
