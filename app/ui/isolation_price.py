"""What isolation costs on an engine that tells it: whose blocks hits were, what was not shared, who holds the cache.

The figures are totals since the engine started, in prompt tokens at a request's first admission.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.changes import flag_value
from app.ui.isolation_replay import foreign
from app.ui.tables import show_table

Stats = Mapping[str, Any]
WHOSE = {
    "own": "own: computed for the same owner before",
    "shared": "shared: computed for another owner",
    "public": "public: of a prefix the operator registered for everybody",
}
OWNERS_SHOWN = 8
FLAGS = ("--prefix-cache-scope", "--prefix-caching-hash-algo", "--prefix-cache-ttl", "--prefix-cache-verify")

HIT_RATE = "prefix_hits_total / prefix_queries_total since the engine started."
LOST = (
    "Prompt tokens that would have been hits as well, had everybody shared with everybody, as a share of all tokens "
    "looked up. The engine counts them for each request when it is first admitted."
)
OTHERS = (
    "Hits on blocks that were computed for another owner and are not public. In scope global they are normal; they "
    "are what a side channel tells."
)
BREACHES = (
    "Hits on blocks whose namespace, adapter, image or weights were not the request's. Refused are those that "
    "--prefix-cache-verify turned into misses."
)


def show_price(engine: Mapping[str, Any]) -> None:
    """Figures and tables from an answer of `/debug/engine`."""
    stats = engine.get("stats") or {}
    if "prefix_hits_by_scope" not in stats:
        st.caption("This engine does not tell whose blocks its hits were.")
        return
    show_setting(engine.get("flags") or {})
    show_tiles(stats)
    left, right = st.columns(2)
    with left:
        st.markdown("**Hits by whose block it was**")
        show_table(by_scope(stats))
    with right:
        st.markdown("**Cached blocks by owner**")
        rows = by_owner(stats)
        show_table(rows)
        if not rows:
            st.caption("No block is cached.")


def show_setting(flags: Mapping[str, Any]) -> None:
    """The flags that decide who shares with whom."""
    known = [f"`{flag} {flag_value(flags[flag])}`" for flag in FLAGS if flag in flags]
    if known:
        st.caption("Started with " + ", ".join(known))


def show_tiles(stats: Stats) -> None:
    """Hit rate, what isolation keeps from hitting, hits on others' blocks, breaches."""
    queries, hits = int(stats.get("prefix_queries_total") or 0), int(stats.get("prefix_hits_total") or 0)
    lost = int(stats.get("prefix_hits_lost_total") or 0)
    shared = int((stats.get("prefix_hits_by_scope") or {}).get("shared") or 0)
    breaches, refused = stats.get("isolation_breaches") or {}, stats.get("prefix_hits_refused") or {}
    total = sum(breaches.values())
    kinds = (f"{foreign(breaches)}; " if total else "") + f"refused: {foreign(refused)}"
    tiles = (
        ("Prefix hit rate", share(hits, queries), f"{words.count(hits)} of {words.count(queries)} tokens", HIT_RATE),
        ("Lost to isolation", share(lost, queries), f"{words.count(lost)} tokens", LOST),
        ("Hits on others' blocks", share(shared, hits), f"{words.count(shared)} tokens", OTHERS),
        ("Isolation breaches", words.count(total), kinds, BREACHES),
    )
    for column, (label, value, note, formula) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.metric(
            label, value, delta=note, delta_color="off", delta_arrow="off", help=formula, border=True, height="stretch"
        )


def share(part: int, whole: int) -> str:
    """A share as a percentage; `no data` of nothing."""
    return words.ratio(part / whole) if whole else "no data"


def by_scope(stats: Stats) -> list[dict[str, object]]:
    """Hit tokens by whose block it was, and those that isolation kept from hitting."""
    queries = int(stats.get("prefix_queries_total") or 0)
    found = stats.get("prefix_hits_by_scope") or {}
    rows = [(WHOSE.get(scope, scope), int(tokens)) for scope, tokens in found.items()]
    rows.append(("lost: another's block would have matched", int(stats.get("prefix_hits_lost_total") or 0)))
    return [{"whose": w, "tokens": words.count(n), "of all looked up": share(n, queries)} for w, n in rows]


def by_owner(stats: Stats) -> list[dict[str, object]]:
    """Blocks each owner's label has in the cache, most first, the small ones in one row."""
    found = {str(owner): int(n) for owner, n in (stats.get("cached_blocks_by_owner") or {}).items()}
    total = sum(found.values())
    ranked = sorted(found.items(), key=lambda pair: (pair[0] == "other", -pair[1]))
    shown, rest = ranked[:OWNERS_SHOWN], ranked[OWNERS_SHOWN:]
    if rest:
        shown.append(("all others", sum(n for _, n in rest)))
    return [{"owner": owner or "unnamed", "blocks": words.count(n), "share": share(n, total)} for owner, n in shown]
