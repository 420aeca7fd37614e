"""Flags as an operator has them, on a command line: what they say of the deployment, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import streamlit as st

from app.ui import words
from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from runbooks.config_lint import LaunchLineError, LintFinding, lint_flags, read_line
from runbooks.facts import from_facts
from runbooks.facts_deployment import deployment_of
from runbooks.lint.rules import as_number


def choose_launch(base: Deployment | None) -> tuple[Deployment | None, list[LintFinding]]:
    """The deployment with the flags of the command line put in, and the findings about them."""
    with st.expander("Launch command", key="launch"):
        text = st.text_area(
            "Its flags hold where no slider is moved", key="launch-line", height=110, persist_state="session",
            placeholder="vllm serve MODEL --max-model-len 32768 --kv-cache-dtype fp8 …",
        )  # fmt: skip
        if base is None or not (text or "").strip():
            return base, []
        try:
            return with_line(base, text), findings_of(base, text)
        except (LaunchLineError, ConfigError) as error:
            st.error(words.plain(str(error)))
            return None, []


def with_line(base: Deployment, line: str) -> Deployment:
    """What the flags say of memory, on the model and the GPUs of `base`; raises `LaunchLineError`."""
    given = read_line(base.engine, base.version, line).given
    flags = {one.flag: _value(one.value) for one in given}
    facts = from_facts({"engine": base.engine, "version": base.version, "flags": flags})
    facts = replace(facts, shape=base.shape, gpu=base.gpu)
    told = deployment_of(facts)
    assert told is not None  # the shape is known
    ranks = facts.num_gpus or 1
    return replace(told, num_gpus=max(ranks, base.num_gpus), tp=facts.tp or base.tp, pp=facts.pp or base.pp, dp=base.dp)


def _value(value: Any) -> Any:
    """Numbers as numbers; everything else as it was written."""
    number = as_number(value)
    if number is None:
        return value
    return int(number) if number.is_integer() and "." not in str(value) else number


def findings_of(base: Deployment, line: str) -> list[LintFinding]:
    """What is wrong with the flags for this version and this GPU."""
    return lint_flags(
        base.engine, base.version, line, gpu=base.gpu, checkpoint_quantization=base.shape.quantization or "",
        host_memory_bytes=base.host_memory_bytes,
    )  # fmt: skip
