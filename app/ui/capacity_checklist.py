"""The optimization checklist: every item looks at a target itself, or at the plan where no target is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.capacity_model import read_target
from app.ui.tables import show_table
from app.ui.wording import in_language
from engine.memory.capacity import CapacityPlan
from probe.alerts.isolation import ROUND_EVENT
from probe.store import Store, Target
from runbooks.facts_deployment import planned
from runbooks.knowledge.checklist import GROUPS, Checked, checklist, group_title

THE_PLAN = "the plan"
STATUS = {
    "done": words.Mark("✔", "done", "green"),
    "open": words.Mark("✖", "open", "red"),
    "unknown": words.Mark("◌", "unknown", "gray"),
    "does not apply": words.Mark("□", "does not apply", "gray"),
}


def show_checklist(plan: CapacityPlan | None, language: str) -> None:
    """Whom to check, and the items group by group."""
    store = get_runtime().store
    targets = {target.name: target for target in store.targets.list()}
    chosen = st.selectbox("Check", [THE_PLAN, *targets], key="check", bind="query-params")
    found = checklist(None, plan) if chosen not in targets else check_target(store, targets[str(chosen)])
    counts = {status: sum(one.status == status for one in found) for status in STATUS}
    st.markdown(" ".join(f"{STATUS[status].badge} {count}" for status, count in counts.items() if count))
    for group in GROUPS:
        st.subheader(in_language(group_title(group), language))
        show_items([one for one in found if one.item.group == group], language)


def check_target(store: Store, target: Target) -> list[Checked]:
    """Every item for a target, with what is set up around it."""
    live = read_target(target, None)
    found = planned(live.deployment) if live.deployment is not None else None
    plan = found if isinstance(found, CapacityPlan) else None
    return checklist(live.facts, plan, {**(target.facts.get("coverage") or {}), "watch": watch_of(store, target)})


def watch_of(store: Store, target: Target) -> Mapping[str, Any]:
    """Receivers, rounds of the isolation probe, drills that passed."""
    return {
        "receivers": len(store.receivers.list()),
        "isolation_rounds": len(store.events.recent(limit=None, target=target.name, kinds=[ROUND_EVENT])),
        "drills_passed": sum((replay.result or {}).get("verified") is True for replay in store.replays.list()),
    }


def show_items(found: Sequence[Checked], language: str) -> None:
    """What is open first, with what to do about it."""
    order = list(STATUS)
    show_table([
        {
            "": STATUS[one.status],
            "item": in_language(one.item.text, language),
            "what was seen": in_language(one.evidence, language),
            "why": in_language(one.item.why, language),
            "how": in_language(one.item.how, language),
        }
        for one in sorted(found, key=lambda one: (one.status != "open", order.index(one.status)))
    ])  # fmt: skip
