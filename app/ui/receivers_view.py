"""Who is told of alerts: receivers, what became of the last message to each, a test button.

Addresses are names of secrets, never secrets.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.guard import guarded
from probe.notify.dispatcher import ReceiverState, receiver_states, send_test
from probe.notify.matchers import LABELS

SENT = {"sent": ":green-badge[✔ sent]", "failed": ":red-badge[✖ failed]"}


def show_receivers() -> None:
    """Every receiver."""
    store = get_runtime().store
    for problem in store.receivers.problems():
        st.error(words.plain(problem))
    if st.button("New receiver", icon=":material/add:", key="new-receiver"):
        add_receiver()
    states = receiver_states(store)
    if not states:
        st.caption("Nobody is told of alerts yet. Add a webhook, or any service that apprise reaches.")
    for state in states:
        show_receiver(state)
    options = store.receivers.options()
    if not options.base_url:
        st.info("Messages carry no links yet: say under which address this app is reached.")
    if st.button("Grouping and links", icon=":material/tune:", key="notify-options"):
        change_options()
    st.caption(
        f"Messages are grouped by {', '.join(options.group_by) or 'nothing'}; the first of a group waits "
        f"{words.span(options.group_wait_s)}, news of a group {words.span(options.group_interval_s)}, and what still "
        f"fires is repeated after {words.span(options.repeat_interval_s)}."
    )


@st.dialog("Grouping and links", width="large")
def change_options() -> None:
    """How messages are grouped and paced, and the address of this app that their links begin with."""
    with guarded():
        receivers = get_runtime().store.receivers
        options = receivers.options()
        base_url = st.text_input(
            "Address of this app", options.base_url or here(), key="notify-url",
            help="Links in messages begin with it.",
        )  # fmt: skip
        group_by = st.multiselect("One message for alerts that share", LABELS, options.group_by, key="notify-group")
        columns = st.columns(3)
        times = {
            "group_wait_s": columns[0].number_input("First of a group waits, s", 0.0, value=options.group_wait_s),
            "group_interval_s": columns[1].number_input("News of a group, s", 0.0, value=options.group_interval_s),
            "repeat_interval_s": columns[2].number_input("Repeat after, s", 60.0, value=options.repeat_interval_s),
        }
        if st.button("Save", type="primary", key="notify-confirm"):
            receivers.set_options(base_url=base_url, group_by=list(group_by), **times)
            st.rerun()


def here() -> str:
    """The address in the operator's browser, without the page."""
    parts = urlsplit(str(st.context.url or ""))
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else ""


def show_receiver(state: ReceiverState) -> None:
    """One receiver: what it takes, whether it can be used, its last message."""
    receiver = state.receiver
    with st.container(border=True):
        takes = ", ".join(receiver.severities)
        if receiver.matchers:
            takes += f" where {', '.join(map(str, receiver.matchers))}"
        st.markdown(
            f"**{words.plain(receiver.name)}** ({receiver.kind}, address `{receiver.url}`) takes {words.plain(takes)}"
        )
        if state.problem:
            st.warning(words.plain(state.problem))
        if state.last is not None:
            why = f": {words.plain(state.last.error)}" if state.last.error else ""
            st.markdown(
                f"{SENT.get(state.last.state, state.last.state)} {state.last.transition} of {state.last.rule} on "
                f"`{state.last.target}` {words.ago(state.last.done_at)}{why}"
            )
        waiting = state.counts.get("pending", 0) + state.counts.get("sending", 0)
        st.caption(f"{waiting} waiting, {state.counts.get('sent', 0)} sent, {state.counts.get('failed', 0)} given up.")
        with st.container(horizontal=True):
            wants_test = st.button("Send a test", icon=":material/send:", key=f"test-{receiver.name}")
            if st.button("Remove", icon=":material/delete:", key=f"remove-{receiver.name}"):
                remove_receiver(receiver.name)
        if wants_test:
            try_receiver(receiver.name)


def try_receiver(name: str) -> None:
    """Sends a test message and says what became of it."""
    with guarded():
        with st.spinner("Sending…"):
            sent = send_test(get_runtime().store, name)
        if sent.ok:
            st.success(f"✔ {words.plain(name)} took the test message.")
        else:
            st.error(words.plain(sent.error or "The test message was not taken."))


@st.dialog("New receiver", width="large")
def add_receiver() -> None:
    """Asks for a name, a kind and where its address is kept."""
    with guarded():
        name = st.text_input("Name", key="receiver-name")
        kind = st.segmented_control(
            "Kind", ["webhook", "apprise"], default="webhook", required=True, key="receiver-kind",
            help="webhook: Alertmanager's JSON to your own address. apprise: Slack, PagerDuty, e-mail and others.",
        )  # fmt: skip
        url = st.text_input(
            "Address", key="receiver-url", placeholder="env:ONCALL_WEBHOOK",
            help="env:NAME (an environment variable of this app) or secret:NAME (in secrets.toml); a plain http "
            "address without credentials is taken as it is.",
        )  # fmt: skip
        severities = st.multiselect("Severities", ["warning", "critical"], ["warning", "critical"], key="receiver-sev")
        matchers = st.text_input("Only alerts that match", key="receiver-matchers", placeholder='target=~"prod-.*"')
        drills = st.checkbox("Also alerts that a replay provoked", key="receiver-drills")
        if st.button("Add", type="primary", key="receiver-confirm"):
            get_runtime().store.receivers.save(
                {"name": name, "kind": kind, "url": url, "severities": severities, "matchers": matchers,
                 "drills": drills}
            )  # fmt: skip
            st.rerun()


@st.dialog("Remove the receiver")
def remove_receiver(name: str) -> None:
    """What waits for it is not sent."""
    with guarded():
        st.markdown(f"**{words.plain(name)}** is told nothing any more; what waits for it is not sent.")
        if st.button("Remove", type="primary", key="receiver-remove"):
            get_runtime().store.receivers.remove(name)
            st.rerun()
