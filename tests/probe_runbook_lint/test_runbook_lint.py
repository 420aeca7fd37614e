"""Seeded defects, each found where it is; and pages as they are, in which nothing is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe.runbook_lint.commands import commands_in
from probe.runbook_lint.document import read_document
from probe.runbook_lint.finding import CODES, LintFinding
from probe.runbook_lint.flags import flags_in
from probe.runbook_lint.form import WORDS, words
from probe.runbook_lint.lint import lint
from probe.runbook_lint.metrics import METRIC
from probe.runbook_lint.queries import is_query
from runbooks.load import FOLDER, HEADINGS, sha256_of


@pytest.fixture(autouse=True)
def no_user_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVONCALL_RUNBOOKS", str(tmp_path / "none"))


def mutated(folder: Path, page: str, old: str, new: str) -> list[LintFinding]:
    """The findings of a copy of one of our pages in which the first `old` is `new`."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert old in text, f"{page} no longer holds {old!r}"
    file = folder / f"{page}.md"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    return lint([file]).findings


STORM, LEAK, GONE, BREACH = "eviction-storm", "kv-block-leak", "flag-not-in-version", "prefix-isolation-breach"
DEFECTS = [
    # front matter
    (STORM, "severity: warning", "severity: loud", "front-matter", "write one of info, warning, critical"),
    (STORM, "owner: serving", "owners: serving", "front-matter", "owner"),
    (STORM, 'vllm: ">=0.20,<0.34"', "vllm: newest", "front-matter", "engines is"),
    (STORM, 'vllm: ">=0.20,<0.34"', 'vllm: ">=7.0,<8"', "version-range", "no version of vllm"),
    (STORM, "look_alikes: [kv-saturated", "look_alikes: [kv-saturatd", "front-matter", "kv-saturatd"),
    # flags
    (STORM, "  --watermark: {", "  --water-mark: {", "unknown-flag", "--water-mark"),
    (STORM, ', since: {vllm: "0.24.0"}', "", "flag-not-in-range", "--watermark is not in vllm 0.20.0"),
    (STORM, 'since: {vllm: "0.24.0"}', 'since: {vllm: "0.23.0"}', "flag-span", "since 0.24.0"),
    (STORM, "`--watermark` since 0.24.0", "`--watermark` of late", "flag-not-in-range", "text does not say so"),
    (STORM, "Raise `--max-num-seqs` \"for", "Raise `--max-num-sequences` \"for", "unknown-flag", "--max-num-sequences"),
    (STORM, "| both | `--max-num-seqs`", "| SGLang | `--max-num-seqs`", "flag-engine", "for sglang"),
    (STORM, "| both | `--max-num-seqs`", "| vllm | `--max-num-seqs`", "flag-table", "'vllm' is not known"),
    (STORM, "in place of preempting:", "in place of preempting (`--swap-space`):", "flag-not-in-range", "--swap-space"),
    (GONE, "| vLLM | `--kv-offloading-size`", "| vLLM | `--swap-space`", "flag-gone", "gone and recommended"),
    (GONE, '--swap-space: {vllm: "0.17.1"}', '--swap-space: {vllm: "0.16.0"}', "flag-gone", "last in vllm 0.16.0"),
    (GONE, "--prefix-cache-ttl: {vllm: never}", "--watermark: {vllm: never}", "flag-gone", "--watermark"),
    ("kv-dtype-unsupported", "_head` (since 0.20) |", "_head` |", "flag-value", "int8_per_token_head in vllm 0.20.0"),
    ("kv-does-not-fit", "`auto` → `fp8`", "`auto` → `fp9`", "flag-value", "fp9"),
    ("gpu-memory-creep", "kv_cache_config.free_gpu", "kv_cache_config.fre_gpu", "unknown-flag", "fre_gpu"),
    (STORM, "below 0.92 → what the demand needs, 0.92 at most", "now → lower", "flag-direction", "pool"),
    (STORM, "| `--watermark` | 0 → 0.02 to 0.05", "| `--watermark` | 0.1 → 0.05", "flag-direction", "preempt more"),
    (STORM, "`--watermark` since 0.24.0", "`--watermark` since 0.22.0", "flag-span", "since 0.24.0"),
    ("preemption-livelock", "(vLLM since 0.24.0) |", "(vLLM since 0.25.0) |", "flag-span", "since 0.24.0"),
    (STORM, "nobody queues for it | yes |", "nobody queues for it | no |", "flag-restart", "--gpu-memory-utilization"),
    # metrics
    (STORM, "and `vllm:num_requests_w", "and `vllm:num_request_w", "unknown-metric", "vllm:num_requests_waiting"),
    (STORM, "and `vllm:num_requests_w", "and `vllm_num_requests_w", "unknown-metric", "begins like"),
    (LEAK, "(since vLLM 0.9.2; before, the", "(before, the", "metric-not-in-range", "since 0.9.2"),
    ("target-missing", "- vLLM: `/", "- `sglang:evicted_tokens_total`, `/", "metric-not-in-range", "0.5.5.post3"),
    # queries
    (STORM, "`max by (engine) (vllm:kv", "`max by (engine (vllm:kv", "query", "not PromQL"),
    (STORM, "increase(vllm:num_preemptions_total[5m])`: normal", "rate(vllm:kv_cache_usage_perc[5m])`: normal", "query",
     "rate-on-gauge"),
    (STORM, "(vllm:kv_cache_usage_perc)", '(vllm:kv_cache_usage_perc{finished_reason="stop"})', "query", "wrong-label"),
    (STORM, "`max by (engine) (vllm:kv", "`avg(vllm:kv", "query", "average-hides-full"),
    (STORM, "`increase(vllm:num_preemptions_total[5m])`:", "`increase(vllm:num_preemptions[5m])`:", "query", "_total"),
    # commands
    (STORM, "`kvoncall replay eviction-storm`", "`kvoncall replay evictionstorm`", "command", "no replay named"),
    (BREACH, "`kvoncall isolation --target NAME`", "`kvoncall isolation --targets NAME`", "command", "no --targets"),
    (BREACH, "run `kvoncall isolation`", "run `kvoncall isolate`", "command", "no command 'isolate'"),
    (GONE, "`kvoncall flags diff 0.17.1 0.18.0`", "`kvoncall flags diff 0.17.1 9.9`", "command", "9.9"),
    # links
    (STORM, "{replay: eviction-storm,", "{replay: oom,", "link", "is of runbook 'oom'"),
    (STORM, "{replay: eviction-storm,", "{replay: storm,", "link", "no replay 'storm'"),
    (STORM, "inhibited_by: [oom, preemption-livelock]", "inhibited_by: [oom]", "link", "as the rule says"),
    (STORM, "severity: warning", "severity: critical", "link", "as the rule says"),
    (STORM, "alert: eviction-storm", "alert: null", "link", "there is a rule"),
    (STORM, "finishes: `preemption-livelock`", "finishes: `preemption-deadlock`", "link", "preemption-deadlock"),
    # form
    (STORM, "## Verify", "## Verification", "sections", "Verify"),
    (STORM, "## Verify", "## Impact\nTwice.\n\n## Verify", "sections", "there twice"),
    (STORM, "owner: serving on-call", "owner: me\nowner: serving on-call", "front-matter", "owner is there twice"),
    (STORM, "Answers are not cut;", "Answers are [not cut](cut.md);", "link", "no file 'cut.md'"),
    (STORM, "## Escalate", "```promql\nsum(rate(x[5m])\n```\n## Escalate", "query", "not PromQL"),
    (STORM, "## Escalate", "```bash\n$ kvoncall plan --layers 1 \\\n  --lairs 2\n```\n## Esc", "command", "--lairs"),
    (STORM, "A victim stops", "TODO: a victim stops", "placeholder", "TODO"),
    (STORM, "vllm-project/vllm/pull/44594", "vllm-project/pull/44594", "url", "44594"),
    (STORM, "https://github.com", "http://github.com", "url", "https"),
    (STORM, " | preemptions stay 0 | old value |", " | preemptions stay 0 |", "flag-table", "columns"),
    (STORM, "## Impact", "## Impact\n" + "and so on it goes " * 60, "length", "between 250 and 600"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "old", "new", "code", "word"), DEFECTS, ids=lambda value: str(value)[:40])
