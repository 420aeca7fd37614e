"""Running the isolation probe from the page: what it will send is said first, then it runs, one round at a time."""

from __future__ import annotations

import streamlit as st

from app.embedded import NAME
from app.runtime import Runtime, get_runtime
from app.ui import words
from app.ui.guard import guarded, live
from app.ui.tables import show_table
from probe.isolation.options import (
    CHECKS,
    DEFAULT_PROBES,
    FEWEST_PROBES,
    MOST_PROBES,
    IsolationOptions,
    plan_budget,
)
from probe.store import Target

LINES_SHOWN = 6
TENANTS_BY = {
    "all": "headers and the field user",
    "header": "headers X-Tenant-ID and X-Session-ID",
    "user": "the field user",
    "salt": "the field cache_salt",
}


def show_run(runtime: Runtime, target: Target) -> None:
    """The button, or the round under way."""
    status = runtime.isolating.status()
    with st.container(horizontal=True, vertical_alignment="center"):
        blocked = runtime.busy()
        if st.button("Probe isolation", icon=":material/lock_person:", disabled=blocked):
            confirm(target)
        if status.running and st.button("Stop probing", icon=":material/stop:", disabled=status.stopping):
            runtime.isolating.stop()
            st.rerun()
        if blocked and not status.running:
            st.caption("A replay or a measurement is running; the probe reads times and waits until it has ended.")
    if status.problem:
        st.error(words.plain(status.problem))
    st.session_state["drawn_isolating"] = status.running
    if status.running:
        show_progress()


@live(1.0)
def show_progress() -> None:
    """What the round does; the page is drawn again when it ends."""
    status = get_runtime().isolating.status()
    if status.running != st.session_state.get("drawn_isolating"):
        st.rerun(scope="app")
    ending = "; stops soon" if status.stopping else ""
    st.markdown(f":blue-badge[◔ probing] `{status.target}`{ending}")
    show_table([{"time": words.clock(at), "what happened": line} for at, line in status.lines[-LINES_SHOWN:]])


@st.dialog("Probe isolation", width="large")
def confirm(target: Target) -> None:
    """Which checks, how many probes; says what will be sent before anything is."""
    with guarded():
        st.markdown(
            f"Sends requests to `{target.name}` as made-up tenants and compares what they get. The text is the "
            "probe's own; nothing of your users is sent or read. It stops at errors."
        )
        checks = st.multiselect("Checks", list(CHECKS), default=list(CHECKS), key="isolation-checks")
        if not checks:
            st.error("Choose at least one check.")
            return
        left, right = st.columns(2)
        probes = left.number_input(
            "Probes of each check", FEWEST_PROBES, MOST_PROBES, DEFAULT_PROBES, key="isolation-probes"
        )
        tenants = right.selectbox(
            "Tenants differ by", list(TENANTS_BY), key="isolation-tenants", format_func=lambda by: TENANTS_BY[by]
        )
        salted = st.checkbox("Each tenant also sends a cache_salt of its own", key="isolation-salted")
        key_env = ask_for_key() if target.name != NAME else None
        options = IsolationOptions(tuple(checks), int(probes), tenants, salted=salted)
        st.markdown(
            f"**Budget:** {words.plain(plan_budget(options).sentence)}. The embedded engine's background traffic "
            "pauses meanwhile."
        )
        if st.button("Probe", type="primary", key="isolation-confirm"):
            get_runtime().start_isolation(target, options, key_env)
            st.rerun()


def ask_for_key() -> str | None:
    """The name of the variable that holds the server's API key; the key itself is neither typed nor kept."""
    name = st.text_input(
        "Environment variable with the API key", key="isolation-key", placeholder="none",
        help="Read from this app's own environment.",
    )  # fmt: skip
    return name.strip() or None
