"""The list of runbooks: those of alerts in force, then all by what leads to them, with a search over their text."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.ui import words
from app.ui.links import link
from probe.store import Store
from runbooks.load import Runbook, list_runbooks, unreadable_pages, user_folder


def show_list(store: Store, language: str) -> None:
    """Every runbook with its meaning in a sentence."""
    show_firing(store)
    wanted = st.text_input(
        "Search", key="search", bind="query-params", icon=":material/search:",
        placeholder="a flag, a metric, an incident (A06), a word",
    )  # fmt: skip
    pages = list_runbooks(language)
    found = [page for page in pages if matches(page, wanted or "")]
    if wanted:
        st.caption(f"{len(found)} of {len(pages)} pages have all of: {words.plain(wanted)}")
    show_group("Alerts", [p for p in found if p.alert is not None])
    show_group("Incidents that no alert of ours tells", [p for p in found if p.alert is None and p.own])
    show_group("Your own", [p for p in found if p.alert is None and not p.own])
    for problem in unreadable_pages():
        st.warning(words.plain(problem))
    st.caption(words.plain(f"A page of your own is a file in {user_folder()}; `kvoncall runbooks lint` checks it."))


def show_firing(store: Store) -> None:
    """A link to the page of each alert in force, with the alert, so that its values are computed."""
    for alert in store.alerts.active():
        with st.container(border=True):
            mark = words.alert_mark(alert.state).badge
            st.markdown(f"{mark} **{alert.rule}** on `{alert.target}`. {words.plain(alert.summary)}")
            link(
                "runbooks", f"Runbook {alert.runbook}, computed for {alert.target}", ":material/menu_book:",
                runbook=alert.runbook, alert=alert.id, replay=alert.replay_id,
            )  # fmt: skip


def show_group(title: str, pages: Sequence[Runbook]) -> None:
    """One kind of pages; nothing where there is none."""
    if not pages:
        return
    st.subheader(f"{title} ({len(pages)})")
    for runbook in pages:
        with st.container(border=True):
            st.markdown(f"#### {words.plain(runbook.title)}")
            st.caption(words.plain(head_of(runbook)))
            meaning = runbook.sections.get("Meaning", "")
            st.markdown(meaning.strip().split("\n\n")[0])
            link("runbooks", "Open", ":material/menu_book:", runbook=runbook.id)


def head_of(runbook: Runbook) -> str:
    """`severity warning, alert oom, incidents A06 and A09, engines: vllm >=0.30,<0.34`."""
    parts = [f"severity {runbook.severity}"]
    if runbook.alert is not None:
        parts.append(f"alert {runbook.alert}")
    if runbook.incidents:
        parts.append(f"incidents {', '.join(runbook.incidents)}")
    engines = ", ".join(f"{engine} {versions}" for engine, versions in runbook.engines.items())
    return f"{'; '.join(parts)}; engines: {engines}"


def matches(runbook: Runbook, wanted: str) -> bool:
    """Whether the page has every word of the search, in whatever part of it."""
    text = " ".join((runbook.id, runbook.title, *runbook.incidents, *runbook.meta["flags"], runbook.markdown))
    return all(word in text.casefold() for word in wanted.casefold().split())
