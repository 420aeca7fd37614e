"""Runbooks: the list, and one page with the changes computed for the target that an alert or a replay names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.embedded import NAME as EMBEDDED
from app.runtime import Runtime, get_runtime
from app.ui import changes as change_view
from app.ui import replay_view, words
from app.ui.apply import Proposal, confirm_embedded, show_summary_of
from app.ui.forms import author_field, given
from app.ui.guard import guarded, live, page
from app.ui.language import choose_language
from app.ui.links import link, param
from app.ui.quality_apply import RULE as QUALITY
from app.ui.quality_data import candidates_for
from app.ui.runbook_checklist import show_checklist
from app.ui.runbook_findings import show_findings
from app.ui.runbook_list import head_of, show_list
from app.ui.runbook_notes import show_notes
from app.ui.runbook_outputs import show_outputs
from app.ui.runbook_subject import of_incident, of_runbook
from probe.store import Alert, Replay, Store, Target
from probe.targets import measured_facts
from runbooks.changes import Recommendation
from runbooks.facts import TargetFacts, from_facts
from runbooks.load import Runbook, get_runbook
from runbooks.recommend import recommend


@dataclass(frozen=True)
class Context:
    """Whom the page advises: the target, and the alert or replay that led here."""

    target: Target | None
    alert: Alert | None
    replay: Replay | None


@page
def render() -> None:
    """The page."""
    chosen = param("runbook")
    runtime = get_runtime()
    if chosen is None:
        st.title("Runbooks")
        show_list(runtime.store, choose_language())
        return
    page_title = st.empty()
    language = choose_language()
    runbook = get_runbook(chosen, language)
    page_title.title(words.plain(runbook.title))
    st.caption(words.plain(f"Runbook {runbook.id}, {head_of(runbook)}"))
    if runbook.note:
        st.caption(f"▲ {words.plain(runbook.note)}")
    link("runbooks", "All runbooks", ":material/arrow_back:")
    context = find_context(runtime.store)
    if context.target is not None:
        show_advice(runtime, runbook, context)
    else:
        st.info("Open this runbook from an alert or a replay to see the change computed for its target.")
    show_team(runbook, context)
    st.markdown(without_title(runbook.markdown))


def show_team(runbook: Runbook, context: Context) -> None:
    """What the team did and wrote down: the checklist of the incident at hand, and notes."""
    incident = of_incident(context.alert, context.replay)
    subjects = [of_runbook(runbook)] if incident is None else [incident, of_runbook(runbook)]
    with (
        st.expander("Checklist and team notes" if incident else "Team notes", key="team", on_change="rerun"),
        guarded(),
    ):
        author_field()
        if incident is not None:
            show_checklist(runbook, incident)
        show_notes(subjects)


def without_title(markdown: str) -> str:
    """The page below its first heading, which the page's title already says."""
    first, _, rest = markdown.strip().partition("\n")
    return rest if first.startswith("# ") else markdown


def find_context(store: Store) -> Context:
    """What the query parameters alert, replay and target name; unknown ones are ignored."""
    alert_id, replay_id, name = param("alert"), param("replay"), param("target")
    alert = store.alerts.get(int(alert_id)) if alert_id is not None and alert_id.isdigit() else None
    if replay_id is None and alert is not None:
        replay_id = alert.replay_id
    replay = store.replays.get(replay_id) if replay_id is not None else None
    name = name or (alert.target if alert is not None else replay.target if replay is not None else None)
    return Context(store.targets.get(name) if name is not None else None, alert, replay)


def show_advice(runtime: Runtime, runbook: Runbook, context: Context) -> None:
    """The box on top: for whom, what to change, the button, and the progress of the proof."""
    assert context.target is not None
    with st.container(border=True):
        st.subheader(f"For {context.target.name}")
        if context.alert is not None:
            mark = words.alert_mark(context.alert.state).badge
            st.markdown(f"{mark} alert **{context.alert.rule}**: {words.plain(context.alert.summary)}")
            link("alerts", f"Alert {context.alert.id}", ":material/notifications:", alert=context.alert.id)
        facts = facts_of(runtime.store, runbook, context)
        with guarded():
            advice = recommend(runbook.id, facts) if runbook.own else None
            proposal = propose(runtime.store, context, advice)
            show_proposal(proposal, context.target)
            show_apply(runtime, proposal, context)
            if advice is not None and advice.changes and context.replay is None:
                show_outputs(advice, facts, context.target)
        with guarded():
            show_findings(context.target, facts)
        link("capacity", "Plan its memory", ":material/data_usage:", source="target", shown=context.target.name)


