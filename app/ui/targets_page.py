"""Targets: what is watched, and for each which of the metrics that rules need it carries, and what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app.runtime import get_runtime
from app.ui import signals, words
from app.ui.forms import given
from app.ui.guard import guarded, live, page
from app.ui.ranges import choose_target
from app.ui.tables import show_table
from probe.fleet import access_options, attach_found, look_around
from probe.store import Target
from probe.targets import attach_target, look_at

MISSING = ("missing", "hidden", "renamed", "not exposed by this engine", "present")
MARKS = {
    "present": words.Mark("●", "present", "green"),
    "renamed": words.Mark("▲", "renamed since", "orange"),
    "hidden": words.Mark("◌", "hidden", "orange"),
    "missing": words.Mark("✖", "missing", "red"),
    "not exposed by this engine": words.Mark("□", "not of this engine", "gray"),
}


@page
def render() -> None:
    """The page."""
    st.title("Targets")
    store = get_runtime().store
    with st.container(horizontal=True):
        if st.button("Attach a server", icon=":material/add_link:", key="attach"):
            attach()
        if st.button("Find in Prometheus", icon=":material/travel_explore:", key="discover"):
            find_in_prometheus()
    targets = store.targets.list()
    if not targets:
        st.info("No target is watched yet. Attach a server by its address, or start the embedded engine.")
        return
    show_targets()
    target = choose_target(targets)
    show_target(target)


@live(5.0)
def show_targets() -> None:
    """Every watched target with its state and where its samples come from."""
    runtime = get_runtime()
    now = time.time()
    rows = []
    for target in runtime.store.targets.list():
        fresh = signals.freshness(runtime.history, target, now)
        rows.append(
            {
                "target": target.name,
                "state": words.target_mark(fresh.state).text,
                "data": words.ago(fresh.answered_at, now),
                "engine": target.engine,
                "version": str(target.facts.get("version") or "unknown"),
                "read from": "its own metrics" if target.source == "metrics" else "Prometheus",
                "every": f"{target.scrape_interval_s:g} s",
                "url": target.url,
            }
        )
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")


def show_target(target: Target) -> None:
    """What one target carries, and what it says of itself."""
    st.subheader(f"What {target.name} carries")
    report = target.facts.get("coverage")
    if isinstance(report, Mapping):
        show_coverage(report)
    elif target.source == "prometheus":
        st.caption("Read from Prometheus: which metrics it has of this target is not reported.")
    else:
        st.caption("No report yet.")
    if target.source == "metrics" and st.button("Look at its metrics now", icon=":material/refresh:", key="look"):
        look_again(target)
    config = target.facts.get("cache_config_info")
    if isinstance(config, Mapping):
        with st.expander("Configuration that the engine exposes"):
            show_table([{"name": name, "value": value} for name, value in sorted(config.items())])
    if target.kind == "external" and st.button("Stop watching", icon=":material/link_off:", key="detach"):
        detach(target.name)


def look_again(target: Target) -> None:
    """Makes the report anew from what the server shows now."""
    with guarded():
        with st.spinner("Looking…"):
            found = look_at(target.url, target.options)
        get_runtime().store.targets.set_facts(target.name, found.facts)
        st.rerun()


def show_coverage(report: Mapping[str, Any]) -> None:
    """The rows, what needs doing first."""
    rows: Sequence[Mapping[str, Any]] = report.get("rows", [])
    counts = {status: sum(row["status"] == status for row in rows) for status in MISSING}
    st.markdown(
        f"`{report.get('engine')}` {words.plain(str(report.get('version') or '(version unknown)'))}: "
        + " ".join(f"{MARKS[s].badge} {n}" for s, n in counts.items() if n)
    )
    if report.get("assumed"):
        st.warning(words.plain(str(report["assumed"])))
    unread = [r["canonical"] for r in rows if r.get("required") and r["status"] not in ("present", "renamed")]
    if unread:
        st.error(f"Rules need these and cannot be judged without: {words.plain(', '.join(unread))}.")
    for status in MISSING:
        found = [row for row in rows if row["status"] == status]
        if not found:
            continue
        with st.expander(f"{MARKS[status].text}: {len(found)}", expanded=status == "missing"):
            show_table(
                [
                    {
                        "metric": row["canonical"],
                        "read from": row.get("exposed") or words.DASH,
                        "what to do": row.get("todo") or words.DASH,
                        "what differs": row.get("note") or words.DASH,
                    }
                    for row in found
                ]
            )
    for note in report.get("notes", ()):
        st.caption(words.plain(str(note)))


@st.dialog("Attach a server", width="large")
def attach() -> None:
    """Looks at the address before it is watched: it must answer with metrics of an engine known here."""
    with guarded():
        url = st.text_input("Address", key="attach-url", placeholder="http://gpu-7:8000")
        name = st.text_input("Name", key="attach-name", placeholder="the address")
        variable = st.text_input(
            "Environment variable with the Authorization header", key="attach-auth", placeholder="none",
            help="Read from this app's own environment; the header itself is neither typed nor kept.",
        )  # fmt: skip
        if st.button("Attach", type="primary", key="attach-confirm"):
            options = access_options(variable)
            spec = f"{name.strip()}={url.strip()}" if name.strip() else url.strip()
            attach_target(get_runtime().store, spec, options)
            st.rerun()


@st.dialog("Find in Prometheus", width="large")
def find_in_prometheus() -> None:
    """Engines that a Prometheus server scrapes; those chosen are read from there."""
    with guarded():
        url = st.text_input("Address of Prometheus", key="prometheus-url", placeholder="http://prometheus:9090").strip()
        variable = st.text_input(
            "Environment variable with the Authorization header", key="prometheus-auth", placeholder="none"
        )
        if st.button("Look", key="prometheus-look") and url:
            st.session_state["prometheus-found"] = (url, look_around(url, access_options(variable)))
        asked, found = st.session_state.get("prometheus-found", (None, None))
        if found is None or asked != url:
            return
        for warning in found.warnings:
            st.warning(words.plain(warning))
        if not found.candidates:
            st.info("It scrapes no engine known here now.")
            return
        by_name = {one.name: one for one in found.candidates}
        chosen = st.multiselect(
            "Engines", list(by_name), list(by_name), key="prometheus-chosen",
            format_func=lambda name: f"{name} ({', '.join([by_name[name].engine, *by_name[name].models])})",
        )  # fmt: skip
        if st.button("Attach", type="primary", key="prometheus-confirm", disabled=not chosen):
            attach_found(get_runtime().store, url, [by_name[name] for name in chosen], access_options(variable))
            st.rerun()


@st.dialog("Stop watching")
def detach(name: str) -> None:
    """Its alerts resolve; what was stored stays."""
    with guarded():
        st.markdown(f"`{name}` is not read any more and its alerts end. What is stored stays.")
        reason = st.text_input("Reason", key="detach-reason")
        if st.button("Stop watching", type="primary", key="detach-confirm") and given(reason):
            store = get_runtime().store
            store.targets.deactivate(name)
            store.events.add(name, "target_detached", f"No longer watched: {reason}")
            st.rerun()