def test_a_seeded_defect_is_found(tmp_path: Path, page: str, old: str, new: str, code: str, word: str) -> None:
    found = mutated(tmp_path, page, old, new)
    hits = [one for one in found if one.code == code and word in f"{one.what} {one.write}"]
    assert hits, [f"{one.code}: {one.what}" for one in found]
    assert all(one.line > 0 and one.write and one.code in CODES for one in found)


def test_the_line_is_that_of_the_defect(tmp_path: Path) -> None:
    (finding,) = mutated(tmp_path, STORM, "Answers are not cut;", "Answers are not cut (`vllm:no_such_metric`);")
    text = (tmp_path / f"{STORM}.md").read_text(encoding="utf-8").split("\n")
    assert "no_such_metric" in text[finding.line - 1]
    assert finding.file == str(tmp_path / f"{STORM}.md")


def test_in_do_not_a_flag_that_is_gone_may_be_named_and_a_misspelt_one_may_not(tmp_path: Path) -> None:
    assert mutated(tmp_path, STORM, "Reach for swap space", "Reach for `--swap-space`") == []
    (finding,) = mutated(tmp_path, STORM, "Reach for swap space", "Reach for `--swap-spaces`")
    assert (finding.code, finding.what) == ("unknown-flag", "no release read has --swap-spaces")


