"""Reads the runbook pages: Markdown with YAML front matter that is data, validated on reading.

A page's file name is its id, which is also the id of the alert rule it answers.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation", "Verify", "Escalate", "Do not", "Drill", "Sources")
SEVERITIES = ("info", "warning", "critical")
_REQUIRED: dict[str, type] = {
    "alert": str,
    "title": str,
    "severity": str,
    "engines": dict,
    "tested": dict,
    "drill": dict,
    "flags": dict,
}


class RunbookError(ValueError):
    """A runbook that does not exist or is not well formed; the message is one sentence."""


@dataclass(frozen=True)
class Runbook:
    """One page. `engines` maps an engine to its version range, `meta` is the whole front matter,
    `sections` maps a heading to its Markdown, `markdown` is the page without the front matter.
    """

    id: str
    title: str
    severity: str
    alert: str
    engines: dict[str, str]
    meta: dict[str, Any]
    sections: dict[str, str]
    markdown: str

    @property
    def tested(self) -> bool:
        """Whether the page names a drill that passed."""
        return bool(self.meta["tested"].get("result") == "pass")


def parse_runbook(runbook_id: str, text: str) -> Runbook:
    """Validates and splits a page; raises `RunbookError` naming what is wrong."""
    match = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if match is None:
        raise RunbookError(f"runbook {runbook_id}: no front matter between --- lines at the top")
    try:
        meta = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise RunbookError(f"runbook {runbook_id}: front matter is not YAML: {error}") from None
    _check_meta(runbook_id, meta)
    markdown = match[2].strip() + "\n"
    sections = _sections(markdown)
    missing = [name for name in SECTIONS if not sections.get(name)]
    if missing:
        raise RunbookError(f"runbook {runbook_id}: missing or empty sections: {', '.join(missing)}")
    return Runbook(
        runbook_id, meta["title"], meta["severity"], meta["alert"], meta["engines"], meta, sections, markdown
    )


def _check_meta(runbook_id: str, meta: Any) -> None:
    if not isinstance(meta, dict):
        raise RunbookError(f"runbook {runbook_id}: front matter is not a mapping")
    for key, kind in _REQUIRED.items():
        if not isinstance(meta.get(key), kind):
            raise RunbookError(f"runbook {runbook_id}: front matter needs {key!r} of type {kind.__name__}")
    if meta["alert"] != runbook_id:
        raise RunbookError(f"runbook {runbook_id}: alert is {meta['alert']!r}; file name and alert id must agree")
    if meta["severity"] not in SEVERITIES:
        raise RunbookError(f"runbook {runbook_id}: severity must be one of {', '.join(SEVERITIES)}")


def _sections(markdown: str) -> dict[str, str]:
    parts = re.split(r"^## +(.+?) *$", markdown, flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def list_runbooks() -> list[Runbook]:
    """All pages, by id."""
    pages = sorted(Path(__file__).parent.glob("*.md"))
    return [parse_runbook(page.stem, page.read_text(encoding="utf-8")) for page in pages]


def get_runbook(runbook_id: str) -> Runbook:
    """One page; raises `RunbookError` naming those there are."""
    for runbook in list_runbooks():
        if runbook.id == runbook_id:
            return runbook
    raise RunbookError(f"no runbook named {runbook_id!r}; there are: {', '.join(r.id for r in list_runbooks())}")
