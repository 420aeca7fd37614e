"""The form of a page: front matter, sections, length, placeholders, addresses, the table of flags.

Words are counted as a reader meets them: the body without front matter, headings, tables, fenced blocks, `code` and
addresses; a word holds a letter or a digit. Chinese has no spaces: each of its characters counts, and so do the words
of other scripts between them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit

from probe.runbook_lint.document import FENCE, HEADING, ROW, Document, tables
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.versions import flag_versions, metric_versions
from runbooks.load import HEADINGS, SECTIONS, sections_of
from runbooks.page_schema import Problem, problems, translation_problems

WORDS = {"en": (250, 600), "zh": (350, 1200)}
COLUMNS = {
    "en": ("engine", "flag", "now → to", "expected", "restart", "costs", "verify", "rollback"),
    "zh": ("引擎", "参数", "现值 → 新值", "预期", "重启", "代价", "验证", "回退"),
}
_URL = re.compile(r"https?:[^\s>)\]`]*")
_GITHUB = re.compile(r"/[\w.-]+/[\w.-]+(/(issues|pull)/[1-9]\d*|/security/advisories/GHSA(-[a-z0-9]{4}){3})?/?")
_PLACEHOLDER = re.compile(
    r"\b(?:TODO|TBD|FIXME|XXX|lorem ipsum)\b|<[a-z][a-z0-9 _-]*>|\?\?\?|\{\{|待补|待定", re.IGNORECASE
)
_CJK = re.compile(r"[\u4e00-\u9fff]")


def check_form(page: Document, pages: Collection[str]) -> Iterator[LintFinding]:
    """Findings of the form; `pages`: the ids that links may name."""
    yield from _front_matter(page, pages)
    yield from _sections(page)
    low, high = WORDS[page.lang]
    count = words(page)
    if not low <= count <= high:
        yield LintFinding(
            page.file, page.body_line, "length", f"{count} words outside code and tables",
            f"between {low} and {high} words",
        )  # fmt: skip
    yield from _placeholders(page)
    yield from _urls(page)
    yield from _flag_table(page)


def words(page: Document) -> int:
    """How many words a page has; see the module."""
    count = 0
    for block in page.blocks:
        if block.kind in (ROW, HEADING, FENCE):
            continue
        text = _URL.sub(" ", re.sub(r"`[^`]+`", " ", block.text))
        count += len(_CJK.findall(text))
        count += sum(bool(re.search(r"[^\W_]", word)) for word in _CJK.sub(" ", text).split())
    return count


def _front_matter(page: Document, pages: Collection[str]) -> Iterator[LintFinding]:
    yield from _repeated_keys(page)
    found = translation_problems(page.meta) if page.lang in HEADINGS else problems(page.id, page.meta, pages)
    for problem in found:
        yield _of_problem(page, problem)
    if found or page.lang in HEADINGS:
        return
    for engine in page.meta["engines"]:
        if engine != "kvoncall" and not (flag_versions(page.meta, engine) or metric_versions(page.meta, engine)):
            yield LintFinding(
                page.file, page.line_of_key("engines"), "version-range",
                f"no version of {engine} that was read is in {page.meta['engines'][engine]}",
                "a range that holds some: see `kvoncall flags`",
            )  # fmt: skip


def _repeated_keys(page: Document) -> Iterator[LintFinding]:
    """Keys that YAML would take the last of, without a word."""
    seen: set[str] = set()
    above = ""
    for number, line in enumerate(page.text.split("\n")[1 : page.body_line - 2], 2):
        match = re.match(r"( *)([\w-]+):", line)
        if match is None:
            continue
        above = above if match[1] else match[2]
        key = f"{above}/{match[2]}" if match[1] else match[2]
        if key in seen:
            yield LintFinding(page.file, number, "front-matter", f"{match[2]} is there twice", "one of them")
        seen.add(key)


def _of_problem(page: Document, problem: Problem) -> LintFinding:
    what, _, write = problem.message.partition(": ")
    inside = what.split()[0] if problem.key == "flags" else ""
    return LintFinding(page.file, page.line_of_key(problem.key, inside), "front-matter", what, write)


def _sections(page: Document) -> Iterator[LintFinding]:
    wanted, found = HEADINGS.get(page.lang, SECTIONS), sections_of(page.body)
    for name in wanted:
        if not found.get(name):
            line = next((b.line for b in page.blocks if b.kind == HEADING and b.text == f"## {name}"), page.body_line)
            yield LintFinding(page.file, line, "sections", f"section {name} is missing or empty", f"## {name} and text")
    headings = [block for block in page.blocks if block.kind == HEADING and block.text.startswith("## ")]
    for place, block in enumerate(headings):
        if block.text in (other.text for other in headings[:place]):
            yield LintFinding(page.file, block.line, "sections", f"{block.text!r} is there twice", "one of them")
    extra = [name for name in found if name not in wanted]
    if extra or (set(found) == set(wanted) and tuple(found) != wanted):
        line = next((b.line for b in page.blocks if b.kind == HEADING and b.text[3:] in extra), page.body_line)
        yield LintFinding(page.file, line, "sections", f"sections are {', '.join(found)}", f"{', '.join(wanted)}")


def _placeholders(page: Document) -> Iterator[LintFinding]:
    for number, line in enumerate(page.body.split("\n"), page.body_line):
        for match in _PLACEHOLDER.finditer(line):
            yield LintFinding(
                page.file, number, "placeholder", f"{match[0]!r} is left to be filled in", "what belongs there"
            )


def _urls(page: Document) -> Iterator[LintFinding]:
    for url, number in urls_in(page).items():
        why = why_no_url(url)
        if why:
            yield LintFinding(page.file, number, "url", f"{url} {why}", "the address as a browser shows it")


def urls_in(page: Document) -> dict[str, int]:
    """Addresses and the line each is first on."""
    found: dict[str, int] = {}
    for number, line in enumerate(page.body.split("\n"), page.body_line):
        for match in _URL.finditer(line):
            found.setdefault(match[0].rstrip(".,;:，。；："), number)
    return found


def why_no_url(url: str) -> str:
    """Why an address is not well formed, "" when it is. Nothing is fetched."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return "is no address"
    if parts.scheme != "https":
        return "is not https"
    if not re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host):
        return "names no host"
    if host == "github.com" and not _GITHUB.fullmatch(parts.path):
        return "is no repository, issue or pull request"
    return ""


def _flag_table(page: Document) -> Iterator[LintFinding]:
    """One table in Mitigation, with every column in every row."""
    columns = COLUMNS[page.lang]
    found = list(tables(tuple(page.in_sections("Mitigation"))))
    if not any(tuple(table[0].cells) == columns for table in found):
        line = next((b.line for b in page.in_sections("Mitigation")), page.body_line)
        yield LintFinding(page.file, line, "flag-table", "no table of flags", f"| {' | '.join(columns)} |")
    for table in found:
        for row in table[1:]:
            if len(row.cells) != len(table[0].cells) or not all(row.cells):
                yield LintFinding(
                    page.file, row.line, "flag-table", f"the row fills {sum(map(bool, row.cells))} of "
                    f"{len(table[0].cells)} columns", "every cell, `none` where there is nothing",
                )  # fmt: skip