def test_a_file_that_is_no_page_is_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("# Notes\n", encoding="utf-8")
    (finding,) = lint([file]).findings
    assert (finding.code, finding.line) == ("unreadable", 1)


def test_words_are_counted_outside_code_and_tables(tmp_path: Path) -> None:
    file = tmp_path / "zh" / "x.md"
    file.parent.mkdir()
    body = (
        "## 含义\n一二三 vLLM `code here` <https://a.org/b>\n\n| not | these |\n\n```\nnor these\n```\n- four - five\n"
    )
    file.write_text(f"---\ntitle: x\n---\n{body}", encoding="utf-8")
    assert words(read_document(file)) == 3 + 1 + 2


def translated(folder: Path, change: tuple[str, str] = ("", "")) -> list[LintFinding]:
    """Findings of a page and a stand-in for its translation: its own text under Chinese headings and columns."""
    text = (FOLDER / f"{STORM}.md").read_text(encoding="utf-8")
    (folder / "zh").mkdir()
    (folder / f"{STORM}.md").write_text(text, encoding="utf-8")
    body = text.partition("\n---\n")[2]
    for english, chinese in zip(
        ("Meaning", "Impact", "Diagnosis", "Mitigation", "Verify", "Escalate", "Do not", "Drill", "Sources"),
        HEADINGS["zh"],
        strict=True,
    ):
        body = body.replace(f"\n## {english}\n", f"\n## {chinese}\n")
    columns = "| 引擎 | 参数 | 现值 → 新值 | 预期 | 重启 | 代价 | 验证 | 回退 |"
    body = body.replace("| engine | flag | now → to | expected | restart | costs | verify | rollback |", columns)
    whole = f'---\ntitle: "驱逐风暴"\ntranslated_from: {sha256_of(text)}\n---\n{body}'
    assert change[0] in whole
    (folder / "zh" / f"{STORM}.md").write_text(whole.replace(*change), encoding="utf-8")
    return lint([folder / f"{STORM}.md", folder / "zh" / f"{STORM}.md"]).findings


