"""A recommendation in the form it is applied in, to copy or to download: launch command, Helm, compose, JSON."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from app.ui import words
from app.ui.guard import sentence
from probe.store import Target
from runbooks.changes import Recommendation
from runbooks.facts import TargetFacts
from runbooks.outputs import CommandError, render


@dataclass(frozen=True)
class Form:
    """How a form is called, coloured and saved."""

    label: str
    language: str | None
    ending: str


FORMS = {
    "launch": Form("Launch command", "diff", "diff"),
    "helm": Form("Helm values", "yaml", "yaml"),
    "compose": Form("docker-compose", "yaml", "yaml"),
    "kubernetes": Form("Kubernetes patch", "yaml", "yaml"),
    "json": Form("JSON", "json", "json"),
    "text": Form("Text", None, "txt"),
}


def show_outputs(advice: Recommendation, facts: TargetFacts, target: Target) -> None:
    """The chosen form; with the operator's own launch command the lists in it are complete."""
    with st.expander("Take it along: launch command, Helm, compose, Kubernetes, JSON", key="outputs"):
        form = st.segmented_control(
            "Form", list(FORMS), default="launch", required=True, key="form",
            format_func=lambda name: FORMS[name].label,
        )  # fmt: skip
        command = st.text_area(
            "Your launch command", key=f"command-{target.name}", height=80, persist_state="session",
            placeholder="vllm serve MODEL --max-num-seqs 256 …   (then nothing of it is lost)",
        )  # fmt: skip
        chosen = form or "launch"
        try:
            text = render(advice, facts, chosen, (command or "").strip() or None)
        except CommandError as error:
            st.error(words.plain(sentence(error)))
            return
        st.code(text, language=FORMS[chosen].language, wrap_lines=True)
        name = f"{advice.runbook}-{target.name}.{FORMS[chosen].ending}"
        st.download_button("Download", text, name, icon=":material/download:", key="download", on_click="ignore")
