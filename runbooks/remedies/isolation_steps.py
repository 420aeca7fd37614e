"""What no flag does against an isolation breach: who sets the salt, upgrades, resets, names of adapters."""

from __future__ import annotations

from collections.abc import Iterator

from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED, version_key
from runbooks.isolation_facts import ADAPTER, COLLISION, IMAGE, PARTIAL_BLOCK, STALE_WEIGHTS

SALT = "cache_salt = HMAC(secret of the gateway, tenant id and session id)"
_NOT_BY_OWNER = (STALE_WEIGHTS, PARTIAL_BLOCK)  # whose blocks they are does not matter


def steps_for(facts: TargetFacts, kind: str | None) -> Iterator[str]:
    """Steps by engine, version and kind; an unknown kind gets all of them."""
    if facts.engine == EMBEDDED:
        yield from _embedded(kind)
    elif facts.engine == "vllm":
        yield from _vllm(facts, kind)
    else:
        yield f"Keep tenants apart at the gateway: one {facts.engine} per tenant, or a salt if it takes one"


def _embedded(kind: str | None) -> Iterator[str]:
    if kind not in _NOT_BY_OWNER:
        yield "Let the gateway set X-Tenant-ID and X-Session-ID, never the client: who may choose an id can be anybody"
        yield (
            "Register what all may share, such as the system prompt: POST /prefix_cache/public, or "
            "--prefix-cache-public at the start"
        )
    if kind in (STALE_WEIGHTS, None):
        yield "After this update POST /reset_prefix_cache once; 409 means that requests still hold blocks: try again"
    if kind in (ADAPTER, None):
        yield "Load a changed adapter under a new name, with its version in it"


def _vllm(facts: TargetFacts, kind: str | None) -> Iterator[str]:
    if kind in (COLLISION, None) and _before(facts, "0.7.2"):
        yield "Upgrade to vLLM 0.7.2 or later: on Python 3.12 block hashes are predictable before it (CVE-2025-25183)"
    if kind in (IMAGE, None) and _before(facts, "0.9.0"):
        yield "Upgrade to vLLM 0.9.0 or later: from 0.7.0 on size and mode of an image were not hashed (CVE-2025-46722)"
    if kind not in _NOT_BY_OWNER:
        if _before(facts, "0.9.0"):
            yield (
                "Upgrade to vLLM 0.9.0 or later for cache_salt; until then one engine per tenant, or no prefix caching"
            )
        yield f"Gateway: {SALT} on every request, and drop the client's own; one request without it is open to all"
    if kind in (ADAPTER, None):
        yield "Load a changed adapter under a new, versioned name: block keys hold the name only (issue 30931)"
        if _before(facts, "0.31.0"):
            yield "Upgrade to vLLM 0.31.0 or later where salts and adapters meet: before it a key mixes them up"
    if kind in (STALE_WEIGHTS, None):
        yield (
            "After every weight update POST /reset_prefix_cache?reset_external=true when no request runs, or restart. "
            f"A refusal answers 200 too: {_refusal(facts)}. It needs VLLM_SERVER_DEV_MODE=1, which opens far worse "
            "endpoints: only on a closed port. Or put the version of the weights into the salt"
        )
    if kind in (PARTIAL_BLOCK, None):
        yield "vLLM shares full blocks only; with a partial one suspected take n > 1 off and report it with its version"
    if kind in (COLLISION, None):
        yield "There is no TTL in vLLM: blocks stay until their room is needed, or the cache is reset"


def _refusal(facts: TargetFacts) -> str:
    if _before(facts, "0.26.0"):
        return "read the log, and see vllm:prefix_cache_hits_total stand still (since 0.26.0 the body tells)"
    return 'read "success" in the body'


def _before(facts: TargetFacts, version: str) -> bool:
    """Whether the target may be older than that; an unknown version may."""
    return facts.version is None or version_key(facts.version) < version_key(version)
