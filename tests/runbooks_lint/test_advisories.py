"""Advisories by version: spans, what has to be in use, and what is never cited."""

from __future__ import annotations

from typing import Any

import pytest

from runbooks.advisories import advisories_for, all_advisories, excluded
from runbooks.versions import version_key


def ids(engine: str, version: str | None, flags: dict[str, Any] | None = None, **in_use: Any) -> set[str]:
    return {advisory.id for advisory in advisories_for(engine, version, flags, **in_use)}


@pytest.mark.parametrize(
    ("advisory", "engine", "last_affected", "first_fixed"),
    [
        ("CVE-2025-25183", "vllm", "0.7.1", "0.7.2"),
        ("CVE-2025-46570", "vllm", "0.8.5.post1", "0.9.0"),
        ("CVE-2025-46722", "vllm", "0.8.5", "0.9.0"),
        ("CVE-2026-105756", "vllm", "0.29.0", "0.30.0"),
        ("CVE-2026-105754", "vllm", "0.29.0", "0.30.0"),
        ("CVE-2026-129356", "vllm", "0.31.0", "0.32.0"),
        ("CVE-2026-94627", "vllm", "0.29.0", "0.30.0"),
        ("GHSA-v97p-wpxp-px84", "vllm", "0.20.2", "0.21.0"),
        ("CVE-2025-32444", "vllm", "0.8.4", "0.8.5"),
        ("CVE-2026-111392", "sglang", "0.5.21", "0.5.23"),
        ("CVE-2026-10813", "lmcache", "0.5.4", "0.5.5"),
        ("CVE-2026-107205", "lmcache", "0.5.5", "0.5.6"),
        ("vllm#44701", "vllm", "0.30.0", "0.31.0"),
        ("vllm#10533", "vllm", "0.6.4.post1", "0.6.5"),
    ],
)
def test_the_fixed_version_is_not_affected(advisory: str, engine: str, last_affected: str, first_fixed: str) -> None:
    flags = {"--enable-prefix-caching": True}
    assert advisory in ids(engine, last_affected, flags)
    assert advisory not in ids(engine, first_fixed, flags)


@pytest.mark.parametrize(
    ("advisory", "engine", "before"),
    [
        ("CVE-2025-46722", "vllm", "0.6.6"),
        ("CVE-2026-129356", "vllm", "0.29.0"),
        ("GHSA-v97p-wpxp-px84", "vllm", "0.15.1"),
        ("CVE-2025-32444", "vllm", "0.6.4"),
        ("CVE-2026-111392", "sglang", "0.5.12"),
        ("CVE-2026-10813", "lmcache", "0.4.9"),
    ],
)
def test_versions_before_the_first_affected_are_spared(advisory: str, engine: str, before: str) -> None:
    assert advisory not in ids(engine, before)


def test_what_is_not_in_use_does_not_apply() -> None:
    assert "CVE-2025-46570" in ids("vllm", "0.8.5")  # on by default from 0.8.0
    assert "CVE-2025-46570" not in ids("vllm", "0.8.5", {"--enable-prefix-caching": False})
    assert "CVE-2025-25183" not in ids("vllm", "0.7.1")  # off by default there
    assert "GHSA-v97p-wpxp-px84" in ids("vllm", "0.20.0", {"--pipeline-parallel-size": 2}, complete=True)
    assert "GHSA-v97p-wpxp-px84" not in ids("vllm", "0.20.0", {"--pipeline-parallel-size": 1})
    off = {"--pipeline-parallel-size": 2, "--async-scheduling": False}
    assert "GHSA-v97p-wpxp-px84" not in ids("vllm", "0.20.0", off)


def test_a_whole_command_line_rules_out_what_it_does_not_name() -> None:
    flags = {"--max-num-seqs": 8}
    assert "CVE-2026-94627" in ids("vllm", "0.29.0", flags)
    assert "CVE-2026-94627" not in ids("vllm", "0.29.0", flags, complete=True)
    mooncake = {"--kv-transfer-config": '{"kv_connector":"MooncakeStoreConnector"}'}
    (found,) = [a for a in advisories_for("vllm", "0.29.0", mooncake, complete=True) if a.id == "CVE-2026-94627"]
    assert found.certain


def test_what_is_not_known_to_be_in_use_is_said() -> None:
    (found,) = [a for a in advisories_for("vllm", "0.29.0") if a.id == "CVE-2026-105756"]
    assert not found.certain
    assert found.condition


def test_security_comes_first_and_an_unknown_version_has_none() -> None:
    kinds = [advisory.kind for advisory in advisories_for("vllm", "0.20.0")]
    assert kinds == sorted(kinds, key=lambda kind: kind != "security")
    assert "bug" in kinds
    assert advisories_for("vllm", None) == []
    assert advisories_for("vllm", "nightly") == []


def test_the_claim_without_a_record_is_never_cited() -> None:
    (claim,) = excluded()
    assert claim.id == "CVE-2026-3108"
    assert all(claim.id not in (a.id, *a.aliases) for a in all_advisories())


def test_the_data_is_sound() -> None:
    found = all_advisories()
    assert len({advisory.id for advisory in found}) == len(found)
    for advisory in found:
        for first, fixed in advisory.affected:
            assert first is None or fixed is None or version_key(first) <= version_key(fixed.removesuffix("+"))
        assert advisory.condition or not advisory.when, advisory.id
        assert advisory.source
        assert advisory.to_dict()["id"] == advisory.id
