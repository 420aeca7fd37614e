"""Flags a page names: each exists in every version stated for its engine, or the page says where it begins and ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from probe.runbook_lint.document import Block, Document, Span, tables
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.versions import flag_versions, names_version, says_bounds
from runbooks.flags import EMBEDDED, catalog, embedded_flags, flag_facts, known_versions, why_absent, why_value_absent
from runbooks.page_schema import NEVER

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]|\bkv_cache_config\.[a-z_]+")
_OTHER_COMMANDS = re.compile(r"(?:kvoncall (?!serve)|nvidia-smi|curl|py-spy|kubectl|docker|promtool)")
# What the engine cell of a row means.
ENGINE_CELLS = {
    "both": ("kvoncall", "vllm"), "两者": ("kvoncall", "vllm"), "vLLM": ("vllm",), "SGLang": ("sglang",),
    "kvoncall": ("kvoncall",), "TensorRT-LLM": ("tensorrt-llm",), "TGI": ("tgi",), "Triton": ("triton",),
    "LMCache": (), "all": (), "全部": (),
}  # fmt: skip
_NO_FLAG = re.compile(r"(?:none|无)(?:[:：].*)?|`return_perf_metrics`|`LMCACHE_[A-Z_]+`")
_CATALOGS = ("vllm", "sglang", "tensorrt-llm", "tgi", "triton")


def check_flags(page: Document) -> Iterator[LintFinding]:
    """Findings of the English page's flags."""
    yield from _declared(page)
    yield from _gone(page)
    for block in page.blocks:
        for flag, offset in flags_in(block):
            yield from _named(page, block, flag, offset)
    yield from _unsaid_bounds(page)
    for table in tables(tuple(page.in_sections("Mitigation"))):
        if len(table[0].cells) > 2 and table[0].cells[1] in ("flag", "参数"):
            for row in table[1:]:
                yield from _row(page, row)


def flags_in(block: Block) -> list[tuple[str, int]]:
    """Engine flags in a block with their offsets; those of other commands are left out."""
    foreign = [(span.start, span.start + len(span.text) + 2) for span in block.spans if _is_foreign(span)]
    return [
        (match[0], match.start())
        for match in FLAG.finditer(block.text)
        if not any(start <= match.start() <= end + 8 for start, end in foreign)  # line breaks and indents inside
    ]


def _is_foreign(span: Span) -> bool:
    return bool(_OTHER_COMMANDS.match(span.text))


def exists(engine: str, version: str | None, flag: str) -> bool:
    return why_absent(engine, version, flag) is None


@lru_cache(maxsize=2048)
def life(engine: str, flag: str) -> tuple[str, ...]:
    """The versions read that have the flag."""
    return tuple(version for version in known_versions(engine) if exists(engine, version, flag))


def _declared(page: Document) -> Iterator[LintFinding]:
    for flag, entry in page.meta["flags"].items():
        line = page.line_of_key("flags", flag)
        for engine in entry["engines"]:
            for what, write, code in _why_wrong(page.meta, engine, flag, entry):
                yield LintFinding(page.file, line, code, what, write)


def _why_wrong(meta: dict[str, Any], engine: str, flag: str, entry: Any) -> Iterator[tuple[str, str, str]]:
    """(what, write, code) of one declared flag of one engine."""
    if engine == EMBEDDED:
        if flag not in embedded_flags():
            yield f"{flag} is not a flag of the embedded engine", _near(flag, [EMBEDDED]), "unknown-flag"
        return
    here = life(engine, flag)
    if not here:
        yield f"no version of {engine} that was read has {flag}", _near(flag, [engine]), "unknown-flag"
        return
    since, until = entry.get("since", {}).get(engine), entry.get("until", {}).get(engine)
    last = here[-1] if here[-1] != known_versions(engine)[-1] else None
    first = here[0] if here[0] != known_versions(engine)[0] else None
    if since is not None and since != first:
        yield f"since of {flag} is {since}", f"{engine} has it since {first or here[0]}", "flag-span"
    if until is not None and until != last:
        yield f"until of {flag} is {until}", f"{engine} has it up to {last or here[-1]}", "flag-span"
    asked = flag_versions(meta, engine)
    yield from (
        (what, write, "flag-not-in-range") for what, write in _uncovered(asked, here, engine, flag, since, until)
    )