def test_a_translation_of_the_page_as_it_stands_is_clean(tmp_path: Path) -> None:
    assert translated(tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "code", "word"),
    [
        ("translated_from: ", "translated_from: 0", "front-matter", "64 hexadecimal digits"),
        ("`--watermark`", "`--gpu-memory`", "translation", "names --gpu-memory"),
        ("`--kv-cache-memory-bytes`", "`none`", "translation", "have --kv-cache-memory-bytes"),
        ("vllm:cache_config_info", "vllm:config_info", "translation", "vllm:cache_config_info"),
        ("pull/52530", "pull/52531", "translation", "52530"),
        ("## 升级", "## 上报", "sections", "升级"),
        ("`kvoncall replay eviction-storm`", "`kvoncall replay`", "translation", "replay eviction-storm"),
    ],
)
def test_a_translation_that_says_something_else(tmp_path: Path, old: str, new: str, code: str, word: str) -> None:
    found = translated(tmp_path, (old, new))
    assert [one for one in found if one.code == code and word in f"{one.what} {one.write}"], found


def test_a_translation_is_missing_or_stale(tmp_path: Path) -> None:
    text = (FOLDER / f"{STORM}.md").read_text(encoding="utf-8")
    ours = tmp_path / f"{STORM}.md"
    ours.write_text(text, encoding="utf-8")
    (missing,) = [one for one in lint([ours], folder=tmp_path).findings if one.code == "translation"]
    assert "no translation into zh" in missing.what
    assert sha256_of(text) in missing.write
    assert translated(tmp_path) == []
    ours.write_text(text + "\nMore.\n", encoding="utf-8")
    (stale,) = lint([ours]).findings
    assert "has changed since it was translated" in stale.what


def test_a_page_that_rules_and_replays_name_is_missing(tmp_path: Path) -> None:
    names = {one.file.rpartition("/")[2] for one in lint(folder=tmp_path).findings}
    assert {"oom.md", "eviction-storm.md", "prefix-isolation-breach.md"} <= names


def test_a_page_of_the_user_is_linted_and_needs_no_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    monkeypatch.setenv("KVONCALL_RUNBOOKS", str(theirs))
    text = (FOLDER / "target-missing.md").read_text(encoding="utf-8")
    (ours / "target-missing.md").write_text(text, encoding="utf-8")
    (theirs / "target-missing.md").write_text(text, encoding="utf-8")
    for old, new in (("alert: target-missing", "alert: null"), ("{replay: target-missing", "{replay: null")):
        text = text.replace(old, new)
    text = text.replace('kvoncall: "0.1.0", date: "2026-11-30", result: pass', "result: not drilled")
    (theirs / "our-gap.md").write_text(text, encoding="utf-8")
    found = [one for one in lint(folder=ours).findings if one.file.startswith(str(theirs))]
    assert "'target-missing' is the id of a page of ours, which stays" in [one.what for one in found]
    assert not [one for one in found if one.code == "translation"]
    assert {one.file.rpartition("/")[2] for one in found} == {"target-missing.md", "our-gap.md"}  # oom is not there


@pytest.fixture(scope="module")
def ours() -> list[LintFinding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVONCALL_RUNBOOKS", "/nonexistent")
        result = lint()
    assert result.pages >= 27
    return result.findings


def test_our_pages_are_clean(ours: list[LintFinding]) -> None:
    assert [f"{one.file}:{one.line}: {one.what}" for one in ours if one.code != "translation"] == []
    assert WORDS["en"] == (250, 600)


def test_our_pages_are_translated_as_they_stand(ours: list[LintFinding]) -> None:
    assert [f"{one.file}:{one.line}: {one.what}" for one in ours if one.code == "translation"] == []


def test_nothing_is_overlooked_for_want_of_being_recognised() -> None:
    pages = [read_document(file) for file in FOLDER.glob("*.md")]
    spans = [span for page in pages for block in page.blocks for span in block.spans]
    assert sum(is_query(span) for span in spans) >= 50
    assert sum(len(commands_in(page)) for page in pages) >= 30
    assert sum(len(METRIC.findall(page.body)) for page in pages) >= 130
    assert sum(len(flags_in(block)) for page in pages for block in page.blocks) >= 190
