"""No advice that the version, the hardware or plain sense refuses: twenty releases x all runbooks x fifty targets.

The judge (`advice_oracle`) reads the releases on its own; a gate with a part taken out is caught by it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runbooks import catalog_data, changes, flag_facts, gate
from runbooks import flags as runbook_flags
from runbooks.facts import TargetFacts
from runbooks.recommend import advised_runbooks, recommend


def _sibling(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


oracle = _sibling("advice_oracle")
configs = _sibling("advice_configs")
RUNBOOKS = advised_runbooks()
EACH = 50
SEED = 20_261_130
# Runbooks whose answer is steps alone: no flag repairs what they are about.
WITHOUT_FLAGS = {"target-missing", "kv-block-leak"}


@pytest.fixture(autouse=True)
def _only_the_packaged_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once: an engine's file is looked at anew for every question, in case the user adds a version meanwhile."""
    monkeypatch.setenv("KVONCALL_CATALOG", str(tmp_path))
    read = functools.cache(catalog_data.load)
    for module in (flag_facts, runbook_flags):
        monkeypatch.setattr(module, "load", read)


def targets(version: str, count: int) -> list[TargetFacts]:
    rng = random.Random(f"{SEED}/{version}")
    dtypes = oracle.form_of(version, "--kv-cache-dtype")["choices"]
    blocks = oracle.form_of(version, "--block-size").get("choices") or [16, 32, 64, 128, 784]
    return [configs.random_facts(rng, version, dtypes, [b for b in blocks if b > 1]) for _ in range(count)]


def faults(runbook: str, facts: TargetFacts) -> tuple[list[str], int]:
    """What is wrong with the advice, and how many changes it has."""
    advice = recommend(runbook, facts)
    after = {**facts.flags, **{c.flag: c.to for c in advice.changes}}
    found = []
    for item in advice.changes:
        found += [f"{item.flag} {item.from_} -> {item.to}: {why}" for why in
                  oracle.wrong_with(facts, runbook, item.flag, item.to, after)]  # fmt: skip
        found += told(facts, item)
    for item in advice.alternatives:
        alone = {**facts.flags, item.flag: item.to}
        found += [f"or {item.flag} -> {item.to}: {why}" for why in
                  oracle.wrong_with(facts, runbook, item.flag, item.to, alone)]  # fmt: skip
        found += told(facts, item)
    return found, len(advice.changes)


def told(facts: TargetFacts, item: changes.FlagChange) -> list[str]:
    """What a change leaves unsaid, and metrics of its query that the release does not have."""
    parts = {"why": item.why, "expected": item.expected, "cost": item.cost, "risk": item.risk, "verify": item.verify}
    found = [f"{item.flag}: says no {name}" for name, text in parts.items() if not text]
    if not any(letter.isdigit() for letter in item.expected):
        found.append(f"{item.flag}: no size of the effect")
    named = oracle.NAMED_METRIC.findall(item.verify)
    return found + [f"{item.flag}: {n} is no metric of it" for n in named if not oracle.has_metric(facts.version, n)]


def test_no_advice_on_the_grid_is_absent_void_wrong_way_out_of_choices_or_impossible() -> None:
    wrong: list[str] = []
    changed: collections.Counter[str] = collections.Counter()
    for version in oracle.VERSIONS:
        for number, facts in enumerate(targets(version, EACH)):
            for runbook in RUNBOOKS:
                found, count = faults(runbook, facts)
                wrong += [f"{runbook} on {version} #{number}: {text}" for text in found]
                changed[runbook] += bool(count)
    assert len(oracle.VERSIONS) == 20
    assert len(RUNBOOKS) == 27
    assert wrong == [], f"{len(wrong)} faults: " + "; ".join(wrong[:8])
    total = len(oracle.VERSIONS) * EACH
    silent = {runbook: changed[runbook] for runbook in RUNBOOKS if changed[runbook] < total * 0.03}
    assert set(silent) == WITHOUT_FLAGS, silent  # silence is no validity
    assert sum(changed.values()) > 0.3 * total * (len(RUNBOOKS) - len(WITHOUT_FLAGS))


def ideas(facts: TargetFacts, rng: random.Random, count: int) -> list[tuple[str, str, Any]]:
    """(runbook, flag, value) somebody might think of: sensible ones and nonsense."""
    flags = [*oracle.READ["flags"], *configs.NONSENSE]
    values: list[Any] = [None, True, False, 0, 1, 16, 64, 256, 2048, 8192, 0.05, 0.9, 0.92, 0.97, 1.2, "auto", "fp8",
                         "fp8_e5m2", "nvfp4", "fp8_ds_mla", "int8_per_token_head", "xxhash", "sha256"]  # fmt: skip
    known = [flag for flag in facts.flags if flag in oracle.READ["flags"]] or flags
    found = []
    for _ in range(count):
        flag = rng.choice(known if rng.random() < 0.6 else flags)
        form = oracle.form_of(facts.version, flag)
        likely = [*((form or {}).get("choices") or ()), facts.flags.get(flag), oracle.default_in(facts, flag)]
        found.append((rng.choice(RUNBOOKS), flag, rng.choice(likely if rng.random() < 0.5 else values)))
    return found


def passed_wrongly(versions: list[str], count: int) -> dict[str, int]:
    """Ideas that the gate lets through and the judge does not, by what is wrong with them."""
    found: collections.Counter[str] = collections.Counter()
    for version in versions:
        rng = random.Random(version)
        for facts in targets(version, 8):
            for runbook, flag, to in ideas(facts, rng, count):
                to = gate.spelled(facts, flag, to)
                if gate.refusal_reason(runbook, facts, flag, to) is None:
                    found.update(why.split(":")[0] for why in
                                 oracle.wrong_with(facts, runbook, flag, to, {**facts.flags, flag: to}))  # fmt: skip
    return dict(found)


