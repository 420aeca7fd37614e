"""Metrics a page names: each is exposed in every version stated for its engine, or the sentence says since when."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache

from probe.dialects import load_dialect
from probe.dialects.model import HISTOGRAM_SUFFIXES
from probe.runbook_lint.document import Block, Document
from probe.runbook_lint.finding import LintFinding
from probe.runbook_lint.versions import metric_versions, says_bounds
from runbooks.page_schema import NEVER

METRIC = re.compile(r"\b(?:(vllm|sglang|kvoncall):|(trtllm|tgi|nv_trt_llm|nv_llm)_)[a-z0-9_]*[a-z0-9]\b(?!\*)")
_BAD_PREFIX = re.compile(r"`(?:vllm|sglang|kvoncall)_[a-z_]+`|`trtllm:[a-z_]+`")
_ENGINE = {"trtllm": "tensorrt-llm", "nv_trt_llm": "triton", "nv_llm": "triton"}


@cache
def shown(engine: str, version: str | None) -> frozenset[str]:
    """Names of every series a version shows without a flag for hidden ones; of this package for the embedded engine."""
    exposed = load_dialect(engine).exposed
    names: set[str] = set()
    for name, form in exposed.at(version or (exposed.versions[-1] if exposed.versions else "")).items():
        if not form.hidden:
            names |= {name, *(name + part for part in HISTOGRAM_SUFFIXES)} if form.type == "histogram" else {name}
    return frozenset(names)


def check_metrics(page: Document) -> Iterator[LintFinding]:
    """Findings of the English page's metrics."""
    gone = page.meta.get("gone", {})
    yield from _gone(page)
    for block in page.blocks:
        for match in METRIC.finditer(block.text):
            if match[0] not in gone:
                yield from _named(page, block, match[0], match.start())
        for match in _BAD_PREFIX.finditer(block.text):
            name = match[0].strip("`")
            if name not in gone and block.section != "Do not":
                right = re.sub(r"^([a-z]+)_", r"\1:", name) if name[0] != "t" else name.replace(":", "_", 1)
                yield LintFinding(
                    page.file, block.line_at(match.start()), "unknown-metric",
                    f"no engine exposes a name that begins like {name}", right,
                )  # fmt: skip


def engine_of(name: str) -> str:
    """The engine whose prefix the name has."""
    match = METRIC.match(name)
    assert match is not None
    prefix = match[1] or match[2]
    return _ENGINE.get(prefix, prefix)


def _named(page: Document, block: Block, name: str, offset: int) -> Iterator[LintFinding]:
    engine, line = engine_of(name), block.line_at(offset)
    known = load_dialect(engine).known_versions
    if not known:
        if name not in shown(engine, None):
            yield _unknown(page, line, engine, name)
        return
    here = [version for version in known if name in shown(engine, version)]
    if not here:
        if block.section != "Do not":
            yield _unknown(page, line, engine, name)
        return
    asked = metric_versions(page.meta, engine) or [known[-1]]
    if all(version in here for version in asked) or block.section == "Do not":
        return
    unsaid = says_bounds(block.sentence(offset), here, known, asked)
    if unsaid:
        what = f"{engine} shows {name} {unsaid} only, and the page is for {asked[0]} to {asked[-1]}"
        yield LintFinding(page.file, line, "metric-not-in-range", what, f"{unsaid}, in the same sentence")


def _unknown(page: Document, line: int, engine: str, name: str) -> LintFinding:
    near = get_close_matches(name, shown(engine, None), n=1, cutoff=0.7)
    what = f"no version of {engine} that was read exposes {name}"
    return LintFinding(page.file, line, "unknown-metric", what, near[0] if near else "a metric that exists")


def _gone(page: Document) -> Iterator[LintFinding]:
    for name, spans in page.meta.get("gone", {}).items():
        if name.startswith("--"):
            continue
        for engine, last in spans.items():
            known = load_dialect(engine).known_versions
            here = [version for version in known if name in shown(engine, version)]
            if last != (here[-1] if here else NEVER) or here[-1:] == list(known[-1:]):
                yield LintFinding(
                    page.file, page.line_of_key("gone", name), "unknown-metric",
                    f"{name} is said to be last in {engine} {last}", repr(here[-1] if here else NEVER),
                )  # fmt: skip
