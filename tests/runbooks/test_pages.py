"""The pages: well formed, their flags real, their arithmetic right, their version facts those of the catalog."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine.memory import kv_bytes_per_token
from probe.alerts.rules import DEFAULT_RULES
from probe.cli import main
from runbooks.flags import default_of, version_key, why_value_absent
from runbooks.load import SECTIONS, Runbook, RunbookError, get_runbook, list_runbooks, parse_runbook
from runbooks.recommend import TargetFacts, recommend

PAGES = list_runbooks()
RULES = {rule.id: rule for rule in DEFAULT_RULES}
# Kinds of incident that no alert rule fires for.
WITHOUT_ALERT = {
    "capacity-misjudged", "flag-not-in-version", "kv-does-not-fit", "kv-dtype-unsupported", "metrics-misread",
    "offload-host-memory", "offload-resume-deadlock", "prefix-cache-inert", "shared-gpu-memory",
    "slow-after-retraction", "upgrade-less-kv",
}  # fmt: skip
# Public incidents that a page must answer.
INCIDENTS = (
    "A02", "A03", "A05", "A06", "A07", "A09", "A10", "B03", "B04", "B05", "B06", "B07",
    "C03", "C04", "C05", "C07", "C08", "D01", "D02", "D04", "D07", "D08",
    "E02", "E03", "E04", "E06", "E07", "F01", "F03", "F05", "F06",
)  # fmt: skip
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.id)


def test_there_is_a_page_for_every_alert_and_for_every_incident_without_one() -> None:
    assert {page.id for page in PAGES if page.alert is not None} == set(RULES)
    assert {page.id for page in PAGES if page.alert is None} == WITHOUT_ALERT


def test_every_public_incident_is_answered_by_a_page() -> None:
    assert len(INCIDENTS) == 31
    assert {incident for page in PAGES for incident in page.incidents} == set(INCIDENTS)
    assert all(page.incidents for page in PAGES if page.alert is None)


@each_page
def test_a_page_says_of_its_alert_what_the_rule_says(page: Runbook) -> None:
    if page.alert is None:
        assert page.meta["inhibited_by"] == []
        return
    assert page.severity == RULES[page.id].severity
    assert set(page.meta["inhibited_by"]) == set(RULES[page.id].inhibited_by)


@each_page
def test_a_page_without_a_drill_says_so(page: Runbook) -> None:
    drill, section = page.meta["drill"], page.sections["Drill"]
    if drill["replay"] is not None:
        assert section.startswith(f"`kvoncall replay {drill['replay']}`")
    elif "command" in drill:
        assert " ".join(section.split()).startswith(f"`{drill['command']}`")
    else:
        assert section.startswith("Not drilled: ")
        assert page.meta["tested"] == {"result": "not drilled"}
    assert ("Not drilled" in section) == (not page.tested)


@each_page
def test_diagnosis_has_at_most_five_steps(page: Runbook) -> None:
    assert 3 <= len(re.findall(r"(?m)^\d\. ", page.sections["Diagnosis"])) <= 5


@each_page
def test_structure(page: Runbook) -> None:
    assert list(page.sections) == list(SECTIONS)
    assert page.markdown.startswith("# ")


@each_page
def test_no_published_advice_that_is_wrong_is_repeated(page: Runbook) -> None:
    table = "\n".join(line for line in page.sections["Mitigation"].splitlines() if line.strip().startswith("|"))
    for gone in ("--swap-space", "--preemption-mode"):
        assert gone not in page.markdown.replace(page.sections["Do not"], "")
    if page.id in ("eviction-storm", "preemption-livelock", "kv-saturated", "cache-thrash"):
        utilization = [line for line in table.splitlines() if "--gpu-memory-utilization" in line]
        assert all("below 0.92 →" in line for line in utilization)  # up, never down


@each_page
def test_every_page_has_a_recommendation(page: Runbook) -> None:
    assert recommend(page.id, TargetFacts("kvoncall")).runbook == page.id


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
""" + "".join(f"## {name}\ntext\n" for name in SECTIONS)


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


@pytest.mark.parametrize("page", [p for p in PAGES if "command" in p.meta["drill"]], ids=lambda page: page.id)
def test_a_drill_that_is_a_command_shows_what_the_page_says(
    page: Runbook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path))
    section = page.sections["Drill"]
    for file in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        (tmp_path / "old.yaml").write_text(file, encoding="utf-8")
    code = main(shlex.split(page.meta["drill"]["command"])[1:])
    said = re.search(r"exits\s+with\s+(\d)", section)
    assert code == (int(said[1]) if said else 0)
    shown = capsys.readouterr().out
    for figure in re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.\d+ GiB", section.partition("\n\n")[0]):
        assert figure in shown
