"""What the isolation runbook advises: by kind, by engine and version, and never what is so already."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.config import EngineConfig, apply_changes
from runbooks.changes import Recommendation, refusal_reason
from runbooks.collisions import collision_probability
from runbooks.flags import default_of, why_value_absent
from runbooks.isolation_facts import KINDS, IsolationFacts, kind_of, read_isolation
from runbooks.load import get_runbook
from runbooks.recommend import TargetFacts, from_facts, recommend

ID = "prefix-isolation-breach"
ALGO = "--prefix-caching-hash-algo"
SCOPE = "--prefix-cache-scope"
TTL = "--prefix-cache-ttl"
VERIFY = "--prefix-cache-verify"
FORK = "--enable-fork-sharing"
CACHING = "--enable-prefix-caching"
UNSAFE = ["--prefix-caching-hash-algo", "unsafe_truncated", "--allow-unsafe-replay"]


def embedded(args: list[str], kind: str | None, **isolation: Any) -> TargetFacts:
    flags = EngineConfig.from_args(args).flag_values()
    told = {"engine": "kvoncall", "flags": flags, "memory_plan": {"num_gpu_blocks": 64}}
    return from_facts({**told, "isolation": {"kind": kind, **isolation}})


def vllm(version: str | None, kind: str | None, **labels: str) -> TargetFacts:
    return from_facts({"engine": "vllm", "version": version, "cache_config_info": labels, "isolation": {"kind": kind}})


def advise(facts: TargetFacts) -> Recommendation:
    return recommend(ID, facts)


def refused(advice: Recommendation, flag: str) -> str:
    return " | ".join(r.reason for r in advice.refused if r.flag == flag)


def steps(facts: TargetFacts) -> str:
    return "\n".join(advise(facts).steps)


EVERYTHING = {ALGO: "sha256", SCOPE: "session", TTL: 3600, VERIFY: True, FORK: False}
BY_KIND: list[tuple[str | None, list[str], dict[str, Any]]] = [
    ("collision", UNSAFE, {ALGO: "sha256", SCOPE: "session", TTL: 3600}),
    ("adapter", ["--prefix-cache-fault", "adapter_key", "--allow-unsafe-replay"], {SCOPE: "tenant", VERIFY: True}),
    ("image", ["--prefix-cache-fault", "image_key", "--allow-unsafe-replay"], {SCOPE: "session", VERIFY: True}),
    ("stale-weights", ["--prefix-cache-fault", "weights_key", "--allow-unsafe-replay"], {VERIFY: True}),
    ("partial-block", ["--prefix-cache-fault", "copy_on_write", "--allow-unsafe-replay"], {FORK: False}),
    ("timing", [], {SCOPE: "session"}),
    (None, UNSAFE, EVERYTHING),
]


@pytest.mark.parametrize(("kind", "args", "changes"), BY_KIND, ids=lambda value: str(value))
def test_each_kind_is_closed_by_what_closes_it(kind: str | None, args: list[str], changes: dict[str, Any]) -> None:
    advice = advise(embedded(args, kind))
    assert advice.flag_values() == changes
    assert (kind or "the kind is not known") in advice.summary
    after = EngineConfig.from_args(apply_changes(args, advice.flag_values())).flag_values()
    assert {flag: after[flag] for flag in changes} == changes
    assert advise(embedded(apply_changes(args, changes), kind)).changes == ()  # it is so now: nothing more to propose


def test_the_kinds_are_all_tried() -> None:
    assert {kind for kind, _, _ in BY_KIND} == {*KINDS, None}


def test_a_fault_of_a_drill_is_left_in() -> None:
    for kind, args, _ in BY_KIND:
        if "--prefix-cache-fault" in args:
            advice = advise(embedded(args, kind))
            assert "--prefix-cache-fault" not in advice.flag_values()
            assert "bug in the engine" in refused(advice, "--prefix-cache-fault")


def test_what_is_stricter_already_is_left_alone() -> None:
    args = [ALGO, "sha256_cbor", SCOPE, "session", TTL, "60"]
    advice = advise(embedded(args, "collision"))
    assert advice.changes == ()
    assert f"{TTL} is 60.0 already" in refused(advice, TTL)
    assert f"{ALGO} is sha256_cbor already" in refused(advice, ALGO)
    assert "No change" in advice.summary
    assert "can be anybody" in advice.summary
    assert advise(embedded([SCOPE, "session"], "adapter")).flag_values() == {VERIFY: True}  # tenant would be laxer
    assert advise(embedded([TTL, "86400"], "collision")).flag_values() == {SCOPE: "session", TTL: 3600}


def test_an_engine_that_tells_no_flags_has_the_defaults() -> None:
    advice = advise(TargetFacts("kvoncall", isolation=IsolationFacts("collision")))
    assert advice.flag_values() == {SCOPE: "session", TTL: 3600}


def test_every_change_says_price_and_proof() -> None:
    by_flag = {c.flag: c for c in advise(embedded(UNSAFE, None, breaches=3, requests=40, lost_hit_rate=0.125)).changes}
    assert "3 in 40 requests" in by_flag[ALGO].why
    assert "Now: unsafe_truncated" in by_flag[ALGO].why
    assert "12.5% of the prompt tokens, as measured" in by_flag[SCOPE].cost
    assert "public" in by_flag[SCOPE].cost
    assert by_flag[SCOPE].verify == "kvoncall isolation --target TARGET"
    assert "kvoncall:isolation_breaches_total" in by_flag[VERIFY].verify
    assert by_flag[VERIFY].rollback == "restart with --no-prefix-cache-verify"
    assert by_flag[FORK].rollback == "restart with --enable-fork-sharing"
    for change in by_flag.values():
        data = change.to_dict()
        assert all(data[key] for key in ("why", "expected", "cost", "verify", "rollback"))
        assert "{" not in "".join(map(str, data.values()))
    for nothing_lost_yet in (None, 0.0):
        unmeasured = advise(embedded([], "timing", lost_hit_rate=nothing_lost_yet)).changes[0]
        assert "kvoncall:prefix_hits_lost_to_isolation_total then tells" in unmeasured.cost


def test_turning_the_cache_off_is_first_aid_and_no_change() -> None:
    for kind, args, _ in BY_KIND:
        advice = advise(embedded(args, kind))
        assert CACHING not in advice.flag_values()
        assert ("no help" if kind == "partial-block" else "first aid") in refused(advice, CACHING)
    off = advise(embedded([*UNSAFE, "--no-enable-prefix-caching"], "collision"))
    assert off.flag_values() == {ALGO: "sha256", SCOPE: "session", TTL: 3600}
    assert "not yet" in refused(off, CACHING)


def test_an_unknown_kind_is_closed_whole_and_asked_for() -> None:
    advice = advise(embedded([], None))
    assert advice.flag_values() == {f: v for f, v in EVERYTHING.items() if f != ALGO}  # sha256 is the default
    assert any("kvoncall isolation" in text for text in advice.missing)
    assert advise(embedded([], "telepathy")).flag_values() == advice.flag_values()
    assert advise(embedded([], "timing")).missing == ()


def test_ids_must_come_from_the_gateway() -> None:
    for kind in ("collision", "adapter", "image", "timing", None):
        assert "X-Tenant-ID" in steps(embedded([], kind))
        assert "/prefix_cache/public" in steps(embedded([], kind))
    for kind in ("stale-weights", "partial-block"):
        assert "X-Tenant-ID" not in steps(embedded([], kind))
    assert "/reset_prefix_cache" in steps(embedded([], "stale-weights"))
    assert "new name" in steps(embedded([], "adapter"))
    assert advise(embedded([], "timing")).to_dict()["steps"] == list(advise(embedded([], "timing")).steps)


# vLLM


@pytest.mark.parametrize(
    ("version", "labels", "changes"),
    [
        ("0.6.6", {}, {}),  # no such flag yet
        ("0.8.3", {}, {ALGO: "sha256"}),
        ("0.10.1.1", {"prefix_caching_hash_algo": "sha256_cbor_64bit"}, {ALGO: "sha256"}),
        ("0.10.2", {}, {}),  # the default
        ("0.33.0", {"prefix_caching_hash_algo": "xxhash"}, {ALGO: "sha256"}),
        ("0.33.0", {"prefix_caching_hash_algo": "sha256_cbor"}, {}),
        (None, {}, {ALGO: "sha256"}),  # nobody knows what it runs
    ],
)
def test_vllm_gets_a_strong_hash_where_its_version_has_one(
    version: str | None, labels: dict[str, str], changes: dict[str, str]
) -> None:
    for kind in ("collision", None):
        advice = advise(vllm(version, kind, **labels))
        assert advice.flag_values() == changes
    if version is None:
        assert "exists since vllm 0.8.3" in advice.changes[0].cost
    if version == "0.6.6":
        assert "exists since vllm 0.8.3" in refused(advice, ALGO)


def test_vllm_has_none_of_our_flags() -> None:
    for kind in KINDS:
        assert set(advise(vllm("0.33.0", kind, prefix_caching_hash_algo="builtin")).flag_values()) <= {ALGO}
        assert not {r.flag for r in advise(vllm("0.33.0", kind)).refused} & {SCOPE, TTL, VERIFY, FORK}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("collision", "HMAC"),
        ("collision", "no TTL in vLLM"),
        ("timing", "cache_salt = HMAC"),
        ("adapter", "versioned name"),
        ("stale-weights", "/reset_prefix_cache?reset_external=true"),
        ("stale-weights", "VLLM_SERVER_DEV_MODE=1"),
        ("partial-block", "n > 1"),
    ],
)
def test_what_vllm_needs_besides_flags(kind: str, words: str) -> None:
    assert words in steps(vllm("0.33.0", kind))
    assert words in steps(vllm("0.33.0", None))


@pytest.mark.parametrize(
    ("kind", "last_bad", "first_good", "words"),
    [
        ("collision", "0.7.1", "0.7.2", "CVE-2025-25183"),
        ("timing", "0.8.5.post1", "0.9.0", "for cache_salt"),
        ("image", "0.8.5", "0.9.0", "CVE-2025-46722"),
        ("adapter", "0.30.0", "0.31.0", "salts and adapters"),
        ("stale-weights", "0.25.1", "0.26.0", "read the log"),
    ],
)
def test_upgrades_are_asked_of_versions_that_need_them(kind: str, last_bad: str, first_good: str, words: str) -> None:
    assert words in steps(vllm(last_bad, kind))
    assert words not in steps(vllm(first_good, kind))
    assert words in steps(vllm(None, kind))


def test_what_the_labels_of_vllm_say_is_read() -> None:
    flags = vllm("0.33.0", None, enable_prefix_caching="False", prefix_caching_hash_algo="xxhash").flags
    assert (flags[CACHING], flags[ALGO]) == (False, "xxhash")
    assert "not yet" in refused(advise(vllm("0.33.0", None, enable_prefix_caching="False")), CACHING)
    assert CACHING not in vllm("0.33.0", None).flags


def test_another_engine_is_told_what_any_can_do() -> None:
    advice = advise(TargetFacts("sglang", isolation=IsolationFacts("collision")))
    assert advice.changes == ()
    assert "one sglang per tenant" in advice.steps[0]


# An operator's own idea.


@pytest.mark.parametrize(
    ("now", "flag", "to", "word"),
    [
        ({ALGO: "unsafe_truncated"}, ALGO, "xxhash", "several tenants"),
        ({ALGO: "unsafe_truncated"}, ALGO, "xxhash_cbor", "several tenants"),
        ({ALGO: "sha256"}, ALGO, "unsafe_truncated", "2 bytes"),
        ({SCOPE: "tenant"}, SCOPE, "global", "everybody shares"),
        ({SCOPE: "session"}, SCOPE, None, "everybody shares"),
        ({SCOPE: "session"}, SCOPE, "tenant", "keeps apart"),
        ({TTL: 60.0}, TTL, 3600, "wait longer"),
        ({TTL: 60.0}, TTL, None, "wait longer"),
        ({VERIFY: True}, VERIFY, False, "believed"),
        ({FORK: False}, FORK, True, "share blocks again"),
        ({}, "--prefix-cache-fault", "adapter_key", "leave a part out"),
    ],
)
def test_wrong_ways(now: dict[str, Any], flag: str, to: Any, word: str) -> None:
    reason = refusal_reason(ID, TargetFacts("kvoncall", flags=now), flag, to)
    assert reason is not None
    assert reason.startswith("wrong direction")
    assert word in reason


def test_wrong_ways_of_vllm() -> None:
    for algo in ("builtin", "sha256_cbor_64bit"):
        assert "wrong direction" in (refusal_reason(ID, vllm("0.10.0", None), ALGO, algo) or "")
    assert "last taken by vllm 0.10.1.1" in (refusal_reason(ID, vllm("0.33.0", None), ALGO, "builtin") or "")


@pytest.mark.parametrize(
    ("now", "flag", "to"),
    [
        ({ALGO: "xxhash"}, ALGO, "sha256_cbor"),
        ({SCOPE: "global"}, SCOPE, "tenant"),
        ({TTL: None}, TTL, 60),
        ({TTL: 3600.0}, TTL, 60),
        ({VERIFY: False}, VERIFY, True),
        ({FORK: True}, FORK, False),
        ({CACHING: True}, CACHING, False),
        ({"--prefix-cache-fault": "adapter_key"}, "--prefix-cache-fault", "none"),
    ],
)
def test_right_ways_pass_the_gate(now: dict[str, Any], flag: str, to: Any) -> None:
    assert refusal_reason(ID, TargetFacts("kvoncall", flags=now), flag, to) is None


def test_other_runbooks_do_not_mind() -> None:
    assert refusal_reason("oom", TargetFacts("kvoncall", flags={SCOPE: "session"}), SCOPE, "global") is None


# Evidence


@pytest.mark.parametrize(
    ("breaches", "leaking", "kind"),
    [
        ({"namespace": 3.0, "adapter": 0.0}, [], "collision"),
        ({"namespace": 3.0, "tokens": 1.0}, ["side-channel-tokens"], "collision"),
        ({"adapter": 1.0}, [], "adapter"),
        ({"image": 1.0}, ["leak-canary"], "image"),
        ({"weights": 1.0}, [], "stale-weights"),
        ({"weights": 1.0, "image": 1.0}, [], None),
        ({"something-new": 1.0}, [], None),
        ({}, ["side-channel-tokens", "side-channel-ttft"], "timing"),
        ({}, ["side-channel-tokens", "leak-canary"], None),
        ({}, ["cache-salt"], None),
        ({}, [], None),
    ],
)
def test_what_the_evidence_points_to(breaches: dict[str, float], leaking: list[str], kind: str | None) -> None:
    assert kind_of(breaches, leaking) == kind


def test_facts_are_read_from_what_a_replay_tells() -> None:
    told = {"kind": "image", "breaches": 4, "requests": 20, "lost_hit_rate": 0, "more": "ignored"}
    assert read_isolation(told) == IsolationFacts("image", 4, 20, 0.0)
    assert read_isolation({"kind": "nonsense"}) == IsolationFacts()
    assert read_isolation(None) is None


# The page's arithmetic and version facts.


@pytest.mark.parametrize(
    ("bits", "live", "lookups", "probability"),
    [
        (1, 2, 0, 0.5),
        (1, 1, 1, 0.5),
        (16, 302, 0, 0.50019),
        (16, 0, 10**9, 0.0),
        (16, 1, 0, 0.0),
        (64, 10**6, 10**9, 5.4236e-05),
        (62, 302, 0, 9.8556e-15),
        (256, 10**9, 10**15, 8.6362e-54),
        (8, 10**6, 0, 1.0),
    ],
)
def test_collision_probability(bits: int, live: int, lookups: int, probability: float) -> None:
    assert collision_probability(bits, live, lookups) == pytest.approx(probability, rel=1e-4)


def test_collision_probability_is_that_of_the_birthday_problem() -> None:
    distinct = 1.0
    for i in range(302):
        distinct *= 1 - i / 2**16
    assert collision_probability(16, 302) == pytest.approx(1 - distinct, rel=2e-3)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (8, -1, 0), (8, 0, -1)])
def test_collision_probability_of_nonsense(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs bits"):
        collision_probability(*arguments)


def test_the_page_has_the_computed_numbers() -> None:
    diagnosis = " ".join(get_runbook(ID).sections["Diagnosis"].split())
    assert f"16 bits and 302 images: {collision_probability(16, 302):.0%}" in diagnosis
    one_in = 1 / collision_probability(64, 10**6, 10**9)
    assert f"a billion lookups: 1 in {round(one_in, -3):,.0f}" in diagnosis


def test_the_page_has_the_versions_of_the_catalog() -> None:
    mitigation = get_runbook(ID).sections["Mitigation"]
    since = re.search(r"`sha256` \(vLLM since ([\d.]+), default since ([\d.]+)\)", mitigation)
    assert since is not None
    assert why_value_absent("vllm", since[1], ALGO, "sha256") is None
    assert default_of("vllm", since[2], ALGO) == "sha256"
    assert default_of("vllm", "0.10.1.1", ALGO) == "builtin"
    assert default_of("vllm", "0.7.3", CACHING) is False
    assert default_of("vllm", "0.8.0", CACHING) is True


@pytest.mark.parametrize(
    ("value", "version", "exists"),
    [
        ("sha256", "0.8.3", True),
        ("sha256_cbor", "0.10.1.1", False),
        ("sha256_cbor", "0.10.2", True),
        ("sha256_cbor_64bit", "0.10.1", True),
        ("sha256_cbor_64bit", "0.10.2", False),
        ("builtin", "0.10.1.1", True),
        ("builtin", "0.10.2", False),
        ("xxhash", "0.12.0", False),
        ("xxhash", "0.13.0", True),
        ("unsafe_truncated", None, False),  # ours alone
    ],
)
def test_catalog_knows_hash_algorithms_by_version(value: str, version: str | None, exists: bool) -> None:
    assert (why_value_absent("vllm", version, ALGO, value) is None) == exists


def test_commands_that_are_named_exist() -> None:
    from probe.cli import parser

    page = get_runbook(ID).markdown
    advice = advise(embedded(UNSAFE, None))
    named = re.findall(r"`kvoncall (isolation[^`]*)`", page + " ".join(advice.missing))
    named += [c.verify.removeprefix("kvoncall ") for c in advice.changes if c.verify.startswith("kvoncall isolation")]
    assert len(named) >= 4
    for command in named:
        name, *args = command.split()
        assert name == "isolation"
        parser(name).parse_args(args)
