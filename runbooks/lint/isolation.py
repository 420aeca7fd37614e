"""Lint of what keeps customers apart in one server's prefix cache. Only where several share it."""

from __future__ import annotations

from collections.abc import Iterator

from runbooks.flags import EMBEDDED
from runbooks.lint.rules import LintFinding, Subject

RUNBOOK = "prefix-isolation-breach"
_SALT_SINCE = {"vllm": "0.9.0", "sglang": "0.5.5.post3", EMBEDDED: None}
_STRONG = ("sha256", "sha256_cbor", "sha256_cbor_64bit")


def salt(subject: Subject) -> Iterator[LintFinding]:
    """A shared cache tells by its speed what others asked, unless requests are salted."""
    if not subject.multi_tenant or not subject.caches_prefixes or subject.engine not in _SALT_SINCE:
        return
    since = _SALT_SINCE[subject.engine]
    if since is not None and subject.older_than(since):
        off = "--disable-radix-cache" if subject.engine == "sglang" else "--no-enable-prefix-caching"
        yield LintFinding(
            "no-salt-here",
            "error",
            "",
            f"customers share one prefix cache, and {subject.engine} {subject.at} knows "
            "no cache_salt: times tell what others asked",
            f"upgrade to {since} and salt requests, or {off}",
            "CVE-2025-46570",
            RUNBOOK,
        )
        return
    yield LintFinding(
        "salt-needed",
        "warn",
        "",
        "customers share one prefix cache: it keeps them apart only where every request "
        "carries a cache_salt, which no flag can force",
        "a secret cache_salt for each customer, set by the gateway; `kvoncall isolation` proves it",
        "CVE-2025-46570",
        RUNBOOK,
    )


def hashes(subject: Subject) -> Iterator[LintFinding]:
    """What a block's identity is made of."""
    if subject.engine != "vllm" or subject.caches_prefixes is False:
        return
    algorithm = subject.in_force("--prefix-caching-hash-algo")
    if subject.older_than("0.8.3"):
        algorithm = "builtin"
    if str(algorithm).startswith("xxhash"):
        yield LintFinding(
            "weak-hash",
            "error" if subject.multi_tenant else "warn",
            "--prefix-caching-hash-algo",
            f"{algorithm} does not resist collisions that are looked for: one customer's prompt may be answered from "
            "another's blocks",
            "--prefix-caching-hash-algo sha256",
            "vllm#54727",
            RUNBOOK,
        )
    if not subject.multi_tenant or algorithm in _STRONG or str(algorithm).startswith("xxhash"):
        return
    if subject.older_than("0.7.2"):
        python = subject.python is None or tuple(int(p) for p in subject.python.split(".")[:2]) >= (3, 12)
        if python:
            yield LintFinding(
                "predictable-hash",
                "error",
                "",
                "block keys begin from a constant on Python 3.12 before vLLM 0.7.2: a "
                "prompt can be made to collide with another customer's",
                "upgrade to 0.10.2 or later",
                "CVE-2025-25183",
                RUNBOOK,
            )
            return
    choose = "--prefix-caching-hash-algo sha256" if not subject.older_than("0.8.3") else "upgrade to 0.10.2 or later"
    yield LintFinding(
        "weak-hash",
        "warn",
        "--prefix-caching-hash-algo",
        f"vLLM {subject.at} keys blocks by Python's own hash unless told otherwise: it does not resist collisions",
        choose,
        "vllm/config/cache.py",
        RUNBOOK,
    )