def facts_of(store: Store, runbook: Runbook, context: Context) -> TargetFacts:
    """What is known of the target at the time of the alert."""
    assert context.target is not None
    facts = measured_facts(store, context.target, context.alert)
    if runbook.id == QUALITY:
        model = (facts.get("flags") or {}).get("--model", "")
        facts["quality_candidates"] = candidates_for(store, str(model))
    return from_facts(facts)


def propose(store: Store, context: Context, advice: Recommendation | None) -> Proposal:
    """A replay's own recommendation, where it has got that far; else the one computed from the target's facts."""
    if context.replay is not None:
        for entry in reversed(store.replays.journal(context.replay.id)):
            if entry.step == "recommend" and entry.data and "changes" in entry.data:
                data = entry.data
                return proposal_of(data)
    if advice is None:
        return Proposal([], [], "A page of your own: no change is computed for it.")
    return proposal_of(advice.to_dict())


def proposal_of(data: Mapping[str, Any]) -> Proposal:
    """From the keys of `Recommendation.to_dict()`."""
    return Proposal(
        data["changes"], data["refused"], data["summary"], data.get("steps") or (), data.get("alternatives") or (),
        data.get("missing") or (),
    )  # fmt: skip


def show_proposal(proposal: Proposal, target: Target) -> None:
    """The changes, the command line before and after, and what the runbook will not advise."""
    st.markdown(words.plain(proposal.summary))
    change_view.show_changes(proposal.changes)
    if proposal.changes and target.engine == "kvoncall":
        change_view.show_command(target.flags, proposal.changes)
    if proposal.alternatives:
        with st.expander(f"Instead, one at a time ({len(proposal.alternatives)})"):
            change_view.show_changes(proposal.alternatives)
    if proposal.steps:
        st.markdown("**Besides, what no flag of the engine does**")
        st.markdown("\n".join(f"{number}. {words.plain(step)}" for number, step in enumerate(proposal.steps, 1)))
    if proposal.missing and proposal.changes:  # without changes the summary tells it
        st.markdown("**Would help to say more**")
        st.markdown("\n".join(f"- {words.plain(one)}" for one in proposal.missing))
    if proposal.refused:
        with st.expander(f"Considered and not advised ({len(proposal.refused)})", expanded=not proposal.changes):
            for refusal in proposal.refused:
                st.markdown(f"✖ `{refusal['flag']}`: {words.plain(refusal['reason'])}")


def show_apply(runtime: Runtime, proposal: Proposal, context: Context) -> None:
    """The way to apply the change to this kind of target."""
    assert context.target is not None
    replay = context.replay
    if replay is not None:
        show_replay_state(runtime, replay, proposal)
    elif not proposal.changes:
        return
    elif context.target.name == EMBEDDED and runtime.engine is not None:
        if st.button("Apply change", type="primary", icon=":material/build:"):
            confirm_embedded(proposal)
        link("engine", "Watch the engine", ":material/memory:")
    else:
        st.info(f"kvoncall does not control `{context.target.name}`: restart it with the flags above.")


def show_replay_state(runtime: Runtime, replay: Replay, proposal: Proposal) -> None:
    """For a drill: the button while it waits for the change, then the proof step by step."""
    waits = replay.status == "waiting_apply" and not runtime.store.replays.apply_requested(replay.id)
    if waits and st.button("Apply change", type="primary", icon=":material/build:"):
        confirm_drill(replay, proposal)
    if replay.status in replay_view.ENDED:
        replay_view.show_head(replay)
        replay_view.show_result(replay)
        link("incidents", "Open the replay", ":material/science:", replay=replay.id)
    else:
        show_progress(replay.id, replay.status)


@live(1.0)
def show_progress(replay_id: str, drawn_status: str) -> None:
    """Steps and newest journal lines of a running drill; a change of status draws the page again."""
    store = get_runtime().store
    replay = replay_view.as_drawn(store, replay_id, drawn_status)
    if replay is None:
        return
    replay_view.show_head(replay)
    journal = store.replays.journal(replay_id)
    replay_view.show_journal(journal, limit=5)
    if journal:
        st.caption(f"Newest entry {words.ago(journal[-1].ts)}; redrawn every second.")
    link("incidents", "Open the replay", ":material/science:", replay=replay_id)


@st.dialog("Apply change to the drill engine")
def confirm_drill(replay: Replay, proposal: Proposal) -> None:
    """Asks once more, takes the reason, lets the drill go on."""
    with guarded():
        st.markdown(
            f"The drill engine `{replay.target}` restarts with these flags and gets the same load again. "
            "Nothing else is touched."
        )
        show_summary_of(proposal)
        reason = st.text_input("Reason", key="apply-reason", placeholder="kept in the journal")
        if st.button("Apply", type="primary", key="apply-confirm") and given(reason):
            store = get_runtime().store
            store.replays.append(replay.id, "apply", f"change confirmed in the app: {reason.strip()}")
            store.replays.request_apply(replay.id)
            st.rerun()
