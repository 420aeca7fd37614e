"""Reads the runbook pages: Markdown with YAML front matter that is data, validated on reading (`page_schema`).

A page's file name is its id; where an alert rule has the same id, the page is its answer. Pages of the user's own lie
in a folder of theirs and are listed with ours; they never take the place of one of ours. A translation is a file of
the same name in a folder of its language and carries the sha256 of the page it was made from.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from runbooks.page_schema import SEVERITIES, Problem, problems, translation_problems
from runbooks.user_files import own_folder

__all__ = [
    "SECTIONS", "SEVERITIES", "Runbook", "RunbookError", "get_runbook", "languages", "list_runbooks", "parse_runbook",
    "unreadable_pages", "user_folder",
]  # fmt: skip

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation", "Verify", "Escalate", "Do not", "Drill", "Sources")
# Headings of a translation, in the same order.
HEADINGS = {"zh": ("含义", "影响", "诊断", "缓解", "验证", "升级", "不要做", "演练", "来源")}
ENGLISH = "en"
FOLDER = Path(__file__).parent
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the safe loader in C, where it is built


class RunbookError(ValueError):
    """A runbook that does not exist or is not well formed; the message is one sentence."""


@dataclass(frozen=True)
class Runbook:
    """One page. `engines` maps an engine to its version range, `meta` is the whole front matter (of the English page),
    `sections` maps a heading (the English one in every language) to its Markdown, `markdown` is the page without the
    front matter.

    `alert` is None where no rule fires it; `incidents` are ids of public incidents. `note` says when the page is not
    in the language asked for, or its translation is of an older text.
    """

    id: str
    title: str
    severity: str
    alert: str | None
    engines: dict[str, str]
    meta: dict[str, Any]
    sections: dict[str, str]
    markdown: str
    incidents: tuple[str, ...] = ()
    lang: str = ENGLISH
    note: str | None = None
    file: Path | None = None
    own: bool = True  # one of ours, not of the user's folder

    @property
    def tested(self) -> bool:
        """Whether the page names a drill that passed."""
        return bool(self.meta["tested"].get("result") == "pass")


def languages() -> tuple[str, ...]:
    """The languages pages can be asked for in."""
    return (ENGLISH, *HEADINGS)


def user_folder() -> Path:
    """Where pages of the user's own lie: `KVONCALL_RUNBOOKS`, or `runbooks` in the data folder."""
    return own_folder("KVONCALL_RUNBOOKS", "runbooks")


def parse_runbook(runbook_id: str, text: str, file: Path | None = None) -> Runbook:
    """Validates and splits a page; raises `RunbookError` naming the file, what is wrong and what to write."""
    name = f"runbook {runbook_id}" if file is None else str(file)
    meta, markdown = split_page(name, text)
    _raise_first(name, problems(runbook_id, meta))
    sections = _complete(name, markdown, SECTIONS)
    return Runbook(
        runbook_id, meta["title"], meta["severity"], meta["alert"], meta["engines"], meta, sections, markdown,
        incidents=tuple(meta.get("incidents", ())), file=file,
    )  # fmt: skip


def split_page(name: str, text: str) -> tuple[Any, str]:
    """Front matter and Markdown; raises `RunbookError`."""
    match = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if match is None:
        raise RunbookError(f"{name}: no front matter between --- lines at the top: begin the file with one")
    try:
        return yaml.load(match[1], Loader=_YAML), match[2].strip() + "\n"
    except yaml.YAMLError as error:
        raise RunbookError(f"{name}: front matter is not YAML: {' '.join(str(error).split())}") from None


def _raise_first(name: str, found: list[Problem]) -> None:
    if found:
        raise RunbookError(f"{name}: {found[0].message}")


def _complete(name: str, markdown: str, headings: tuple[str, ...]) -> dict[str, str]:
    """Sections by their English heading; raises `RunbookError` where they are not the nine, in order and filled."""
    sections = sections_of(markdown)
    missing = [heading for heading in headings if not sections.get(heading)]
    if missing:
        raise RunbookError(f"{name}: missing or empty sections: {', '.join(missing)}")
    if tuple(sections) != headings:
        raise RunbookError(f"{name}: sections are {', '.join(sections)}: write {', '.join(headings)}, in this order")
    return dict(zip(SECTIONS, sections.values(), strict=True))


