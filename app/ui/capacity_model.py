"""Where the model of a plan comes from: a preset, a config.json pasted or uploaded, plain dimensions, or a target."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import streamlit as st

from app.runtime import get_runtime
from app.ui import words
from app.ui.links import take_asked
from app.ui.ranges import choose_target
from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from engine.memory.hf_config import model_shape, read_config
from engine.memory.model_presets import model_names, model_preset
from engine.memory.shape import LayerGroup, ModelShape
from probe.plan.live import Live, live_of
from probe.plan.options import add_options
from probe.store import Target
from probe.targets import measured_facts
from runbooks.facts import TargetFacts, from_facts

SOURCES = ("preset", "config.json", "dimensions", "target")
DEFAULT_MODEL = "Llama-3.1-8B"
MAX_CONFIG_MB = 1
_TEXT, _FILE, _TROUBLE = "config-text", "config-file", "config-trouble"


@dataclass(frozen=True)
class Source:
    """A shape, or what was read off a target."""

    shape: ModelShape
    live: Live | None = None


def choose_source() -> Source | None:
    """The fields, and the sentence beside them while they describe no model."""
    chosen = st.segmented_control(
        "Model from", SOURCES, default=SOURCES[0], required=True, key="source", bind="query-params"
    )
    try:
        match chosen:
            case "config.json":
                return _from_config()
            case "dimensions":
                return _from_dimensions()
            case "target":
                return _from_target()
        return _from_preset()
    except ConfigError as error:
        st.error(words.plain(str(error)))
        return None


def _from_preset() -> Source:
    return Source(model_preset(_choose_model("Model")))


def _from_config() -> Source | None:
    st.file_uploader("config.json", "json", key=_FILE, on_change=_take_file, max_upload_size=MAX_CONFIG_MB)
    text = st.text_area(
        "or its text", key=_TEXT, height=150, placeholder='{"architectures": ["LlamaForCausalLM"], …}',
        persist_state="session",
    )  # fmt: skip
    if trouble := st.session_state.pop(_TROUBLE, None):
        raise ConfigError(trouble)
    if not (text or "").strip():
        st.caption("Paste a model's config.json from its Hugging Face page, or upload the file.")
        return None
    if not text.lstrip().startswith("{"):
        raise ConfigError("This is no JSON object: paste the whole content of a model's config.json, from { to }.")
    return Source(_described(model_shape(*read_config(text))))


def _take_file() -> None:
    """The uploaded file becomes the text, so that there is one source and it can be edited."""
    file = st.session_state.get(_FILE)
    if file is None:
        return
    try:
        st.session_state[_TEXT] = file.getvalue().decode()
    except UnicodeDecodeError:
        st.session_state[_TROUBLE] = "The file is not text: upload a model's config.json."


def _from_dimensions() -> Source:
    left, right = st.columns(2)

    def number(column: st.delta_generator.DeltaGenerator, label: str, default: int, key: str, low: int = 1) -> int:
        return int(column.number_input(label, low, 1 << 20, default, key=key, bind="query-params"))

    layers = number(left, "Layers", 80, "layers")
    query = number(right, "Query heads", 64, "query_heads")
    heads = number(left, "KV heads", 8, "kv_heads")
    width = number(right, "Head size", 128, "head_dim")
    latent = number(left, "MLA latent (0: none)", 0, "mla_latent", 0)
    context = number(right, "Context length", 131072, "context")
    hidden = number(left, "Hidden size", 8192, "hidden_size")
    vocabulary = number(right, "Vocabulary", 128256, "vocab_size")
    billions = left.number_input(
        "Parameters, billion (0: unknown)", 0.0, 10_000.0, 70.0, key="parameters", bind="query-params"
    )
    group = LayerGroup(layers, num_kv_heads=heads, head_dim=width)
    if latent:
        group = LayerGroup(layers, "latent", latent_width=latent)
    parameters = round(billions * 1e9) or None
    return Source(
        ModelShape(
            f"{layers} layers", (group,), num_q_heads=query, hidden_size=hidden, vocab_size=vocabulary,
            max_position_embeddings=context, parameters=parameters,
            weights_bytes=2 * parameters if parameters else None,
            weights_how=f"{billions:g} billion parameters x 2 bytes" if parameters else "",
        )
    )  # fmt: skip


def _from_target() -> Source | None:
    store = get_runtime().store
    targets = store.targets.list()
    if not targets:
        st.caption("No target is watched yet: attach one on the Targets page.")
        return None
    target = choose_target(targets)
    live = read_target(target, None)
    if live.deployment is None:
        st.caption(words.plain(f"{live.problem}. Say here which model it is."))
        live = read_target(target, _choose_model("Model it serves"))
    if live.live is None:
        raise ConfigError(live.problem)
    for note in live.live.notes:
        st.caption(words.plain(note))
    return Source(live.live.deployment.shape, live.live)


@dataclass(frozen=True)
class Read:
    """What is kept of a target: its facts, and its deployment, or why there is none."""

    facts: TargetFacts
    live: Live | None
    problem: str = ""

    @property
    def deployment(self) -> Deployment | None:
        """The server as the planner wants it."""
        return self.live.deployment if self.live is not None else None


def read_target(target: Target, model: str | None) -> Read:
    """From the target's stored facts; `model` is a preset for one that does not tell what it serves."""
    facts = measured_facts(get_runtime().store, target, None)
    parser = argparse.ArgumentParser()
    add_options(parser)
    try:
        live = live_of(parser.parse_args(["--model", model] if model else []), target.name, facts)
    except ConfigError as error:
        return Read(from_facts(facts), None, str(error))
    return Read(live.facts, live)


def _choose_model(label: str) -> str:
    names = [DEFAULT_MODEL, *(name for name in model_names() if name != DEFAULT_MODEL)]
    take_asked("model", lambda name: model_preset(name).name)
    return st.selectbox(label, names, key="model", bind="query-params") or DEFAULT_MODEL


def _described(shape: ModelShape) -> ModelShape:
    """The shape, with what was filled in told below the field."""
    for assumption in shape.assumptions:
        st.caption(words.plain(assumption))
    return shape
