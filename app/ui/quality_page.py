"""Quality: the canary's rounds, what each cache format costs and holds on this model, and applying one of them."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.runtime import Runtime, get_runtime
from app.ui import quality_canary, words
from app.ui.alert_banner import show_alert
from app.ui.guard import guarded, live, page
from app.ui.links import link, param
from app.ui.quality_apply import RULE, running_arm, show_apply
from app.ui.quality_data import Measurement, all_measurements
from app.ui.quality_view import show_measurement, show_model_note, show_recommended
from app.ui.tables import show_table
from engine.config import EngineConfig
from kernels.formats import KV_FORMATS
from probe.quality.suite import SuiteSpec

SCENARIO = "int4-degradation"
LINES_SHOWN = 6
FORMATS = (
    "fp8_e4m3", "int8_per_token_head", "int8k_int4v", "int4_symmetric", "int4_per_token_head", "int4_kivi",
)  # fmt: skip


@page
def render() -> None:
    """The page."""
    st.title("Quality")
    runtime = get_runtime()
    show_alert(runtime.store, RULE)
    quality_canary.show_canary(runtime)
    st.subheader("Formats")
    show_buttons(runtime)
    found = all_measurements(runtime.store)
    if found:
        show_chosen(runtime, found)
    else:
        st.info(
            "No cache format was measured here yet. **Measure formats** asks every format the same questions on "
            "engines of their own; on your own servers `kvoncall quality --target URL` does it, and the incident "
            f"`{SCENARIO}` measures them on the Incidents page."
        )


def show_chosen(runtime: Runtime, found: Sequence[Measurement]) -> None:
    """One measurement, chosen in the URL or here; the newest unless told otherwise."""
    titles = {measurement.key: measurement.title for measurement in found}
    keys = list(titles)
    wanted = param("measurement")
    chosen = st.selectbox(
        "Measurement", keys, index=keys.index(wanted) if wanted in titles else 0, key="chosen-measurement",
        format_func=lambda key: titles.get(key, "gone"),
    )  # fmt: skip
    measurement = next((m for m in found if m.key == chosen), found[0])
    engine = runtime.engine
    flags = engine.snapshot().status.flags if engine is not None else ()
    served = EngineConfig.from_args(list(flags)).model if engine is not None else None
    show_model_note(measurement.model, measurement.model_flag, served)
    here = engine is not None and measurement.model_flag in (None, served)
    running = running_arm(measurement.arms, flags) if here else None
    show_measurement(measurement, running=running, key="quality")
    if len(measurement.arms) > 1:
        show_recommended(measurement)
    if measurement.replay_id is not None:
        link("incidents", "Open the replay", ":material/science:", replay=measurement.replay_id)
    with guarded():
        show_apply(runtime, measurement)


def show_buttons(runtime: Runtime) -> None:
    """Measure formats, or stop measuring, with what is going on."""
    status = runtime.measuring.status()
    with st.container(horizontal=True, vertical_alignment="center"):
        blocked = runtime.busy()
        if st.button("Measure formats", icon=":material/fact_check:", disabled=blocked):
            choose_formats()
        if status.running and st.button("Stop measuring", icon=":material/stop:", disabled=status.stopping):
            runtime.measuring.stop()
            st.rerun()
        if blocked and not status.running:
            st.caption("A replay is running; formats can be measured when it has ended.")
    if status.problem:
        st.error(words.plain(status.problem))
    st.session_state["drawn_measuring"] = (status.running, status.done)
    if status.running:
        show_progress()


@live(1.0)
def show_progress() -> None:
    """What the measurement does; the page is drawn again after every format."""
    status = get_runtime().measuring.status()
    if (status.running, status.done) != st.session_state.get("drawn_measuring"):
        st.rerun(scope="app")
    total = max(1, len(status.formats))
    ending = "; stops after this format" if status.stopping else ""
    st.progress(min(1.0, status.done / total), text=f"{status.done} of {total} formats measured{ending}")
    show_table([{"time": words.clock(at), "what happened": line} for at, line in status.lines[-LINES_SHOWN:]])


@st.dialog("Measure formats", width="large")
def choose_formats() -> None:
    """Which formats, how many questions; says what it takes."""
    with guarded():
        st.markdown(
            "Each format gets an engine of its own, with the embedded engine's model and other flags, one after "
            "another. The embedded engine keeps running; its background traffic pauses. The first format, full "
            "precision, is what the others are compared with, question by question."
        )
        full = st.selectbox("Full precision", ("auto", "float32", "float16", "bfloat16"), key="measure-full")
        others = [name for name in KV_FORMATS if name != full]
        formats = st.multiselect("Formats", others, default=[f for f in FORMATS if f in others], key="measure-formats")
        left, right = st.columns(2)
        conversations = left.number_input("Conversations", 1, 200, 16, key="measure-conversations")
        turns = right.number_input("Turns of each", 1, 40, 20, key="measure-turns")
        st.caption(f"{words.count(conversations * turns)} questions a format, and the likelihood of four texts.")
        if st.button("Measure", type="primary", key="measure-confirm"):
            if not formats:
                st.error("Choose at least one format to compare with full precision.")
                return
            spec = SuiteSpec(conversations=int(conversations), turns=int(turns))
            get_runtime().start_measuring([full, *formats], spec)
            st.rerun()
