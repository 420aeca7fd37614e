"""Alert, runbook and replay close the circle both ways, and pages name only pages that exist."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from probe.alerts.rule import Rule
from probe.alerts.rules import DEFAULT_RULES
from probe.replay.scenario import SCENARIOS
from probe.runbook_lint.document import Document
from probe.runbook_lint.finding import LintFinding
from runbooks.load import SECTIONS

_ID = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# Kebab-case words of engines and APIs, which are no pages.
_WORDS = ("enable-prefix-caching",)


def check_links(page: Document, pages: Collection[str]) -> Iterator[LintFinding]:
    """Findings of one English page's links."""
    rules = {rule.id: rule for rule in DEFAULT_RULES}
    alert = page.meta["alert"]
    if alert is not None and alert not in rules:
        yield _finding(page, "alert", f"there is no alert rule {alert!r}", "null, or a rule's id")
    elif alert is not None:
        yield from _agree(page, rules[alert])
    elif page.id in rules:
        yield _finding(page, "alert", f"alert is null, and there is a rule {page.id!r}", page.id)
    yield from _drill(page)
    yield from _named(page, pages)
    yield from _relative(page)


def missing_pages(pages: Collection[str]) -> Iterator[tuple[str, str]]:
    """(id, why) of pages that a rule or a replay names and that are not there."""
    for rule in DEFAULT_RULES:
        if rule.runbook not in pages:
            yield rule.runbook, f"alert rule {rule.id!r} names it"
    for scenario in SCENARIOS.values():
        if scenario.runbook not in pages:
            yield scenario.runbook, f"replay {scenario.id!r} names it"


def _agree(page: Document, rule: Rule) -> Iterator[LintFinding]:
    if rule.runbook != page.id:
        yield _finding(page, "alert", f"the rule's runbook is {rule.runbook!r}", "the page's own id in the rule")
    if rule.severity != page.meta["severity"]:
        yield _finding(page, "severity", f"severity is {page.meta['severity']}", f"{rule.severity}, as the rule says")
    if set(rule.inhibited_by) != set(page.meta["inhibited_by"]):
        given, right = (", ".join(sorted(ids)) for ids in (page.meta["inhibited_by"], rule.inhibited_by))
        yield _finding(page, "inhibited_by", f"inhibited_by is [{given}]", f"[{right}], as the rule says")


def _drill(page: Document) -> Iterator[LintFinding]:
    replay, command = page.meta["drill"]["replay"], page.meta["drill"].get("command")
    own = next((scenario for scenario in SCENARIOS.values() if scenario.runbook == page.id), None)
    if replay is not None and replay not in SCENARIOS:
        yield _finding(page, "drill", f"there is no replay {replay!r}", "the id of one, or null")
    elif replay is not None and SCENARIOS[replay].runbook != page.id:
        other = SCENARIOS[replay].runbook
        yield _finding(page, "drill", f"replay {replay!r} is of runbook {other!r}", "a replay of this page, or null")
    elif replay is None and own is not None:
        yield _finding(page, "drill", f"replay {own.id!r} is of this page, and the page does not name it", own.id)
    wanted = f"kvoncall replay {replay}" if replay is not None else command
    spans = [span.text for block in page.in_sections("Drill") for span in block.spans]
    if wanted is not None and not any(text == wanted or text.startswith(f"{wanted} ") for text in spans):
        line = next((block.line for block in page.in_sections("Drill")), page.body_line)
        yield LintFinding(page.file, line, "link", "the section Drill does not give the drill's command", f"`{wanted}`")


def _named(page: Document, pages: Collection[str]) -> Iterator[LintFinding]:
    """Ids in code spans that are no page, replay or flag; a page named in Diagnosis or Mitigation as its own."""
    for block in page.in_sections(*SECTIONS):
        for span in block.spans:
            if _ID.fullmatch(span.text) and span.text not in pages and span.text not in (*SCENARIOS, *_WORDS):
                yield LintFinding(
                    page.file, span.line, "link", f"there is no runbook {span.text!r}", "the id of one that exists"
                )


def _relative(page: Document) -> Iterator[LintFinding]:
    """Markdown links to files beside the page."""
    for block in page.blocks:
        for match in _LINK.finditer(block.text):
            target = match[1].partition("#")[0]
            if target and "://" not in target and not (page.path.parent / target).exists():
                line = block.line_at(match.start())
                yield LintFinding(
                    page.file, line, "link", f"there is no file {target!r} beside the page", "one there is"
                )


def _finding(page: Document, key: str, what: str, write: str) -> LintFinding:
    return LintFinding(page.file, page.line_of_key(key), "link", what, write)
