"""A page as the lint sees it: blocks (paragraph, list item, table row) with their line, and the code spans in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runbooks.load import HEADINGS, SECTIONS, RunbookError, split_page

ROW, TEXT, HEADING, FENCE = "row", "text", "heading", "fence"
_DATA = ("yaml", "json", "toml", "text")
_SPAN = re.compile(r"`([^`]+)`")
_NEW_BLOCK = re.compile(r"\s*(?:[-*]|\d+\.)\s")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z`<])|[。!?;]")


@dataclass(frozen=True)
class Span:
    """A piece of code: its text on one line, the line it begins on, its offset in the block."""

    text: str
    line: int
    start: int


@dataclass(frozen=True)
class Block:
    """`section` has the English heading in every language; "" above the first. `language`: of a fenced block."""

    kind: str
    section: str
    line: int
    text: str
    language: str = ""

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        if self.kind == FENCE:
            return tuple(_lines_of_code(self))
        return tuple(
            Span(" ".join(match[1].split()), self.line_at(match.start()), match.start())
            for match in _SPAN.finditer(self.text)
        )

    def line_at(self, offset: int) -> int:
        return self.line + self.text.count("\n", 0, offset)

    def sentence(self, offset: int) -> str:
        """The sentence around an offset; a table's row is one."""
        if self.kind == ROW:
            return self.text
        start, end = 0, len(self.text)
        for match in _SENTENCE_END.finditer(self.text):
            if match.start() < offset:
                start = match.end()
            else:
                end = match.end()
                break
        return self.text[start:end]

    @property
    def cells(self) -> list[str]:
        return [cell.strip() for cell in self.text.strip().strip("|").split("|")]


@dataclass(frozen=True)
class Document:
    """One file. `meta` is the front matter, `meta_text` its text from line 2 on; `lang` by the file's folder."""

    path: Path
    text: str
    meta: Any
    body: str
    body_line: int
    lang: str = "en"
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def file(self) -> str:
        return str(self.path)

    def line_of_key(self, key: str, inside: str = "") -> int:
        """The line of a key of the front matter, or of the first text `inside` it."""
        lines = self.text.split("\n")[: self.body_line]
        at = next((n for n, line in enumerate(lines, 1) if line.startswith(f"{key}:")), 1)
        if not inside:
            return at
        return next((n for n, line in enumerate(lines[at - 1 :], at) if inside in line), at)

    def in_sections(self, *names: str) -> Iterator[Block]:
        return (block for block in self.blocks if block.section in names)


def read_document(path: Path) -> Document:
    """Reads and cuts a file; raises `RunbookError` where it has no front matter or is no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunbookError(f"{path} cannot be read: {error}") from None
    meta, _ = split_page(str(path), text)
    head, _, body = text[4:].partition("\n---\n")
    body_line = head.count("\n") + 4
    lang = path.parent.name if path.parent.name in HEADINGS else "en"
    return Document(path, text, meta, body, body_line, lang, tuple(_blocks(body, body_line, lang)))


def _blocks(body: str, first_line: int, lang: str) -> Iterator[Block]:
    names = dict(zip(HEADINGS.get(lang, SECTIONS), SECTIONS, strict=True))
    section, start, lines, fenced, language = "", 0, list[str](), False, ""
    for number, line in enumerate(body.split("\n"), first_line):
        if line.lstrip().startswith("```"):
            if fenced and lines:
                yield Block(FENCE, section, start, "\n".join(lines), language)
            elif lines:
                yield Block(TEXT, section, start, "\n".join(lines))
            fenced, lines, start, language = not fenced, [], number + 1, line.strip().strip("`").strip()
            continue
        row, heading = line.lstrip().startswith("|"), line.startswith("#")
        if not fenced and lines and (not line.strip() or row or heading or _NEW_BLOCK.match(line)):
            yield Block(TEXT, section, start, "\n".join(lines))
            lines = []
        if fenced or (line.strip() and not row and not heading):
            start = start if lines else number
            lines.append(line)
        elif row:
            yield Block(ROW, section, number, line)
        elif heading:
            if line.startswith("## "):
                section = names.get(line[3:].strip(), line[3:].strip())
            yield Block(HEADING, section, number, line)
    if lines:
        yield Block(TEXT, section, start, "\n".join(lines))


def _lines_of_code(block: Block) -> Iterator[Span]:
    """A fenced block's lines, continued ones (`\\`) as one; a block of PromQL is one; data is none."""
    if block.language in _DATA:
        return
    if block.language == "promql":
        yield Span(" ".join(block.text.split()), block.line, 0)
        return
    held, start = "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        start = start if held else number
        held = f"{held} {line.strip()}".strip()
        if held.endswith("\\"):
            held = held[:-1].rstrip()
        elif held:
            yield Span(held.removeprefix("$ "), start, 0)
            held = ""
    if held:
        yield Span(held, start, 0)


def is_rule_of_table(block: Block) -> bool:
    """Whether a row is the line of dashes below a table's head."""
    return not re.search(r"[^\s|:-]", block.text)


def tables(blocks: tuple[Block, ...]) -> Iterator[list[Block]]:
    """Rows that follow each other: the head first, the line of dashes left out."""
    rows: list[Block] = []
    for block in blocks:
        if block.kind == ROW and (not rows or block.line == rows[-1].line + 1):
            rows.append(block)
            continue
        if rows:
            yield [row for row in rows if not is_rule_of_table(row)]
        rows = [block] if block.kind == ROW else []
    if rows:
        yield [row for row in rows if not is_rule_of_table(row)]