def _uncovered(
    asked: list[str], here: tuple[str, ...], engine: str, flag: str, since: str | None, until: str | None
) -> Iterator[tuple[str, str]]:
    """(what, write) for versions of the range that lack the flag, where since and until do not leave them out."""
    known = known_versions(engine)
    first, last = known.index(here[0]), known.index(here[-1])
    missing = [version for version in asked if version not in here]
    before = [version for version in missing if known.index(version) < first]
    after = [version for version in missing if known.index(version) > last]
    between = [version for version in missing if first < known.index(version) < last]
    if before and since is None:
        yield f"{flag} is not in {engine} {before[0]}", f'since: {{{engine}: "{here[0]}"}}'
    if after and until is None:
        yield f"{flag} is not in {engine} {after[-1]}", f'until: {{{engine}: "{here[-1]}"}}'
    if between:
        yield f"{flag} is not in {engine} {between[0]}, though before and after", "a range that leaves it out"


def _near(flag: str, engines: list[str]) -> str:
    names = [name for engine in engines for name in (embedded_flags() if engine == EMBEDDED else _names(engine))]
    near = get_close_matches(flag, names, n=1, cutoff=0.7)
    return near[0] if near else "a flag that exists, or name it under gone"


def _names(engine: str) -> list[str]:
    return list(catalog(engine)["flags"])


def _gone(page: Document) -> Iterator[LintFinding]:
    for name, spans in page.meta.get("gone", {}).items():
        if not name.startswith("--"):
            continue  # a metric
        for engine, last in spans.items():
            here = life(engine, name)
            there_still = bool(here) and here[-1] == known_versions(engine)[-1]
            true = here[-1] if here else NEVER
            if last != true or there_still:
                write = "nothing: take it out of gone, the newest release has it" if there_still else repr(true)
                what = f"{name} is said to be last in {engine} {last}"
                yield LintFinding(page.file, page.line_of_key("gone", name), "flag-gone", what, write)


def _named(page: Document, block: Block, flag: str, offset: int) -> Iterator[LintFinding]:
    """A flag in the text that the front matter does not speak of."""
    if flag in page.meta["flags"] or flag in page.meta.get("gone", {}):
        return
    line, engines = block.line_at(offset), list(page.meta["engines"])
    if block.section == "Do not":
        if flag not in embedded_flags() and not any(life(engine, flag) for engine in _CATALOGS):
            yield LintFinding(page.file, line, "unknown-flag", f"no release read has {flag}", _near(flag, engines))
        return
    for engine in engines:
        if flag in embedded_flags() if engine == EMBEDDED else _throughout(page.meta, engine, flag):
            return
    if any(engine != EMBEDDED and life(engine, flag) for engine in engines):
        what = f"{flag} is not in every version that the page states of any engine"
        yield LintFinding(page.file, line, "flag-not-in-range", what, f"{flag} under flags, with since or until")
    else:
        what = f"no version of {', '.join(engines)} has {flag}"
        yield LintFinding(page.file, line, "unknown-flag", what, _near(flag, engines))


def _throughout(meta: dict[str, Any], engine: str, flag: str) -> bool:
    asked = flag_versions(meta, engine)
    return bool(asked) and all(exists(engine, version, flag) for version in asked)


