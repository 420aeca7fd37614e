"""The pages: well formed, their flags real, their arithmetic right, their version facts those of the catalog."""

from __future__ import annotations

import re

import promql_parser
import pytest

from engine.memory import kv_bytes_per_token
from probe.alerts.rules import DEFAULT_RULES
from probe.dialects import load_dialect
from runbooks.flags import catalog, default_of, embedded_flags, version_key, why_value_absent
from runbooks.load import SECTIONS, Runbook, RunbookError, get_runbook, list_runbooks, parse_runbook
from runbooks.recommend import TargetFacts, recommend

PAGES = list_runbooks()
SHORT = ("kv-saturated", "target-missing")
RULES = {rule.id: rule for rule in DEFAULT_RULES}


def prose_words(page: Runbook) -> int:
    """Words of the page without its tables."""
    return len(re.sub(r"(?m)^\s*\|.*$", "", page.markdown).split())


def test_there_is_a_page_for_every_alert_and_one_alone() -> None:
    assert [p.id for p in PAGES] == sorted(RULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_a_page_says_of_its_alert_what_the_rule_says(page: Runbook) -> None:
    assert page.severity == RULES[page.id].severity
    assert set(page.meta["inhibited_by"]) == set(RULES[page.id].inhibited_by)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_a_page_without_a_drill_says_so(page: Runbook) -> None:
    drilled = page.meta["drill"]["replay"] is not None
    assert drilled == (
        "kvoncall replay" in page.sections["Drill"].split("\n\n")[0] and "Not drilled" not in page.sections["Drill"]
    )
    if not drilled:
        assert page.meta["tested"] == {"result": "not drilled"}
        assert page.sections["Drill"].startswith("Not drilled yet")
        assert not page.tested


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_diagnosis_has_at_most_five_steps(page: Runbook) -> None:
    assert 3 <= len(re.findall(r"(?m)^\d\. ", page.sections["Diagnosis"])) <= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_structure_and_length(page: Runbook) -> None:
    assert list(page.sections) == list(SECTIONS)
    low, high = (150, 400) if page.id in SHORT else (300, 600)
    assert low <= prose_words(page) <= high
    assert not re.search(r"TODO|TBD|<[a-z_]+>|XXX", page.markdown)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_every_flag_of_the_table_is_declared_and_exists(page: Runbook) -> None:
    table = [line.split("|")[2] for line in page.sections["Mitigation"].splitlines() if line.strip().startswith("|")]
    named = {flag for cell in table for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert named <= set(page.meta["flags"])
    for flag, entry in page.meta["flags"].items():
        for engine in entry["engines"]:
            if engine == "kvoncall":
                assert flag in embedded_flags()
            else:
                assert catalog(engine)["flags"][flag]["until"] == entry.get("until", {}).get(engine)
        for engine, since in entry.get("since", {}).items():
            assert catalog(engine)["flags"][flag]["since"] == since


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_flags_named_anywhere_are_known(page: Runbook) -> None:
    known = set(catalog("vllm")["flags"]) | set(catalog("sglang")["flags"]) | embedded_flags()
    other = {"--canary", "--target", "--pid", "--query-compute-apps", "--format"}  # of other commands
    assert set(re.findall(r"--[a-z][a-z-]+", page.markdown)) <= known | other


def series_of(engine: str) -> set[str]:
    """The names of the newest version's series, each histogram's with its suffixes."""
    dialect = load_dialect(engine)
    names: set[str] = set()
    for name, kind in dialect.exposed_names(max(dialect.known_versions, key=version_key, default=None)).items():
        names |= {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


SERIES = series_of("vllm") | series_of("sglang") | series_of("kvoncall")
FORMER_NAMES = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}  # said to be former ones
METRIC = r"(?:vllm|sglang|kvoncall):[a-z_]+"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_metrics_named_exist(page: Runbook) -> None:
    assert set(re.findall(METRIC, page.markdown)) <= SERIES | FORMER_NAMES


def test_queries_are_promql() -> None:
    code = [span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.markdown)]
    queries = [span for span in code if re.search(METRIC, span) or re.match(r"(increase|rate|changes|max)\(", span)]
    assert len(queries) >= 80
    for query in queries:
        promql_parser.parse(query)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_no_published_advice_that_is_wrong_is_repeated(page: Runbook) -> None:
    table = "\n".join(line for line in page.sections["Mitigation"].splitlines() if line.strip().startswith("|"))
    assert "--swap-space" not in page.markdown
    assert "--preemption-mode" not in page.markdown
    if page.id in ("eviction-storm", "preemption-livelock", "kv-saturated", "cache-thrash"):
        utilization = [line for line in table.splitlines() if "--gpu-memory-utilization" in line]
        assert all("below 0.92 →" in line for line in utilization)  # up, never down


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.id)
def test_every_page_has_a_recommendation_and_related_pages_exist(page: Runbook) -> None:
    assert recommend(page.id, TargetFacts("kvoncall")).runbook == page.id
    ids = {p.id for p in PAGES}
    assert set(page.meta["look_alikes"]) <= ids
    assert set(page.meta["inhibited_by"]) <= ids


