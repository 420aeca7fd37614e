"""Incidents: drills that reproduce a real incident on an engine of their own, and what came of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import streamlit as st

from app.runtime import get_runtime
from app.ui import replay_view, words
from app.ui.guard import guarded, live, page
from app.ui.isolation_replay import show_isolation, show_seen, variant_of
from app.ui.links import link, param
from app.ui.quality_data import of_replay, replay_runs
from app.ui.quality_view import show_measurement, show_model_note, show_recommended
from app.ui.tables import show_choices, show_table
from probe.replay.scenario import VARIANTS, Scenario, get_scenario, list_scenarios
from probe.store import Replay

HISTORY = 50


@page
def render() -> None:
    """The page."""
    st.title("Incidents")
    store = get_runtime().store
    replays = store.replays.list(HISTORY)
    chosen = param("replay")
    if chosen is not None:
        show_replay(chosen)
    st.subheader("Scenarios")
    st.caption(
        "A run starts a drill engine of its own; the embedded engine keeps running, its background traffic pauses. "
        "The drill stops before the remedy and waits until you apply it from the runbook."
    )
    for scenario in list_scenarios():
        show_scenario(scenario, replays)
    show_history(replays)


def show_scenario(scenario: Scenario, replays: Sequence[Replay]) -> None:
    """One scenario with the case it stands for, its newest verdict and the button that runs it."""
    with st.container(border=True):
        st.markdown(f"#### {words.plain(scenario.title)}")
        variant = choose_variant(scenario.id)
        if variant is not None:
            scenario = get_scenario(scenario.id, variant)
        st.markdown(f"**Hypothesis:** {words.plain(scenario.hypothesis)}")
        show_case(scenario.article_case)
        newest = next((r for r in replays if r.scenario == scenario.id), None)
        with st.container(horizontal=True, vertical_alignment="center"):
            busy = get_runtime().replay_running()
            if st.button("Run", key=f"run-{scenario.id}", type="primary", icon=":material/play_arrow:", disabled=busy):
                start(scenario.id, variant)
            link("runbooks", f"Runbook {scenario.runbook}", ":material/menu_book:", runbook=scenario.runbook)
            if newest is None:
                st.caption("Never run here.")
            else:
                status = words.replay_mark(newest.status).badge
                verdict = words.verified_mark(replay_view.verdict(newest)).badge
                st.markdown(f"Last run {words.ago(newest.started_at)}: {status} {verdict}")
                link("incidents", "Open last run", ":material/history:", replay=newest.id)


def choose_variant(scenario_id: str) -> str | None:
    """The form of the incident to run; None when it has only one."""
    variants = list(VARIANTS.get(scenario_id, ()))
    return st.selectbox("Variant", variants, key=f"variant-{scenario_id}") if len(variants) > 1 else None


def show_case(case: Mapping[str, Any]) -> None:
    """The published incident with its true figures; a case of words alone says `computed: False`."""
    figures = ", with its figures computed anew" if case.get("computed", True) else ""
    with st.expander(f"The published case behind it{figures}"):
        told = {key: value for key, value in case.items() if key != "computed"}
        show_table([{"figure": name, "value": value} for name, value in _flat(told)])


UNITS = {"gb": "GB", "gib": "GiB", "kv": "KV"}


def _flat(case: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of a nested case as they are read."""
    for key, value in case.items():
        name = prefix + " ".join(UNITS.get(word, word) for word in key.split("_"))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}: ")
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, int | float):
            yield name, words.count(value)
        else:
            yield name, str(value)


def start(scenario_id: str, variant: str | None) -> None:
    """Starts a replay and opens it."""
    with guarded():
        st.query_params["replay"] = get_runtime().start_replay(scenario_id, variant)
        st.rerun()


def show_replay(replay_id: str) -> None:
    """The chosen replay: live while it runs, a report afterwards."""
    replay = get_runtime().store.replays.get(replay_id)
    if replay is None:
        st.warning(f"There is no replay `{replay_id}`; choose one from the history below.")
        return
    st.subheader(f"Replay {replay.id}")
    if replay.status in replay_view.ENDED:
        show_ended(replay)
    else:
        show_progress(replay.id, replay.status)
    link("incidents", "Close this replay", ":material/close:")


@live(1.0)
def show_progress(replay_id: str, drawn_status: str) -> None:
    """A replay under way; when it ends or waits for its change the whole page is drawn again."""
    store = get_runtime().store
    replay = replay_view.as_drawn(store, replay_id, drawn_status)
    if replay is None:
        return
    replay_view.show_head(replay)
    if replay.status == "waiting_apply":
        st.info("▲ The alert fired and the runbook has its answer. Open the runbook and apply the change.")
    replay_view.show_alerts(replay_view.alerts_of(store, replay), replay.id)
    journal = store.replays.journal(replay.id)
    show_seen(journal)
    replay_view.show_journal(journal)
    if journal:
        st.caption(f"Newest entry {words.ago(journal[-1].ts)}; redrawn every second.")


def show_ended(replay: Replay) -> None:
    """Verdict, before/after, alerts and the whole journal."""
    store = get_runtime().store
    replay_view.show_head(replay)
    with guarded():
        show_isolation(replay.result or {})
    replay_view.show_result(replay)
    with guarded():
        show_candidates(replay)
    replay_view.show_alerts(replay_view.alerts_of(store, replay), replay.id)
    with st.expander("Journal", expanded=replay.status != "done"):
        replay_view.show_journal(store.replays.journal(replay.id))


def show_candidates(replay: Replay) -> None:
    """The formats a quality incident measured, with its charts."""
    measurement = of_replay(replay, replay_runs(get_runtime().store, replay))
    if measurement is not None:
        st.markdown("**What every format keeps and takes, measured on this model**")
        show_model_note(measurement.model, measurement.model_flag)
        show_measurement(measurement, key=f"replay-{replay.id}")
        show_recommended(measurement)
        link("quality", "Compare and apply on the Quality page", ":material/fact_check:", measurement=measurement.key)


def show_history(replays: Sequence[Replay]) -> None:
    """All runs, those of other processes and interrupted ones included."""
    st.subheader("History")
    if not replays:
        st.caption("No replay was run against this store yet.")
        return
    rows = [
        {
            "started": words.clock(r.started_at),
            "scenario": r.scenario + (f", {variant}" if (variant := variant_of(r)) else ""),
            "status": words.replay_mark(r.status).text,
            "came to step": r.step or words.DASH,
            "verdict": words.verified_mark(replay_view.verdict(r)).text,
            "took": words.span(r.ended_at - r.started_at) if r.ended_at else words.DASH,
        }
        for r in replays
    ]
    show_choices(rows, [r.id for r in replays], "replay")
