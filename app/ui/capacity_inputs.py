"""What a plan is made of: model, place, and the flags that decide memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from app.ui import words
from app.ui.capacity_flags import more_flags, what_if
from app.ui.capacity_launch import choose_launch
from app.ui.capacity_model import Source, choose_source
from app.ui.capacity_place import choose_place
from engine.memory.deployment import Deployment
from runbooks.config_lint import LintFinding

TYPICAL = 4096  # tokens of a request that nobody described


@dataclass(frozen=True)
class Inputs:
    """A deployment as the fields describe it, and its source.

    `findings`: what is wrong with its flags. `trouble` says beside the hardware why it cannot be planned.
    """

    deployment: Deployment
    source: Source
    findings: Sequence[LintFinding]
    trouble: Callable[[str], Any]


def choose_inputs() -> Inputs | None:
    """The fields; None while one of them has no sense, which is said beside it."""
    with st.container(border=True):
        source = choose_source()
    with st.container(border=True):
        place = choose_place(source)
        trouble = st.empty()
    with st.container(border=True):
        flags = what_if(place.engine, place.version)
        more = more_flags(place.engine)
        base, findings = choose_launch(place.deployment)
    if source is None or base is None or more is None:
        return None
    deployment = replace(base, **flags, **more)
    ranks = deployment.tp * deployment.pp * deployment.dp
    deployment = replace(deployment, num_gpus=max(deployment.num_gpus, ranks))
    if deployment.tokens_per_request is None:
        deployment = replace(deployment, tokens_per_request=min(TYPICAL, deployment.max_model_len or TYPICAL))
    return Inputs(deployment, source, findings, lambda text: trouble.error(words.plain(text)))
