"""Prefix isolation breach: close what let one identity's blocks be served to another, at the price of some hits.

Which part of the identity failed decides; where that is not known, everything is closed. Turning the cache off is
first aid, done by hand at once, and not among the changes: they are what lets it stay on.
"""

from __future__ import annotations

from typing import Any

from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED, default_of
from runbooks.isolation_facts import (
    ADAPTER,
    COLLISION,
    IMAGE,
    PARTIAL_BLOCK,
    STALE_WEIGHTS,
    TIMING,
    IsolationFacts,
)
from runbooks.isolation_flags import (
    ALGO,
    FAULT,
    FORK_SHARING,
    PREFIX_CACHING,
    SCOPE,
    TTL,
    VERIFY,
    is_as_strict,
)
from runbooks.remedies.isolation_steps import steps_for

ID = "prefix-isolation-breach"
PROVE = "kvoncall isolation --target TARGET"
NO_BREACH = "sum(increase(kvoncall:isolation_breaches_total[10m])) == 0"
KEEP_S = 3600

_HARDENING: dict[str | None, tuple[tuple[str, Any], ...]] = {
    COLLISION: ((ALGO, "sha256"), (SCOPE, "session"), (TTL, KEEP_S)),
    ADAPTER: ((SCOPE, "tenant"), (VERIFY, True)),
    IMAGE: ((SCOPE, "session"), (VERIFY, True)),
    STALE_WEIGHTS: ((VERIFY, True),),
    PARTIAL_BLOCK: ((FORK_SHARING, False),),
    TIMING: ((SCOPE, "session"),),
    None: ((ALGO, "sha256"), (SCOPE, "session"), (TTL, KEEP_S), (VERIFY, True), (FORK_SHARING, False)),
}
_WHY = {
    ALGO: "a SHA-256 key names one text only: nobody knows two texts with the same one, and by chance there are none "
    "(256 bits). Now: {now}, which does not promise that",
    SCOPE: "with scope {to} the key of the first private block says whose it is, and later blocks inherit it: a {to} "
    "finds its own blocks and public prefixes. With scope {now} others find them too",
    TTL: "a block nobody has used for an hour is forgotten: less of others is there to be found. Now: {now}",
    VERIFY: "every hit is compared with what the request is: tokens, adapter, images, weights, owner. What differs is "
    "computed anew, so a part missing from the key harms nobody",
    FORK_SHARING: "the choices of a request (n > 1) get blocks of their own, so none can write into another's",
}
_EXPECTED = {
    ALGO: "no collision by chance: 256 bits a key",
    SCOPE: "one {to} has no hits on another's blocks but public ones, and cannot tell what it has cached",
    TTL: "cached blocks stay at most {to} s after their last use",
    VERIFY: "no block of another identity is served; mismatches show in kvoncall:prefix_hits_refused_total",
    FORK_SHARING: "choices equal those of separate requests",
}
_COST = {
    ALGO: "hashing of microseconds a block: `kvoncall bench prefix` measures it",
    TTL: "sessions that pause longer are computed anew",
    VERIFY: "the tokens of every cached block are kept and compared",
    FORK_SHARING: "a prompt with n choices is kept n times, apart from prefix hits",
}
_VERIFY_BY = {
    ALGO: NO_BREACH,
    SCOPE: PROVE,
    TTL: "increase(kvoncall:prefix_blocks_expired_total[2h]) > 0",
    VERIFY: NO_BREACH,
    FORK_SHARING: "increase(kvoncall:forks_total[10m]) == 0",
}


def advise(facts: TargetFacts) -> Recommendation:
    """Flag changes for the `prefix-isolation-breach` runbook, and what flags cannot do."""
    draft = Draft(ID, facts)
    kind = facts.isolation.kind if facts.isolation is not None else None
    if kind is None:
        draft.lacks(f"which part of the identity failed: `{PROVE}`, or the counter's label `kind`")
    for flag, value in _HARDENING[kind]:
        if facts.engine == EMBEDDED or flag == ALGO:
            _propose(draft, flag, value)
    for step in steps_for(facts, kind):
        draft.step(step)
    _name_first_aid(draft, kind)
    if facts.flags.get(FAULT) not in (None, "none"):
        draft.refuse(FAULT, "none", "it stands for a bug in the engine; a drill keeps it, so that the remedy is tested")
    return draft.done(_summary(draft, kind))


def _propose(draft: Draft, flag: str, to: Any) -> None:
    facts = draft.facts
    now = facts.flags.get(flag)
    if flag not in facts.flags and (facts.engine == EMBEDDED or facts.version is not None):
        now = default_of(facts.engine, facts.version, flag)
    if is_as_strict(flag, now, to):
        draft.refuse(flag, to, f"no change: {flag} is {now} already")
        return
    words = {"now": "no value" if now is None else now, "to": to}
    seen = facts.isolation.seen if facts.isolation is not None else ""
    why = _WHY[flag].format(**words) + (f"; breaches: {seen}" if seen else "")
    verify = _VERIFY_BY[flag] if facts.engine == EMBEDDED else PROVE
    cost = _price_of_scope(facts.isolation, to) if flag == SCOPE else _COST[flag]
    draft.propose(flag, to, why=why, expected=_EXPECTED[flag].format(**words), cost=cost, verify=verify)


def _price_of_scope(isolation: IsolationFacts | None, scope: str) -> str:
    """An engine that shares with everybody has lost nothing yet, so a loss of 0 says nothing about the price."""
    lost = isolation.lost_hit_rate if isolation is not None else None
    price = f"what only another {scope} has cached is computed again"
    if lost:
        price += f": {lost:.1%} of the prompt tokens, as measured"
    else:
        price += "; kvoncall:prefix_hits_lost_to_isolation_total then tells how many tokens"
    return f"{price}. Prefixes registered as public, such as a system prompt, stay shared"


def _name_first_aid(draft: Draft, kind: str | None) -> None:
    if kind == PARTIAL_BLOCK:
        draft.refuse(PREFIX_CACHING, False, "no help: choices of a request share its blocks without it as well")
    elif draft.facts.flags.get(PREFIX_CACHING) is False:
        draft.refuse(
            PREFIX_CACHING,
            True,
            f"not yet: it is off as first aid. Turn it on together with the changes here, then run `{PROVE}`",
        )
    else:
        draft.refuse(
            PREFIX_CACHING,
            False,
            "first aid by hand, at once and until the changes are in: no hits, no breaches (a KV connector has hits of "
            "its own: take it out too); every prompt is computed in full meanwhile. Not needed once the probe finds no "
            "leak",
        )


def _summary(draft: Draft, kind: str | None) -> str:
    what = f"Close it ({kind})" if kind is not None else "Close everything, as the kind is not known"
    if draft.changes:
        return f"{what}: " + ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes)
    if draft.facts.engine == EMBEDDED:
        return (
            "No change: what closes this is in force already. Look at who sets the ids (a client that can choose them "
            f"can be anybody), and run `{PROVE}` again"
        )
    return f"{what}: no flag of this engine and version does it; the steps do"


def _word(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
