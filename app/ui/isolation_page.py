"""Isolation: whether callers of a server see each other through its prefix cache, and what keeping them apart costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import streamlit as st

from app.embedded import NAME
from app.runtime import Runtime, get_runtime
from app.ui import debug, words
from app.ui import isolation_rounds as view
from app.ui.alert_banner import show_alert
from app.ui.debug import EngineUnreachableError
from app.ui.guard import guarded, live, page
from app.ui.isolation_price import show_price
from app.ui.isolation_run import show_run
from app.ui.links import link, param
from app.ui.prefix_tree_view import show_tree
from app.ui.ranges import choose_target
from probe.store import Event, Target

RULE = "prefix-isolation-breach"
SCENARIO = "prefix-collision"
TREE_REFRESH_S = 3.0


@page
def render() -> None:
    """The page."""
    runtime = get_runtime()
    targets = runtime.store.targets.list()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.title("Isolation")
        target = choose_target(targets) if targets else None
    show_alert(runtime.store, RULE)
    if target is None:
        st.info(
            "No target is watched yet: start the embedded engine on the Engine page, or attach a server with "
            "`kvoncall watch --target URL`. `kvoncall isolation --target URL` probes a server without watching it."
        )
        return
    st.subheader("Probe")
    with guarded():
        show_run(runtime, target)
    show_rounds(runtime, target)
    st.subheader("Prefix cache")
    show_cache(target.name)


def show_rounds(runtime: Runtime, target: Target) -> None:
    """The newest round, or the one of the URL, and the earlier ones."""
    found = view.rounds(runtime.store, target.name)
    if not found and runtime.isolating.status().running:
        return
    if not found:
        st.info(
            f"`{target.name}` was not probed yet. **Probe isolation** asks it as made-up tenants; "
            f"`kvoncall isolation --target {words.plain(target.name)}` does the same without this page. The incident "
            f"`{SCENARIO}` shows on an engine of its own what a leak looks like."
        )
        return
    shown = chosen(found, param("round"))
    view.show_round(shown)
    with st.container(horizontal=True):
        link("runbooks", f"Runbook {RULE}", ":material/menu_book:", runbook=RULE, target=target.name)
        if shown is not found[0]:
            link("isolation", "Newest round", ":material/update:", shown=target.name)
    if len(found) > 1:
        view.show_history(found)


def chosen(found: Sequence[Event], wanted: str | None) -> Event:
    """The round with this id, else the newest."""
    return next((event for event in found if str(event.id) == wanted), found[0])


def is_running() -> bool:
    """Whether the embedded engine's process runs."""
    engine = get_runtime().engine
    return engine is not None and engine.snapshot().status.state == "running"


@live(TREE_REFRESH_S)
def show_cache(name: str) -> None:
    """What the engine says of its prefix cache now: the price of isolation, and the tree."""
    target = get_runtime().store.targets.get(name)
    if target is None:
        return
    if target.engine != "kvoncall":
        st.caption(
            "Only the embedded engine tells whose blocks its hits were and shows its prefix tree. On this server, "
            "compare the prefix hit rate on the Overview page before and after salts are set."
        )
        return
    asked = time.time()
    try:
        engine, tree = debug.ask(target.url, "/debug/engine"), debug.ask(target.url, "/debug/prefix")
    except EngineUnreachableError as error:
        start = " Start it on the Engine page." if name == NAME and not is_running() else ""
        st.info(words.plain(f"{error}{start}"))
        return
    show_price(engine)
    st.markdown("**Prefix tree**")
    if tree.get("public_prefixes") is not None:
        st.caption(f"Prefixes the operator registered as public: {words.count(tree['public_prefixes'])}.")
    show_tree(tree)
    st.caption(
        "An owner is a keyed hash of who sent the requests, never the id itself. "
        f"Asked the engine at {words.clock(asked)}; redrawn every {TREE_REFRESH_S:g} s."
    )