def sections_of(markdown: str) -> dict[str, str]:
    """Text below each heading of the second level."""
    parts = re.split(r"^## +(.+?) *$", markdown, flags=re.MULTILINE)
    return {title: body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def sha256_of(text: str) -> str:
    """What a translation's `translated_from` must be: of the English file's whole text."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _own_pages() -> tuple[Runbook, ...]:
    files = sorted(FOLDER.glob("*.md"))
    return tuple(parse_runbook(file.stem, file.read_text(encoding="utf-8"), file) for file in files)


@functools.lru_cache(maxsize=256)
def _user_page(file: Path, _changed_ns: int) -> Runbook | str:
    """A page of the user's folder, or the sentence why it cannot be one. Read again when it has changed."""
    if file.stem in {page.id for page in _own_pages()}:
        return f"{file}: {file.stem!r} is the id of a page of ours, which stays: give the file another name"
    try:
        page = parse_runbook(file.stem, file.read_text(encoding="utf-8"), file)
    except (RunbookError, OSError, UnicodeDecodeError) as error:
        return str(error) if isinstance(error, RunbookError) else f"{file} cannot be read: {error}"
    return replace(page, own=False)


def _user_pages() -> list[Runbook | str]:
    folder = user_folder()
    files = sorted(folder.glob("*.md")) if folder.is_dir() and folder != FOLDER else []
    return [_user_page(file, file.stat().st_mtime_ns) for file in files]


def unreadable_pages() -> list[str]:
    """One sentence for each page of the user's folder that cannot be listed."""
    return [page for page in _user_pages() if isinstance(page, str)]


def list_runbooks(lang: str = ENGLISH) -> list[Runbook]:
    """All pages, by id: ours, and those of the user's folder that are well formed."""
    pages = [*_own_pages(), *(page for page in _user_pages() if isinstance(page, Runbook))]
    return sorted((translated(page, lang) for page in pages), key=lambda page: page.id)


def get_runbook(runbook_id: str, lang: str = ENGLISH) -> Runbook:
    """One page; raises `RunbookError` naming those there are."""
    for runbook in list_runbooks(lang):
        if runbook.id == runbook_id:
            return runbook
    raise RunbookError(f"no runbook named {runbook_id!r}; there are: {', '.join(r.id for r in list_runbooks())}")


def translated(page: Runbook, language: str) -> Runbook:
    """The page in a language, or itself with a note; raises `RunbookError` for a language there is none in."""
    if language == ENGLISH:
        return page
    if language not in HEADINGS:
        raise RunbookError(f"no runbook is in {language!r}; write one of {', '.join(languages())}")
    assert page.file is not None
    file = page.file.parent / language / page.file.name
    if not file.is_file():
        return replace(page, note=f"This page is not translated ({language}) yet; this is the English text.")
    return _translation(page, language, file)


@functools.lru_cache(maxsize=256)
def _read_translation(name: str, headings: tuple[str, ...], text: str) -> tuple[dict[str, Any], dict[str, str], str]:
    meta, markdown = split_page(name, text)
    _raise_first(name, translation_problems(meta))
    return meta, _complete(name, markdown, headings), markdown


def _translation(page: Runbook, language: str, file: Path) -> Runbook:
    """The page with a translation's words; an English page that changed since is named in the note."""
    assert page.file is not None
    try:
        meta, sections, markdown = _read_translation(str(file), HEADINGS[language], file.read_text(encoding="utf-8"))
    except (RunbookError, UnicodeDecodeError) as error:
        return replace(page, note=f"Its translation cannot be shown, so this is the English text: {error}.")
    fresh = meta["translated_from"] == sha256_of(page.file.read_text(encoding="utf-8"))
    note = None if fresh else "The English page is newer than this translation, and holds where they differ."
    return replace(page, title=meta["title"], sections=sections, markdown=markdown, lang=language, note=note, file=file)
