"""Prefix hit collapse: prompts, keys or routing changed, or the cache was switched off.

Flags are rarely the cause, so the advice is mostly to look; what isolates tenants is never weakened to win hits.
"""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import has_vllm_flags, prefix_hits_query
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED, default_of
from runbooks.isolation_flags import ALGO, PREFIX_CACHING, SCOPE, TTL
from runbooks.remedies.elsewhere import steps_elsewhere

ID = "prefix-hit-collapse"


def advise(facts: TargetFacts) -> Recommendation:
    """The cache switched on again where it is off; else where to look."""
    draft = Draft(ID, facts)
    draft.step(
        "Compare two rendered prompts, before and after: a date, an id or a tool list near the front makes all that "
        "follows new"
    )
    draft.step(
        "Compare what the gateway sends: a cache_salt that changes with every request, another session id, another "
        "adapter name"
    )
    draft.step(
        "Compare routing: sessions spread over replicas find nothing of their own. After a restart a cache is empty, "
        "not broken"
    )
    if not has_vllm_flags(facts.engine):
        return steps_elsewhere(draft)
    _switched_on(draft)
    if facts.block_size is not None and facts.traffic.prompt_tokens_mean is not None:
        _block_against_prompt(draft, facts.block_size, facts.traffic.prompt_tokens_mean)
    _keep_isolation(draft)
    draft.refuse(ALGO, None, "will not help: every algorithm finds the same prefixes; a change empties the cache once")
    if draft.changes:
        return draft.done(
            "The prefix cache is off: switch it on, unless that was first aid for prefix-isolation-breach"
        )
    return draft.done("No flag of the engine brings hits back: find what changed in prompts, salts or routing")


def _switched_on(draft: Draft) -> None:
    facts = draft.facts
    now = facts.flags.get(PREFIX_CACHING)
    if now is None and facts.version is not None:
        now = default_of(facts.engine, facts.version, PREFIX_CACHING)
    if now is None:
        draft.lacks(f"whether {PREFIX_CACHING} is in force")
    elif now:
        draft.refuse(PREFIX_CACHING, True, "no change: the prefix cache is on already")
    else:
        draft.propose(
            PREFIX_CACHING,
            True,
            why="the prefix cache is off, so 0 tokens can be found",
            expected="from 0 to the hit rate of before, once the cache has filled",
            cost="not while prefix-isolation-breach is open: switching it off is that page's first aid",
            verify=f"{prefix_hits_query(facts.engine, facts.version)} > 0",
        )


def _block_against_prompt(draft: Draft, block: int, prompt: float) -> None:
    if prompt >= 2 * block:
        return
    draft.step(
        f"Blocks hold {block} tokens and prompts {prompt:.0f}: only whole blocks are found, so little or nothing can "
        "be. Hybrid models have such blocks; see --prefix-match-unit (vLLM since 0.26.0)"
    )


def _keep_isolation(draft: Draft) -> None:
    facts = draft.facts
    if facts.engine != EMBEDDED:
        return
    scope, ttl = facts.flags.get(SCOPE), facts.flags.get(TTL)
    if scope not in (None, "global"):
        draft.refuse(
            SCOPE, "global", f"not for hits: scope {scope} keeps tenants apart. Register shared prompts as public"
        )
        draft.step("Register system prompts as public prefixes (--prefix-cache-public): they are found in every scope")
    if ttl is not None:
        draft.refuse(
            TTL, None, f"not for hits: {ttl} s is part of isolation. Look at kvoncall:prefix_blocks_expired_total"
        )