def test_the_published_case_on_the_oom_page_is_computed_right() -> None:
    from probe.replay.scenarios.oom import LLAMA_3_70B

    per_token = kv_bytes_per_token(LLAMA_3_70B, "auto")
    assert per_token == 80 * 8 * 128 * 2 * 2 == 327_680
    drill = get_runbook("oom").sections["Drill"]
    assert f"{per_token:,} B" in drill
    assert f"{per_token * 131072 / 1e9:.2f} GB ({per_token * 131072 / 2**30:.0f} GiB)" in drill
    assert f"{4 * per_token * 131072 / 1e9:.1f} GB for four" in drill


def test_catalog_knows_defaults_by_version() -> None:
    assert default_of("vllm", "0.19.1", "--gpu-memory-utilization") == 0.9
    assert default_of("vllm", "0.20.0", "--gpu-memory-utilization") == 0.92
    assert default_of("vllm", None, "--gpu-memory-utilization") == 0.92
    assert default_of("kvoncall", None, "--max-num-seqs") == 64
    assert version_key("0.32.0+cpu") == (0, 32, 0)
    assert version_key("0.10.1.1") > version_key("0.10.1")


@pytest.mark.parametrize(
    ("value", "version", "exists"),
    [
        ("fp8", "0.6.6", True),
        ("int8_per_token_head", "0.19.1", False),
        ("int8_per_token_head", "0.20.0", True),
        ("int4_per_token_head", "0.24.0", False),
        ("int4_per_token_head", "0.25.0", True),
        ("float16", "0.17.1", False),
        ("float16", None, True),
        ("int4_kivi", None, False),  # ours alone
    ],
)
def test_catalog_knows_values_by_version(value: str, version: str | None, exists: bool) -> None:
    assert (why_value_absent("vllm", version, "--kv-cache-dtype", value) is None) == exists


def test_values_of_the_embedded_engine_are_those_of_its_parser() -> None:
    assert why_value_absent("kvoncall", None, "--kv-cache-dtype", "int4_kivi") is None
    assert "it takes auto" in (why_value_absent("kvoncall", None, "--kv-cache-dtype", "nvfp4") or "")
    assert why_value_absent("kvoncall", None, "--max-num-seqs", 7) is None


def test_unknown_page() -> None:
    with pytest.raises(RunbookError, match="there are: cache-thrash"):
        get_runbook("nope")


GOOD = """---
alert: x
title: T
severity: info
engines: {vllm: ">=0.20,<0.34"}
tested: {result: not drilled}
drill: {replay: null}
owner: me
look_alikes: []
inhibited_by: []
flags:
  --watermark: {engines: [vllm], since: {vllm: "0.24.0"}}
incidents: [A06]
---
""" + "".join(
    f"## {name}\ntext\n" for name in SECTIONS
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("no front matter", "no front matter"),
        ("---\n: [\n---\n", "not YAML"),
        ("---\n- a\n---\n", "not a mapping"),
        (GOOD.replace("title: T\n", ""), "lacks title: write a title"),
        (GOOD.replace("severity: info", "severity: loud"), "severity is 'loud': write one of info"),
        (GOOD.replace("alert: x", "alert: y"), "must agree"),
        (GOOD.replace("owner: me", "owners: me"), "lacks owner"),
        (GOOD.replace("owner: me", "owner: me\nnotes: x"), "unknown key 'notes'"),
        (GOOD.replace(">=0.20,<0.34", "0.20 or later"), "engines is"),
        (GOOD.replace('vllm: ">=0.20', 'vlm: ">=0.20'), "engines is"),
        (GOOD.replace("engines: [vllm]", "engines: [sglang]"), "of which engines says no range"),
        (GOOD.replace("since: {vllm", "since: {sglang"), "add sglang to its engines"),
        (GOOD.replace("--watermark:", "watermark:"), "flags is"),
        (GOOD.replace("result: not drilled", "result: pass"), "tested without a drill"),
        (GOOD.replace("{replay: null}", "{replay: x, command: y}"), "write one of them"),
        (GOOD.replace("{replay: null}", "{command: kvoncall doctor}"), "drill is"),
        (GOOD.replace("look_alikes: []", "look_alikes: [a, a]"), "look_alikes is"),
        (GOOD.replace("[A06]", "[six]"), "incidents is"),
        (GOOD.replace("incidents: [A06]", "gone: {--swap-space: 0.17}"), "gone is"),
        (GOOD.replace("## Verify\ntext\n", ""), "Verify"),
        (GOOD.replace("## Impact\ntext\n", "## Impact\n"), "Impact"),
        (GOOD.replace("## Impact", "## Meaning2\ntext\n## Impact"), "in this order"),
    ],
)
def test_a_bad_page_is_refused_with_one_sentence(text: str, word: str) -> None:
    assert parse_runbook("x", GOOD).alert == "x"
    with pytest.raises(RunbookError, match=word) as caught:
        parse_runbook("x", text)
    assert "\n" not in str(caught.value)
