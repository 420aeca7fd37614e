"""The flags that decide memory: what-if sliders, and the rest folded away.

Every field is in the URL under its flag's name, so that a plan can be sent as a link. The first position of a slider,
"default", leaves the flag to the engine, to the command line, or to the target that the plan was read off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.links import param
from engine.errors import ConfigError
from engine.memory.model_presets import model_names, model_preset
from engine.memory.units import parse_memory
from runbooks.flags import flag_facts

DEFAULT = "default"
NONE = "none"
LENGTHS = [2**n for n in range(10, 21)]
SEQS = [2**n for n in range(12)]
BATCHED = [2**n for n in range(9, 18)]
PARALLEL = [1, 2, 4, 8, 16, 32]
UTILIZATIONS = [f"{0.5 + n / 100:.2f}" for n in range(50)]
SLIDERS = (
    "utilization", "max_model_len", "tokens_per_request", "max_num_seqs", "kv_cache_dtype", "max_num_batched_tokens",
    "tp",
)  # fmt: skip
KV_FLAGS = {"vllm": "--kv-cache-dtype", "sglang": "--kv-cache-dtype", "tgi": "--kv-cache-dtype"}
TRT_FORMATS = ("auto", "fp8", "int8", "nvfp4")
SHARES = {
    "vllm": "Share of the GPU (gpu_memory_utilization)",
    "sglang": "Static share (mem_fraction_static)",
    "tensorrt-llm": "KV share of what weights leave (free_gpu_memory_fraction)",
    "tgi": "Share of the GPU (cuda-memory-fraction)",
}
AMOUNTS = {
    "kv_cache_bytes": "KV cache of one GPU, as a log states it",
    "weights_bytes": "Weights of one GPU, as a log states them",
    "activation_bytes": "Activation peak of one GPU",
    "other_processes_bytes": "Other processes on the GPU",
    "kv_offloading_bytes": "KV in host memory (kv_offloading_size)",
    "host_memory_bytes": "Host memory",
}


def what_if(engine: str, version: str | None) -> dict[str, Any]:
    """The sliders; only what was moved away from the default."""
    st.markdown("**What if**")
    left, right = st.columns(2)
    with left:
        utilization = _slider(SHARES.get(engine, SHARES["vllm"]), UTILIZATIONS, "utilization")
        length = _slider("Longest request (max_model_len), tokens", LENGTHS, "max_model_len")
        typical = _slider("Typical request, tokens", LENGTHS, "tokens_per_request")
        seqs = _slider("Requests at once (max_num_seqs)", SEQS, "max_num_seqs")
    with right:
        kv = _slider("KV cache format", kv_formats(engine, version), "kv_cache_dtype")
        batched = _slider("Tokens a step (max_num_batched_tokens)", BATCHED, "max_num_batched_tokens")
        tp = _slider("Tensor parallel (TP)", PARALLEL, "tp")
    whole = {
        "max_model_len": length, "tokens_per_request": typical, "max_num_seqs": seqs,
        "max_num_batched_tokens": batched, "tp": tp,
    }  # fmt: skip
    wanted: dict[str, Any] = {name: int(value) for name, value in whole.items() if value is not None}
    wanted["gpu_memory_utilization"] = None if utilization is None else float(utilization)
    wanted["kv_cache_dtype"] = kv
    return {name: value for name, value in wanted.items() if value is not None}


def _slider(label: str, values: Iterable[Any], key: str) -> str | None:
    """A slider over the values and whatever value the URL asks for; None at its first position."""
    options = [str(value) for value in values]
    asked = param(key)
    if asked and asked.isdigit() and asked not in options and all(option.isdigit() for option in options):
        options = sorted({*options, str(int(asked))}, key=int)
    chosen = st.select_slider(label, [DEFAULT, *options], key=key, bind="query-params")
    return None if chosen == DEFAULT else str(chosen)


def kv_formats(engine: str, version: str | None) -> list[str]:
    """The KV cache formats that this version takes, its default left out."""
    facts = flag_facts(engine, version, KV_FLAGS[engine]) if engine in KV_FLAGS else None
    choices = facts.choices if facts is not None and facts.choices else TRT_FORMATS
    return [str(choice) for choice in choices if choice != "auto"]


def more_flags(engine: str) -> dict[str, Any] | None:
    """Everything else that takes or gives memory; None while an amount cannot be read."""
    with st.expander("More flags", key="more-flags"):
        left, right = st.columns(2)
        found: dict[str, Any] = {
            "block_size": _optional(left, "Tokens a block (block_size)", "block_size"),
            "num_gpu_blocks_override": _optional(right, "Blocks, fixed (num_gpu_blocks_override)", "num_gpu_blocks"),
            "max_loras": _optional(left, "LoRA adapters loaded at once", "max_loras"),
            "max_lora_rank": _optional(right, "Their rank", "max_lora_rank"),
        }
        draft = left.selectbox("Draft model", [NONE, *model_names()], key="draft", bind="query-params")
        found["draft"] = model_preset(draft) if draft and draft != NONE else None
        if left.toggle("No CUDA graphs (enforce_eager)", key="enforce_eager", bind="query-params"):
            found["enforce_eager"] = True
        if engine == "vllm" and right.toggle(
            "Every layer billed as full attention", key="no_hybrid", bind="query-params"
        ):
            found["hybrid_kv_cache"] = False
        amounts = [_amount((left, right)[n % 2], label, name) for n, (name, label) in enumerate(AMOUNTS.items())]
    if not all(read for read, _ in amounts):
        return None
    found |= {name: value for name, (_, value) in zip(AMOUNTS, amounts, strict=True)}
    return {name: value for name, value in found.items() if value is not None}


def _optional(column: Any, label: str, key: str) -> int | None:
    value = column.number_input(label, 1, 1 << 24, None, key=key, bind="query-params", placeholder="default")
    return None if value is None else int(value)


def _amount(column: Any, label: str, key: str) -> tuple[bool, int | None]:
    """Whether the field can be read, and the bytes it says; GiB unless the text says otherwise."""
    with column:
        text = st.text_input(label, "", key=key, bind="query-params", placeholder="not stated; 36.07 GiB")
        if not (text or "").strip():
            return True, None
        try:
            size, note = parse_memory(text)
        except ConfigError as error:
            st.error(words.plain(str(error)))
            return False, None
        if note:
            st.caption(words.plain(note))
        return True, size
