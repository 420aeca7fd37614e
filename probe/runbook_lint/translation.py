"""A translation is there, is of the page as it stands, and names what the page names: no more and no less."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from probe.runbook_lint.commands import commands_in
from probe.runbook_lint.document import Document
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.flags import flags_in
from probe.runbook_lint.form import urls_in
from probe.runbook_lint.metrics import METRIC
from probe.runbook_lint.queries import is_query
from runbooks.load import HEADINGS, sha256_of

_WHAT: dict[str, Callable[[Document], set[str]]] = {
    "flags": lambda page: {flag for block in page.blocks for flag, _ in flags_in(block)},
    "metrics": lambda page: {match[0] for match in METRIC.finditer(page.body)},
    "queries": lambda page: {span.text for block in page.blocks for span in block.spans if is_query(span)},
    "commands": commands_in,
    "addresses": lambda page: set(urls_in(page)),
}


def check_translations(page: Document, translations: dict[str, Document], required: bool) -> Iterator[LintFinding]:
    """Findings of an English page's translations, by language."""
    for lang in HEADINGS:
        if lang in translations:
            yield from _agrees(page, translations[lang])
        elif required:
            where = page.path.parent / lang / page.path.name
            what = f"there is no translation into {lang}"
            yield LintFinding(
                page.file, 1, "translation", what, f"{where} with translated_from: {sha256_of(page.text)}"
            )


def _agrees(page: Document, other: Document) -> Iterator[LintFinding]:
    now = sha256_of(page.text)
    stated = other.meta.get("translated_from") if isinstance(other.meta, dict) else None
    if stated != now:
        what = "the English page has changed since it was translated"
        line = other.line_of_key("translated_from")
        yield LintFinding(other.file, line, "translation", what, f"the changes, then translated_from: {now}")
    for kind, names in _WHAT.items():
        english, translated = names(page), names(other)
        for name in sorted(english - translated):
            what = f"the English page's {kind} have {name}, and the translation does not"
            yield LintFinding(other.file, other.body_line, "translation", what, name)
        for name in sorted(translated - english):
            line = next((n for n, text in enumerate(other.text.split("\n"), 1) if name[:30] in text), other.body_line)
            what = f"the translation names {name}, and the English page does not"
            yield LintFinding(other.file, line, "translation", what, "what the English page has")
