"""Where a plan runs: GPUs, their number, engine and version; of a target what it does not tell itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import streamlit as st

from app.ui import words
from app.ui.capacity_flags import DEFAULT
from app.ui.capacity_model import Source
from app.ui.links import take_asked
from engine.errors import ConfigError
from engine.memory.deployment import Deployment, Gpu
from engine.memory.model_presets import gpu, gpu_from_memory, gpu_names
from runbooks.flags import known_versions

ENGINES = ("vllm", "sglang", "tensorrt-llm", "tgi")
OTHER_GPU = "other"
DEFAULT_GPU = "H100-80GB"


@dataclass(frozen=True)
class Place:
    """Engine and version as chosen, and the deployment there, None while model or GPU are not known."""

    engine: str
    version: str | None
    deployment: Deployment | None


def choose_place(source: Source | None) -> Place:
    """The fields. All GPUs go to tensor parallelism unless pipeline stages or replicas take them."""
    if source is not None and source.live is not None:
        return _of_target(source.live.deployment)
    left, right = st.columns([2, 1])
    with left:
        device = _choose_gpu()
    count = int(right.number_input("GPUs", 1, 1024, 1, key="gpus", bind="query-params"))
    left, right = st.columns(2)
    engine = left.selectbox(
        "Engine", ENGINES, key="engine", bind="query-params", on_change=_forget_the_other_engine
    ) or ENGINES[0]  # fmt: skip
    version = right.selectbox(
        "Version", known_versions(engine)[::-1], key="version", bind="query-params", accept_new_options=True,
        help="Any version can be typed: the nearest one that was read speaks for it.",
    )  # fmt: skip
    pp = int(left.number_input("Pipeline stages (PP)", 1, 64, 1, key="pp", bind="query-params"))
    dp = int(right.number_input("Replicas (DP)", 1, 256, 1, key="dp", bind="query-params"))
    if source is None or device is None:
        return Place(engine, version, None)
    tp = max(1, count // (pp * dp))
    return Place(engine, version, Deployment(source.shape, engine, version, device, count, tp, pp, dp))


def _forget_the_other_engine() -> None:
    """Versions and cache formats are an engine's own."""
    st.session_state["version"] = known_versions(st.session_state["engine"])[-1]
    st.session_state["kv_cache_dtype"] = DEFAULT


def _of_target(told: Deployment) -> Place:
    """What a target tells; its GPU is asked for where it does not."""
    st.markdown(words.plain(f"{told.engine} {told.version or '(version unknown)'}"))
    if told.gpu is not None:
        st.markdown(words.plain(f"{told.num_gpus} × {told.gpu.name}, {words.size(told.gpu.memory_bytes)}"))
        return Place(told.engine, told.version, told)
    left, right = st.columns([2, 1])
    with left:
        device = _choose_gpu()
    count = int(right.number_input("GPUs", 1, 1024, told.num_gpus, key="gpus", bind="query-params"))
    if device is None:
        return Place(told.engine, told.version, None)
    tp = told.tp if told.num_gpus > 1 else max(1, count // (told.pp * told.dp))
    return Place(told.engine, told.version, replace(told, gpu=device, num_gpus=count, tp=tp))


def _choose_gpu() -> Gpu | None:
    names = [DEFAULT_GPU, *(name for name in gpu_names() if name != DEFAULT_GPU), OTHER_GPU]
    take_asked("gpu", lambda name: name if name == OTHER_GPU else gpu(name).name)
    name = st.selectbox("GPU", names, key="gpu", bind="query-params") or DEFAULT_GPU
    if name != OTHER_GPU:
        return gpu(name)
    text = st.text_input("Memory of one GPU", "80 GB", key="gpu_memory", bind="query-params") or ""
    try:
        device, note = gpu_from_memory(text)
    except ConfigError as error:
        st.error(words.plain(str(error)))
        return None
    st.caption(words.plain(note or words.size(device.memory_bytes)))
    return device
