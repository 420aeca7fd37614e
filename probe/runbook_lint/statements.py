"""What a page says of flags beyond their names: since when they exist, and which way to move them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from probe.dialects import load_dialect
from probe.runbook_lint.document import ROW, Block, Document, tables
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.flags import ENGINE_CELLS, FLAG, life
from probe.runbook_lint.metrics import METRIC, engine_of, shown
from probe.runbook_lint.versions import names_version
from runbooks.engine_names import vllm_flag
from runbooks.flags import EMBEDDED, why_value_absent
from runbooks.wrong_way import HIGHER, LOWER, WRONG_WAY

_SINCE = re.compile(r"(?<!default )\bsince (?:vLLM |SGLang )?(\d+(?:\.\d+)+)")
_NAME_SINCE = re.compile(r"`([^`]+)`(?: \(| )?(?:exists |is there )?" + _SINCE.pattern)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UP = re.compile(r"\b(?:higher|up|more|twice|raised|larger)\b")
_DOWN = re.compile(r"\b(?:lower|down|less|half|halved|fewer|smaller)\b")


def check_statements(page: Document) -> Iterator[LintFinding]:
    """Findings of an English page: a wrong `since`, and a row that moves a flag the wrong way."""
    for block in page.blocks:
        if block.kind != ROW:
            yield from _since_in_text(page, block)
    for table in tables(tuple(page.in_sections("Mitigation"))):
        if len(table[0].cells) > 2 and table[0].cells[1] == "flag":
            for row in table[1:]:
                yield from _since_in_row(page, row)
                yield from _direction(page, row)


def first_versions(page: Document, name: str) -> list[str]:
    """The first version read of each of the page's engines that has the flag or shows the metric."""
    if METRIC.fullmatch(name):
        engine = engine_of(name)
        known = load_dialect(engine).known_versions
        return next(([version] for version in known if name in shown(engine, version)), [])
    return [life(engine, name)[0] for engine in page.meta["engines"] if life(engine, name)]


def _since_in_text(page: Document, block: Block) -> Iterator[LintFinding]:
    for match in _NAME_SINCE.finditer(block.text):
        name, stated = match[1], match[2]
        first = first_versions(page, name) if FLAG.fullmatch(name) or METRIC.fullmatch(name) else []
        if first and not any(names_version(stated, version) for version in first):
            yield _wrong_since(page, block.line_at(match.start()), name, stated, first)


def _since_in_row(page: Document, row: Block) -> Iterator[LintFinding]:
    """Every `since` of a row is of its flag, of one of its values, or of a metric in it."""
    engines = [engine for engine in ENGINE_CELLS.get(row.cells[0], ()) if engine != EMBEDDED]
    flags = FLAG.findall(row.cells[1])
    if not engines or not flags or not _SINCE.search(row.text):
        return
    first = [life(engine, flag)[0] for engine in engines for flag in flags if life(engine, flag)]
    first += [version for match in METRIC.finditer(row.text) for version in first_versions(page, match[0])]
    for span in row.spans:
        first += [version for engine in engines for version in _first_with_value(engine, flags[0], span.text)]
    for match in _SINCE.finditer(row.text):
        if not any(names_version(match[1], version) for version in first):
            yield _wrong_since(page, row.line, flags[0], match[1], first)


def _first_with_value(engine: str, flag: str, value: str) -> list[str]:
    having = [one for one in life(engine, flag) if why_value_absent(engine, one, flag, value) is None]
    return having[:1] if len(having) < len(life(engine, flag)) else []


def _wrong_since(page: Document, line: int, name: str, stated: str, first: list[str]) -> LintFinding:
    what = f"{name} is said to be there since {stated}"
    return LintFinding(page.file, line, "flag-span", what, f"since {' or '.join(sorted(set(first)))}")


def _direction(page: Document, row: Block) -> Iterator[LintFinding]:
    for engine in ENGINE_CELLS.get(row.cells[0], ()):
        for flag in FLAG.findall(row.cells[1]):
            wrong, why = WRONG_WAY.get((page.id, vllm_flag(engine, flag)), (0, ""))
            if wrong and direction(row.cells[2]) == wrong:
                yield LintFinding(page.file, row.line, "flag-direction", f"{flag} is moved: {why}", "the other way")
                return


def direction(cell: str) -> int:
    """Which way a cell `now → to` moves a flag: LOWER, HIGHER, or 0 where it does not say."""
    now, arrow, to = cell.partition("→")
    if not arrow:
        now, to = "", cell
    after = re.split(r"[(,:]", to.strip())[0]
    if _UP.search(after) or after.strip() == "on":
        return HIGHER
    if _DOWN.search(after) or after.strip() == "off":
        return LOWER
    if "below" in now or "above" in now:
        return HIGHER if "below" in now else LOWER
    before, number = _NUMBER.findall(now), _NUMBER.match(after.strip())
    if not before or number is None:
        return 0
    old, new = float(before[-1]), float(number[0])
    return HIGHER if new > old else LOWER if new < old else 0