def _unsaid_bounds(page: Document) -> Iterator[LintFinding]:
    """A flag that part of the range lacks: somewhere beside its name the page must say since or until when."""
    for flag, entry in page.meta["flags"].items():
        mentions = [(block, offset) for block in page.blocks for name, offset in flags_in(block) if name == flag]
        for engine in entry["engines"]:
            here, asked = life(engine, flag), flag_versions(page.meta, engine)
            if not mentions or not here or not asked or all(version in here for version in asked):
                continue
            unsaid = [
                says_bounds(block.sentence(offset), here, known_versions(engine), asked) for block, offset in mentions
            ]
            if all(unsaid):
                block, offset = mentions[0]
                what = f"{engine} has {flag} {unsaid[0]}, and the text does not say so"
                yield LintFinding(
                    page.file, block.line_at(offset), "flag-not-in-range", what, f"{unsaid[0]}, beside it"
                )


def _row(page: Document, row: Block) -> Iterator[LintFinding]:
    """A row of the table of flags: engine, existence, value."""
    if len(row.cells) < 3:
        return
    cell, name = row.cells[0], row.cells[1]
    if cell not in ENGINE_CELLS:
        known = ", ".join(ENGINE_CELLS)
        yield LintFinding(page.file, row.line, "flag-table", f"the engine {cell!r} is not known", f"one of {known}")
        return
    flags = FLAG.findall(name)
    if not flags and not _NO_FLAG.fullmatch(name):
        yield LintFinding(page.file, row.line, "flag-table", f"{name!r} is no flag", "a flag, or none")
    for flag in flags:
        if flag in page.meta.get("gone", {}):
            yield LintFinding(page.file, row.line, "flag-gone", f"{flag} is gone and recommended", "what replaces it")
            continue
        for engine in ENGINE_CELLS[cell]:
            yield from _row_of(page, row, engine, flag)


def _row_of(page: Document, row: Block, engine: str, flag: str) -> Iterator[LintFinding]:
    declared = page.meta["flags"].get(flag, {}).get("engines", ())
    if flag.startswith("--") and engine not in declared:
        what = f"the row recommends {flag} for {engine}, of which the front matter does not declare it"
        yield LintFinding(page.file, row.line, "flag-engine", what, f"{engine} in the engines of {flag}, if it has it")
        return
    if not flag.startswith("--") and not any(exists(engine, v, flag) for v in known_versions(engine)):
        what = f"no version of {engine} that was read has {flag}"
        yield LintFinding(page.file, row.line, "unknown-flag", what, _near(flag, [engine]))
    facts = flag_facts(engine, None, flag) if engine != EMBEDDED else None
    if facts is not None and facts.restart and len(row.cells) > 4 and row.cells[4] in ("no", "否"):
        what = f"{flag} of {engine} takes effect at a start"
        yield LintFinding(page.file, row.line, "flag-restart", what, "yes, in the column restart")
    for span in row.spans:
        if row.cells[2].find(f"`{span.text}`") < 0 or FLAG.search(span.text):
            continue
        yield from _value(page, row, engine, flag, span)


def _value(page: Document, row: Block, engine: str, flag: str, span: Span) -> Iterator[LintFinding]:
    """A value in the cell `now → to`, where the flag takes a choice."""
    if engine == EMBEDDED:
        why = why_value_absent(engine, None, flag, span.text)
        if why is not None:
            yield LintFinding(page.file, row.line, "flag-value", why, "a value it takes")
        return
    asked = [version for version in flag_versions(page.meta, engine) if exists(engine, version, flag)]
    lacking = [version for version in asked if why_value_absent(engine, version, flag, span.text) is not None]
    if not lacking:
        return
    having = [version for version in asked if version not in lacking]
    if not having:
        why = why_value_absent(engine, asked[-1], flag, span.text) or ""
        yield LintFinding(page.file, row.line, "flag-value", why, "a value it takes")
    elif not names_version(row.text, having[0], having[-1]):
        what = f"{flag} takes {span.text} in {engine} {having[0]} to {having[-1]}, not in {lacking[0]}"
        yield LintFinding(page.file, row.line, "flag-value", what, f"since {having[0]}, in the row")
