"""From a measured format to the flag changes that bring it to the embedded engine, with the figures as reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.embedded import NAME, EmbeddedSnapshot
from app.measuring import CACHE_FLAGS
from app.runtime import Runtime, get_runtime
from app.ui import changes as change_view
from app.ui import quality_tables as tables
from app.ui import words
from app.ui.apply import Proposal, confirm_embedded
from app.ui.guard import live
from app.ui.links import link
from app.ui.quality_data import Arm, Measurement, full_precision_bytes, recommended
from engine.config import EngineConfig
from runbooks.facts import TargetFacts, from_facts
from runbooks.remedies.format_pool import cost_in_words, pool_after

RULE = "kv-quality-drop"


def running_format(flags: Sequence[str]) -> dict[str, Any]:
    """What decides the cache's format of an engine started with `flags`; unset is None."""
    values = EngineConfig.from_args(list(flags)).flag_values()
    return {flag: values[flag] or None for flag in CACHE_FLAGS if flag in values}


def running_arm(arms: Sequence[Arm], flags: Sequence[str]) -> str | None:
    """The name of the arm that an engine with `flags` runs; None when it runs none of them."""
    now = running_format(flags)
    return next((arm.name for arm in arms if arm.flags and {**_unset(now), **arm.flags} == now), None)


def _unset(now: Mapping[str, Any]) -> dict[str, Any]:
    return {flag: "auto" if flag == "--kv-cache-dtype" else None for flag in now}


def changes_to(arm: Arm, flags: Sequence[str], full: float | None, facts: TargetFacts) -> list[dict[str, Any]]:
    """Changes with the keys of `FlagChange.to_dict()` that bring an engine with `flags` to the arm's format.

    Flags of the cache that the arm was measured without go back to their defaults: it was measured so.
    """
    now = running_format(flags)
    wanted = {**_unset(now), **arm.flags}
    accuracy = f"accuracy {tables.percent(arm.overall.get('accuracy'))} over {words.count(arm.overall.get('items'))}"
    compared = f", {tables.fall(arm.against)} against full precision" if arm.against else ""
    why = f"measured: {accuracy} questions{compared}; {tables.share_of_bytes(arm, full)} bytes per token"
    return [
        {
            "flag": flag, "from": value, "to": wanted[flag], "why": why, "restart": True,
            "expected": "answers as right as measured for this format; the canary's next rounds show it",
            "cost": _cost(arm, facts, wanted),
            "rollback": f"restart with {flag} {value}" if value is not None else f"restart without {flag}",
        }
        for flag, value in now.items()
        if wanted.get(flag) != value
    ]  # fmt: skip


def _cost(arm: Arm, facts: TargetFacts, wanted: Mapping[str, Any]) -> str:
    """What the format takes, and what the pool then holds."""
    size = None if arm.bytes_per_token is None else int(arm.bytes_per_token)
    return cost_in_words(facts, facts.kv_bytes_per_token, size, pool_after(facts, wanted, size))


def show_apply(runtime: Runtime, measurement: Measurement) -> None:
    """Choose a measured format, see what it changes, apply it to the embedded engine."""
    arms = [arm for arm in measurement.arms if arm.flags]
    if not arms:
        return
    st.subheader("Apply a format")
    best = recommended(arms)
    names = [arm.name for arm in arms]
    chosen = st.selectbox("Candidate", names, index=names.index(best.name) if best is not None else 0, key="candidate")
    arm = next(arm for arm in arms if arm.name == chosen)
    st.markdown(f"**{words.plain(arm.name)}**: {tables.verdict(arm)}")
    engine = runtime.engine
    if engine is None:
        st.info("There is no embedded engine to apply it to; restart your own server with these flags.")
        set_flags = [f"{flag} {value}" for flag, value in arm.flags.items() if value]
        st.code(" ".join(set_flags) or "the default format", language=None)
        return
    flags = engine.snapshot().status.flags
    served = EngineConfig.from_args(list(flags)).model
    if measurement.model_flag is not None and measurement.model_flag != served:
        st.info(
            f"Measured on {words.plain(measurement.model_flag or 'the testbed model')}, but the embedded engine serves "
            f"{words.plain(served or 'the testbed model')}: measure the formats on that model before applying one."
        )
        return
    st.session_state["drawn_applied"] = engine_state(engine.snapshot())
    show_engine()
    show_change(runtime, arm, flags, full_precision_bytes(measurement.arms))


def engine_state(snapshot: EmbeddedSnapshot) -> str:
    """What the part about applying depends on."""
    return f"{snapshot.status.state} {snapshot.busy} {' '.join(snapshot.status.flags)}"


@live(1.0)
def show_engine() -> None:
    """The embedded engine's state; the page is drawn again when it, or the flags, changed."""
    engine = get_runtime().engine
    if engine is None:
        return
    snapshot = engine.snapshot()
    if engine_state(snapshot) != st.session_state.get("drawn_applied"):
        st.rerun(scope="app")
    busy = f" :blue-badge[◔ {snapshot.busy}]" if snapshot.busy else ""
    st.markdown(f"Embedded engine: {words.target_mark(snapshot.status.state).badge}{busy}")
    if snapshot.problem:
        st.error(words.plain(snapshot.problem))


def show_change(runtime: Runtime, arm: Arm, flags: Sequence[str], full: float | None) -> None:
    """The change with its figures, the command line before and after, and the button."""
    target = runtime.store.targets.get(NAME)
    facts = from_facts({"engine": "kvoncall", **(target.facts if target is not None else {})})
    changes = changes_to(arm, flags, full, facts)
    if not changes:
        st.success("✔ The embedded engine runs this format.")
        return
    change_view.show_changes(changes)
    change_view.show_command(flags, changes)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Apply change", type="primary", icon=":material/build:"):
            confirm_embedded(Proposal(changes, [], ""))
        link("engine", "Watch the engine", ":material/memory:")
        link("runbooks", f"Runbook {RULE}", ":material/menu_book:", runbook=RULE, target=NAME)
