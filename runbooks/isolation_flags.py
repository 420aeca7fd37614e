"""How strictly a value of a prefix cache flag keeps identities apart, and what is wrong with a laxer one."""

from __future__ import annotations

from typing import Any

PREFIX_CACHING = "--enable-prefix-caching"
ALGO = "--prefix-caching-hash-algo"
SCOPE = "--prefix-cache-scope"
TTL = "--prefix-cache-ttl"
VERIFY = "--prefix-cache-verify"
FORK_SHARING = "--enable-fork-sharing"
FAULT = "--prefix-cache-fault"

STRONG_ALGOS = ("sha256", "sha256_cbor")
SCOPES = ("global", "tenant", "session")  # from the laxest to the strictest
_WEAK_ALGOS = {
    "builtin": "64 bits of Python's hash(), which is no cryptographic one; before vLLM 0.7.2 even predictable",
    "sha256_cbor_64bit": "64 bits of the digest: a collision takes about 2^32 tries",
    "unsafe_truncated": "2 bytes of the digest: of 302 blocks two share a key with a probability of one half",
    **dict.fromkeys(
        ("xxhash", "xxhash_cbor"),
        "fast, but not made to resist collisions: only a secret seed stands in the way, so it is not for an engine "
        "that serves several tenants",
    ),
}


def is_as_strict(flag: str, now: Any, wanted: Any) -> bool:
    """Whether the value in force keeps identities apart at least as well as the wanted one."""
    if flag == ALGO:
        return now in STRONG_ALGOS
    if flag == SCOPE:
        return now in SCOPES and SCOPES.index(now) >= SCOPES.index(wanted)
    if flag == TTL:
        return now is not None and now <= wanted
    return bool(now == wanted)


def why_weaker(flag: str, now: Any, to: Any) -> str | None:
    """Why a value must not be the answer to a breach; None: nothing speaks against it."""
    if flag == ALGO and to in _WEAK_ALGOS:
        return f"wrong direction: {to} is {_WEAK_ALGOS[to]}"
    if flag == SCOPE:
        if to in (None, "global"):
            return "wrong direction: with scope global everybody shares all blocks, and hits tell who cached what"
        if now in SCOPES and not is_as_strict(SCOPE, to, now):
            return f"wrong direction: scope {to} shares what scope {now} keeps apart"
    if flag == TTL and now is not None and (to is None or to > now):
        return "wrong direction: blocks of one session would wait longer for another to find them"
    if flag == VERIFY and not to:
        return "wrong direction: without it a hit is believed, whatever its block holds"
    if flag == FORK_SHARING and now is False and to is not False:
        return "wrong direction: choices would share blocks again"
    if flag == FAULT and to not in (None, "none"):
        return "wrong direction: it makes the cache leave a part out of its keys"
    return None