def test_the_gate_lets_no_idea_pass_that_the_judge_refuses() -> None:
    assert passed_wrongly(oracle.VERSIONS, 60) == {}


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("_why_impossible", {"absent", "out of choices", "kind"}),
        ("_why_no_change", {"no-op"}),
        ("_why_wrong", {"wrong way"}),
        ("_why_not_this_hardware", {"hardware"}),
        ("why_contradicts", {"void"}),
    ],
)
def test_a_gate_with_a_part_taken_out_is_caught(part: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, part, lambda *args, **more: None)
    assert kinds <= set(passed_wrongly(oracle.VERSIONS[::4], 120))


def test_remedies_without_a_gate_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "refusal_reason", lambda *args, **more: None)
    found: list[str] = []
    for version in oracle.VERSIONS[::5]:
        for facts in targets(version, 12):
            for runbook in RUNBOOKS:
                found += faults(runbook, facts)[0]
    assert len(found) > 50


# SGLang, by the same reading of its releases.

SGLANG_UP = {"--mem-fraction-static", "--max-total-tokens"}
SGLANG_SMALL_POOL = {"eviction-storm", "preemption-livelock", "cache-thrash", "kv-saturated", "slow-after-retraction"}


def sglang_target(rng: random.Random, version: str) -> TargetFacts:
    """A random target of the vLLM grid that runs SGLang with flags of its own."""
    facts: TargetFacts = configs.random_facts(rng, "0.33.0", ["auto"], [16])
    maybe = {
        "--mem-fraction-static": round(rng.uniform(0.4, 0.95), 2),
        "--max-running-requests": facts.max_num_seqs,
        "--chunked-prefill-size": rng.choice([-1, 512, 8192]),
        "--context-length": facts.max_model_len,
        "--kv-cache-dtype": rng.choice(["auto", "fp8_e5m2", "fp8_e4m3"]),
        "--schedule-conservativeness": rng.choice([0.3, 1.0, 1.5]),
        "--disable-radix-cache": rng.random() < 0.5,
        "--enable-hierarchical-cache": rng.random() < 0.5,
        "--hicache-size": rng.choice([0, 100, 400]),
        "--cuda-graph-max-bs": 64,
        "--enable-metrics": True,
        "--swap-space": 4,
    }
    flags = {name: value for name, value in maybe.items() if rng.random() < 0.5}
    step = flags.get("--chunked-prefill-size")
    return dataclasses.replace(
        facts, engine="sglang", version=version, flags=flags, max_num_seqs=flags.get("--max-running-requests"),
        max_num_batched_tokens=step if step and step > 0 else None, max_model_len=flags.get("--context-length"),
        quality_candidates=(), previous_version=None,
    )  # fmt: skip


def sglang_form(version: str, name: str, section: str) -> Any:
    here = oracle.READ["sglang_versions"].index(version)
    for row in oracle.READ[section].get(name, ()):
        first, last = (row if isinstance(row, str) else row["in"]).split("..")
        if oracle.READ["sglang_versions"].index(first) <= here <= oracle.READ["sglang_versions"].index(last):
            return row
    return None


def sglang_faults(runbook: str, facts: TargetFacts) -> tuple[list[str], int]:
    found = []
    advice = recommend(runbook, facts)
    for item in (*advice.changes, *advice.alternatives):
        form, now = sglang_form(facts.version or "", item.flag, "sglang_flags"), facts.flags.get(item.flag)
        if item.to is None:
            gone = form is None and runbook == "flag-not-in-version"
            found += [] if now is not None and (form is not None or gone) else [f"{item.flag}: cannot be taken out"]
        elif form is None:
            found.append(f"{item.flag}: absent")
        else:
            if form.get("choices") and item.to not in form["choices"]:
                found.append(f"{item.flag} {item.to}: out of choices")
            if item.to == now or (now is None and item.to == form.get("default")):
                found.append(f"{item.flag} {item.to}: no-op")
            if item.flag == "--mem-fraction-static" and not 0 < item.to < 1:
                found.append(f"{item.flag} {item.to}: no share")
            if runbook in SGLANG_SMALL_POOL and item.flag in SGLANG_UP and now is not None and item.to < now:
                found.append(f"{item.flag} {now} -> {item.to}: wrong way")
            if runbook in SGLANG_SMALL_POOL and item.flag == "--max-running-requests" and now and item.to > now:
                found.append(f"{item.flag} {now} -> {item.to}: wrong way")
        found += [f"{item.flag}: says no size" for text in (item.expected,) if not any(c.isdigit() for c in text)]
        for name in re.findall(r"sglang:[a-z_]+", item.verify):
            if sglang_form(facts.version or "", name.removesuffix("_bucket"), "sglang_metrics") is None:
                found.append(f"{item.flag}: {name} is no metric of it")
    return found, len(advice.changes)


def test_no_advice_for_sglang_is_absent_void_or_wrong_way() -> None:
    wrong: list[str] = []
    changed: collections.Counter[str] = collections.Counter()
    for version in oracle.READ["sglang_versions"]:
        rng = random.Random(f"{SEED}/{version}")
        for _ in range(20):
            facts = sglang_target(rng, version)
            for runbook in RUNBOOKS:
                found, count = sglang_faults(runbook, facts)
                wrong += [f"{runbook} on {version}: {text}" for text in found]
                changed[runbook] += bool(count)
    assert wrong == [], f"{len(wrong)} faults: " + "; ".join(wrong[:8])
    assert len(changed) == len(RUNBOOKS)
    assert sum(count > 0 for count in changed.values()) >= 16, changed
