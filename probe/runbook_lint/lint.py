"""Lint of pages: which files, every check, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from probe.runbook_lint.commands import check_commands
from probe.runbook_lint.document import Document, read_document
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.flags import check_flags
from probe.runbook_lint.form import check_form
from probe.runbook_lint.links import check_links, missing_pages
from probe.runbook_lint.metrics import check_metrics
from probe.runbook_lint.queries import check_promql
from probe.runbook_lint.statements import check_statements
from probe.runbook_lint.translation import check_translations
from runbooks.load import FOLDER, HEADINGS, RunbookError, user_folder


@dataclass(frozen=True)
class Linted:
    """`pages`: how many files were read, translations included."""

    pages: int
    findings: list[LintFinding]


def lint(files: Sequence[Path] = (), folder: Path = FOLDER) -> Linted:
    """Findings in `files`, or in all of ours and the user's. `folder` is where ours lie: they must be translated."""
    chosen = list(files) or [*_pages_of(folder), *_pages_of(user_folder())]
    ours = {file.stem for file in folder.glob("*.md")}
    pages = ours | {file.stem for file in user_folder().glob("*.md")} | {file.stem for file in chosen}
    findings: list[LintFinding] = []
    read: dict[Path, Document] = {}
    for file in chosen:
        try:
            read[file.resolve()] = read_document(file)
        except RunbookError as error:
            findings.append(_unreadable(file, error))
    for page in read.values():
        findings += _of_page(page, pages, read, required=page.path.parent.resolve() == folder.resolve())
        if page.lang == "en" and page.path.parent.resolve() != folder.resolve() and not files and page.id in ours:
            what = f"{page.id!r} is the id of a page of ours, which stays"
            findings.append(LintFinding(page.file, 1, "link", what, "another name for the file"))
    if not files:
        for page_id, why in missing_pages(pages):
            findings.append(LintFinding(str(folder / f"{page_id}.md"), 1, "link", f"no such page: {why}", "the page"))
    order = {str(file): place for place, file in enumerate(chosen)}
    return Linted(len(read), sorted(findings, key=lambda one: (order.get(one.file, len(order)), one.line, one.code)))


def _pages_of(folder: Path) -> list[Path]:
    """Pages, each followed by its translations; then translations of no page."""
    files: list[Path] = []
    for page in sorted(folder.glob("*.md")):
        files += [page, *(file for lang in HEADINGS if (file := folder / lang / page.name).is_file())]
    strays = [file for lang in HEADINGS for file in sorted((folder / lang).glob("*.md"))]
    return list(dict.fromkeys([*files, *strays]))


def _of_page(page: Document, pages: set[str], read: dict[Path, Document], required: bool) -> Iterator[LintFinding]:
    form = list(check_form(page, pages))
    yield from form
    yield from check_commands(page, pages)
    if page.lang in HEADINGS:
        yield from _of_translation(page, read)
        return
    if not any(finding.code == "front-matter" for finding in form):  # the rest builds on it
        yield from check_flags(page)
        yield from check_statements(page)
        yield from check_metrics(page)
        yield from check_promql(page)
        yield from check_links(page, pages)
    beside = {lang: page.path.parent / lang / page.path.name for lang in HEADINGS}
    there = {lang: read.get(file.resolve()) or _readable(file) for lang, file in beside.items() if file.is_file()}
    found = {lang: document for lang, document in there.items() if document is not None}
    yield from check_translations(page, found, required and len(found) == len(there))


def _of_translation(page: Document, read: dict[Path, Document]) -> Iterator[LintFinding]:
    """A translation of no page; and, where its page is not linted as well, whether it agrees with it."""
    original = page.path.parent.parent / page.path.name
    if not original.is_file():
        yield LintFinding(page.file, 1, "translation", f"there is no page {original}", "the name of a page")
    elif original.resolve() not in read:
        english = _readable(original)
        yield from check_translations(english, {page.lang: page}, False) if english is not None else ()


def _readable(file: Path) -> Document | None:
    try:
        return read_document(file)
    except RunbookError:
        return None


def _unreadable(file: Path, error: RunbookError) -> LintFinding:
    what, _, write = str(error).removeprefix(f"{file}: ").partition(": ")
    return LintFinding(str(file), 1, "unreadable", what, write or "a page that begins with front matter")
