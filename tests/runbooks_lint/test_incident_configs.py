"""Configurations of public incidents get the verdict their threads came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.memory.deployment import Gpu
from runbooks.config_lint import Instance, LintFinding, lint_flags, lint_shared_gpu

GIB = 2**30
CASES = json.loads((Path(__file__).parent / "data" / "incident_cases.json").read_text(encoding="utf-8"))


def by_id(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES[kind]]


def linted(case: dict[str, Any]) -> list[LintFinding]:
    known: dict[str, Any] = {
        key: case[key] for key in ("block_size", "max_model_len", "kv_tokens", "multi_tenant", "python") if key in case
    }
    if "sm" in case or "gpu_gib" in case:
        sm = tuple(case["sm"]) if "sm" in case else None
        known["gpu"] = Gpu("card", int(case.get("gpu_gib", 24) * GIB), sm)
    known["checkpoint_quantization"] = case.get("checkpoint")
    known["attention_backend"] = case.get("backend")
    return lint_flags(case["engine"], case["version"], case["flags"], **known)


@pytest.mark.parametrize("case", by_id("flags"))
def test_a_configuration_gets_its_verdict(case: dict[str, Any]) -> None:
    found = {finding.code: finding.severity for finding in linted(case)}
    assert found.get(case["code"]) == case["severity"], found
    if case["severity"] is None:  # what is right has no error of another kind either
        assert [code for code, severity in found.items() if severity == "error"] == case.get("beside", [])


@pytest.mark.parametrize("case", by_id("host_tiers"))
def test_tiers_are_counted_for_every_rank(case: dict[str, Any]) -> None:
    known: dict[str, Any] = {"host_base_bytes": case.get("base_gib", 0) * GIB}
    if "disk_gib" in case:
        known |= {"offload_disk_bytes_per_rank": case["disk_gib"] * GIB, "disk_bytes": case["limit_gib"] * GIB}
    else:
        known |= {"offload_bytes_per_rank": case["size_gib"] * GIB, "host_memory_bytes": case["host_gib"] * GIB}
    found = lint_flags("vllm", "0.18.0", f"-tp {case['tp']}", **known)
    tiers = [finding for finding in found if finding.code.startswith("host-tier")]
    assert [finding.severity for finding in tiers] == ([case["severity"]] if case["severity"] else [])
    assert all(f"{case['total_gib']:,} GiB" in finding.message for finding in tiers)


@pytest.mark.parametrize("case", by_id("shared_gpu"))
def test_servers_that_share_a_card(case: dict[str, Any]) -> None:
    servers = [Instance(name, share, case.get("version")) for name, share in zip("ab", case["shares"], strict=True)]
    found = lint_shared_gpu(
        Gpu("card", int(case["gpu_gib"] * GIB)),
        servers,
        simultaneous=case["simultaneous"],
        global_cap=case.get("global_cap"),
    )
    assert [finding.code for finding in found] == ([case["code"]] if case["code"] else [])
    if case["code"] == "global-cap":
        assert "15.8 GiB" in found[0].message
        assert "0.95" in found[0].instead
