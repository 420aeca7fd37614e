"""Engine: the embedded engine live, its flags and memory plan, how it ended last, and start, stop, restart."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app.embedded import NAME, EmbeddedEngine, EmbeddedSnapshot
from app.runtime import get_runtime
from app.ui import blocks, charts, debug, signals, words
from app.ui.changes import flag_value
from app.ui.forms import given
from app.ui.guard import guarded, live, page
from app.ui.licence_notice import show_notice
from app.ui.tables import show_table
from engine.config import EngineConfig
from engine.supervisor import EngineExit

REQUESTS_SHOWN = 20


@page
def render() -> None:
    """The page."""
    st.title("Engine")
    runtime = get_runtime()
    if runtime.problem:
        st.error(words.plain(runtime.problem))
    engine = runtime.engine
    if engine is None:
        if runtime.is_open and not runtime.options.engine_enabled:
            st.info("The embedded engine is switched off (KVONCALL_NO_ENGINE); start the app without it to use one.")
        return
    show_notice(runtime)
    snapshot = engine.snapshot()
    show_buttons(engine, snapshot)
    process = st.container()
    show_last_exit(snapshot.status.last_exit, snapshot.status.state)
    live_part = st.container()
    show_flags(snapshot.status.flags)
    with guarded():
        show_memory_plan()
    # Only now: a run that was cut short before must not count as having drawn this state.
    st.session_state["drawn_engine"] = drawn_state(snapshot)
    with process:
        show_process()
    with live_part:
        show_live()


def drawn_state(snapshot: EmbeddedSnapshot) -> str:
    """What the parts of the page that do not redraw themselves depend on."""
    return f"{snapshot.status.state} {snapshot.busy} {snapshot.status.pid}"


def show_buttons(engine: EmbeddedEngine, snapshot: EmbeddedSnapshot) -> None:
    """Start, stop, restart, edit flags; each asks for a reason first."""
    state, busy = snapshot.status.state, snapshot.busy is not None
    alive = state in {"running", "starting"}
    with st.container(horizontal=True):
        if st.button("Start", icon=":material/play_arrow:", disabled=busy or alive):
            confirm("start", engine)
        if st.button("Stop", icon=":material/stop:", disabled=busy or not alive):
            confirm("stop", engine)
        if st.button("Restart", icon=":material/restart_alt:", disabled=busy or not alive):
            confirm("restart", engine)
        if st.button("Edit flags", icon=":material/tune:", disabled=busy):
            edit_flags(engine)


@st.dialog("Change the embedded engine")
def confirm(what: str, engine: EmbeddedEngine) -> None:
    """Says what happens, takes the reason."""
    effect = {
        "start": "The engine process starts with its present flags.",
        "stop": "Requests in flight fail; the background traffic waits until the engine is started again.",
        "restart": "Requests in flight fail and the prefix cache is lost; flags stay.",
    }[what]
    with guarded():
        st.markdown(effect)
        reason = st.text_input("Reason", key="engine-reason", placeholder="kept with the event")
        if st.button(what.capitalize(), type="primary", key="engine-confirm") and given(reason):
            {"start": engine.start, "stop": engine.stop, "restart": engine.restart}[what](reason)
            st.rerun()


@st.dialog("Edit the engine's flags", width="large")
def edit_flags(engine: EmbeddedEngine) -> None:
    """The flags as they are typed; a wrong one is refused in one sentence before anything restarts."""
    present = shlex.join(engine.snapshot().status.flags)
    st.markdown(
        "vLLM's flags, as after `kvoncall serve`. The engine restarts with them; they hold until the app is restarted "
        "(set KVONCALL_ENGINE_FLAGS to keep them)."
    )
    text = st.text_area("Flags", value=present, key="engine-flags", placeholder="--max-num-seqs 32")
    reason = st.text_input("Reason", key="engine-reason", placeholder="kept with the event")
    if st.button("Restart with these flags", type="primary", key="engine-confirm") and given(reason):
        with guarded():
            try:
                flags = shlex.split(text)
            except ValueError as error:
                st.error(words.plain(f"The flags cannot be split into words: {error}."))
                return
            engine.restart(reason, flags)
            st.rerun()


@live(1.0)
def show_process() -> None:
    """One line about the process; the page is drawn again when its state changes."""
    engine = get_runtime().engine
    if engine is None:
        return
    snapshot = engine.snapshot()
    if drawn_state(snapshot) != st.session_state.get("drawn_engine"):
        st.rerun(scope="app")
    status = snapshot.status
    parts = [words.target_mark(status.state).badge]
    if snapshot.busy:
        parts.append(f":blue-badge[◔ {snapshot.busy}]")
    if status.pid:
        parts.append(f"pid {status.pid} at `{status.base_url}`")
    if status.started_at and status.state == "running":
        parts.append(f"up {words.span(time.time() - status.started_at)}")
    parts.append(f"restarts {status.restarts}")
    if snapshot.load is not None:
        parts.append(
            f"background traffic {snapshot.load.state}, {snapshot.load.rate:g} requests/s "
            f"({snapshot.load.completed} completed, {snapshot.load.failed} failed)"
        )
    st.markdown(" · ".join(parts))
    if snapshot.problem:
        st.error(words.plain(snapshot.problem))


def show_last_exit(last: EngineExit | None, state: str) -> None:
    """How the process ended last: reason, code, message, newest log lines."""
    if last is None:
        return
    with st.expander(f"Last exit: {last.reason}, {words.ago(last.at)}", expanded=state == "crashed"):
        when = f"after {words.span(last.uptime_s)}, at {words.clock(last.at)}"
        st.markdown(f"**{words.plain(last.message)}**  \nexit code {last.code}, {when}")
        if last.log_tail:
            st.code("\n".join(last.log_tail), language=None, wrap_lines=True)


@live(1.0)
def show_live() -> None:
    """What the engine does this second, asked from the engine itself."""
    runtime = get_runtime()
    status = runtime.engine.snapshot().status if runtime.engine is not None else None
    if status is None or status.state != "running" or status.base_url is None:
        st.info("Live figures appear when the engine is running.")
        return
    url = status.base_url
    asked = time.time()
    requests = debug.ask(url, "/debug/requests")["requests"]
    pool = debug.ask(url, "/debug/blocks")
    states = blocks.expand(pool["states"])
    running = [request for request in requests if request["status"] == "running"]
    waiting = [request for request in requests if request["status"] != "running"]
    left, right = st.columns(2)
    with left:
        show_pool(states, int(pool["block_size"]))
    with right:
        show_throughput(asked)
    show_requests("Running", running)
    show_requests("Waiting", waiting)
    st.caption(f"Asked the engine at {words.clock(asked)}; redrawn every second.")


def show_pool(states: Sequence[int], block_size: int) -> None:
    """KV usage in a bar and the map of blocks."""
    found = blocks.counts(states)
    held, total = found["used"] + found["shared"], max(1, len(states))
    st.markdown("**KV blocks**")
    usage = words.ratio(held / total)
    st.progress(held / total, text=f"KV usage {usage}: {held} of {total} blocks of {block_size} tokens")
    st.html(blocks.image_html(states))
    st.html(blocks.legend_html(states))


def show_throughput(now: float) -> None:
    """Tokens per second of the last five minutes, from the store."""
    runtime = get_runtime()
    target = runtime.store.targets.get(NAME)
    if target is None:
        return
    reader = signals.Reader(runtime.history, target, now - 300, now)
    window = max(10.0, 4 * target.scrape_interval_s)
    lines: dict[str, Any] = {
        "generated": reader.rate("generation_tokens_total", window),
        "prompt": reader.rate("prompt_tokens_total", window),
    }
    known = {name: line for name, line in lines.items() if np.isfinite(line).any()}
    if known:
        charts.lines(reader.at, known, title=f"Tokens per second (over {window:g} s)", height=220)
    else:
        st.caption("No throughput was collected in the last five minutes.")


def show_requests(title: str, requests: Sequence[Mapping[str, Any]]) -> None:
    """A table of requests with what each holds."""
    st.markdown(f"**{title} ({len(requests)})**")
    if not requests:
        return
    rows = [
        {
            "request": r.get("request_id"),
            "status": r.get("status"),
            "prompt": r.get("num_prompt_tokens"),
            "output": r.get("num_output_tokens"),
            "computed": r.get("num_computed_tokens"),
            "blocks": r.get("num_blocks"),
            "preempted": r.get("num_preemptions"),
            "age": words.span(float(r.get("age_seconds") or 0)),
        }
        for r in requests[:REQUESTS_SHOWN]
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True, height="content")
    if len(requests) > REQUESTS_SHOWN:
        st.caption(f"The first {REQUESTS_SHOWN} of {len(requests)} are shown.")


def show_flags(flags: Sequence[str]) -> None:
    """The flags that differ from the defaults, and all of them folded away."""
    st.subheader("Flags")
    config = EngineConfig.from_args(list(flags))
    defaults = EngineConfig().flag_values()
    values = config.flag_values()
    changed = {flag: value for flag, value in values.items() if value != defaults.get(flag)}
    if changed:
        rows = [
            {"flag": flag, "value": flag_value(value), "default": flag_value(defaults.get(flag))}
            for flag, value in changed.items()
        ]
        show_table(rows)
    else:
        st.caption("Every flag has its default.")
    with st.expander(f"All {len(values)} flags"):
        rows = [{"flag": flag, "value": flag_value(value)} for flag, value in values.items()]
        show_table(rows)


PLAN_ROWS = (
    ("device_memory_bytes", "Memory of the device", True),
    ("weights_bytes", "Weights", True),
    ("activation_peak_bytes", "Peak of activations", True),
    ("kv_cache_bytes", "KV cache", True),
    ("open_blocks_bytes", "Blocks not full yet, in full precision", True),
    ("bookkeeping_bytes", "Records of the blocks", True),
    ("kv_bytes_per_token", "KV per token", True),
    ("block_size", "Tokens per block", False),
    ("num_gpu_blocks", "Blocks (the null block included)", False),
    ("kv_cache_size_tokens", "Tokens that fit", False),
    ("max_model_len", "Longest request (tokens)", False),
    ("max_concurrency", "Requests of that length at once", False),
)


def show_memory_plan() -> None:
    """How the memory of the device was divided at the start, as the engine told the collector."""
    store = get_runtime().store
    target = store.targets.get(NAME)
    plan = target.facts.get("memory_plan") if target is not None else None
    if not isinstance(plan, Mapping):
        st.caption("The memory plan appears when the engine has started once.")
        return
    st.subheader("Memory plan")
    source = {
        "profile": "sized from a profiling run",
        "kv_cache_memory_bytes": "sized by --kv-cache-memory-bytes, not from a profiling run",
        "num_gpu_blocks_override": "sized by --num-gpu-blocks-override, not from a profiling run",
    }.get(str(plan.get("source")), str(plan.get("source")))
    rows = [
        {"part": label, "value": words.size(plan[key]) if is_bytes else words.count(plan[key])}
        for key, label, is_bytes in PLAN_ROWS
        if plan.get(key)
    ]
    st.caption(f"The pool is {source}.")
    show_table(rows)
