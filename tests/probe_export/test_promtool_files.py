"""The generated unit tests, run by the real promtool: Prometheus says of each trace what our evaluator says."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from probe.export.alerts import Options, select
from probe.export.exposition import notation
from probe.export.prometheus import RULES_FILE, rule_groups
from probe.export.promtool_tests import test_files as files_of

Promtool = Callable[..., Any]


@functools.cache
def exported(options: Options) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rule groups and test files of a dialect."""
    selection = select(options)
    return rule_groups(selection), files_of(selection)


def write(folder: Path, options: Options, only: tuple[str, ...] = ()) -> list[Path]:
    """Test files of a dialect, each beside a rule file with its own rules only: so promtool is many times faster."""
    groups, files = exported(options)
    paths = []
    for name, content in files.items():
        rule_id = name.removesuffix(".yaml")
        if only and rule_id not in only:
            continue
        own = [[r for r in group["rules"] if r["labels"]["kvoncall_rule"] == rule_id] for group in groups]
        named = [{"name": f"g{i}", "rules": rules} for i, rules in enumerate(own) if rules]
        (folder / rule_id / "tests").mkdir(parents=True)
        (folder / rule_id / RULES_FILE).write_text(json.dumps({"groups": named}))  # JSON is YAML
        paths.append(folder / rule_id / "tests" / name)
        paths[-1].write_text(content)
    return paths


def test_values_as_promtool_writes_them() -> None:
    assert notation([5.0]) == "5"
    assert notation([1.0, 1.0, 1.0]) == "1+0x2"
    assert notation([0.0, 2.0, 4.0, 4.0, 4.0]) == "0+2x2 4+0x1"
    assert notation([3.0, 1.0, -1.0]) == "3-2x2"
    assert notation([1.0, 5.0, 2.0]) == "1 5 2"


@pytest.mark.prometheus
def test_every_alert_of_vllm(tmp_path: Path, promtool: Promtool) -> None:
    paths = write(tmp_path, Options())
    assert len(paths) == 14
    done = promtool("test", "rules", *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(paths)


# What differs between engines: units, ratios of two metrics, ranks, resets, models, what shows up late.
@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (Options(dialect="kvoncall", scrape_interval_s=1.0, time_scale=0.05), ("cache-thrash", "gpu-memory-creep")),
        (Options(dialect="vllm@0.6.6", by_model=True), ("eviction-storm", "kv-saturated")),
        (Options(dialect="sglang@0.5.23"), ("engine-stall", "metrics-unknown", "eviction-storm", "ttft-slo-burn")),
        (Options(dialect="tgi"), ("kv-saturated", "oom")),
        (Options(dialect="triton"), ("ttft-slo-burn", "gpu-memory-creep", "metrics-unknown")),
        (Options(dialect="triton@0.18.0"), ("kv-block-leak",)),
        (Options(dialect="tensorrt-llm", jobs=("a", "b")), ("head-of-line-block", "target-missing")),
    ],
    ids=lambda value: value.dialect if isinstance(value, Options) else "",
)
def test_alerts_of_other_engines(tmp_path: Path, promtool: Promtool, options: Options, rules: tuple[str, ...]) -> None:
    paths = write(tmp_path, options, rules)
    assert len(paths) == len(rules)
    done = promtool("test", "rules", *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(paths)


def test_each_file_has_a_case_that_fires_and_one_that_does_not() -> None:
    for name, text in files_of(select(Options(dialect="kvoncall"))).items():
        asked = [case["alert_rule_test"] for case in yaml.safe_load(text)["tests"]]
        assert any(step["exp_alerts"] for steps in asked for step in steps), name
        assert any(not any(step["exp_alerts"] for step in steps) for steps in asked), name


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("before", "after"),
    [("> 0.05", "> 0.5"), ("vllm:num_preemptions_total", "vllm:num_preemptions"), ('"for": "1m"', '"for": "2m"')],
)
def test_a_rule_that_was_broken_is_found(tmp_path: Path, promtool: Promtool, before: str, after: str) -> None:
    (path,) = write(tmp_path, Options(), ("eviction-storm",))
    rules = path.parents[1] / RULES_FILE
    text = rules.read_text()
    assert before in text
    rules.write_text(text.replace(before, after))
    done = promtool("test", "rules", path)
    assert done.returncode != 0
    assert "KVEvictionStorm" in done.stdout + done.stderr
