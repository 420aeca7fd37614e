"""Templates: the flags of a kind of workload, computed for the plan's deployment, with a reason for every value."""

from __future__ import annotations

import streamlit as st

from app.ui import words
from app.ui.capacity_flags import SLIDERS
from app.ui.capacity_view import verdict_line
from app.ui.changes import flag_value
from app.ui.tables import show_table
from app.ui.wording import in_language
from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from runbooks.knowledge.article_templates import article_errors
from runbooks.knowledge.template_parts import Template, TemplateAdvice
from runbooks.knowledge.templates import advise, templates

EFFECTS = {
    "about right": words.Mark("✔", "about right", "green"),
    "no effect": words.Mark("○", "no effect", "gray"),
    "wrong way": words.Mark("✖", "wrong way", "red"),
    "misjudged": words.Mark("▲", "misjudged", "orange"),
    "missing": words.Mark("▲", "missing", "orange"),
}


def show_templates(deployment: Deployment, language: str) -> None:
    """The choice of a template, and what it comes to here."""
    by_id = {one.id: one for one in templates()}
    chosen = st.selectbox("Template", list(by_id), key="template", bind="query-params")
    template = by_id[chosen or next(iter(by_id))]
    st.subheader(words.plain(in_language(template.title, language)))
    st.markdown(words.plain(in_language(template.summary, language)))
    lengths = f"a typical one {template.prompt_tokens} in and {template.output_tokens} out"
    st.caption(
        words.plain(
            f"Longest request {words.count(template.max_model_len)} tokens, {lengths}. Computed for the plan's "
            f"deployment: {told(deployment)}."
        )
    )
    try:
        advice = advise(template, deployment)
    except ConfigError as error:
        st.error(words.plain(str(error)))
    else:
        show_advice(advice, language)
    show_article(template, language)


def told(deployment: Deployment) -> str:
    """`Llama-3.1-8B on 1 × H100-80GB, vllm 0.33.0`."""
    device = deployment.gpu.name if deployment.gpu is not None else "a GPU that is not known"
    engine = f"{deployment.engine} {deployment.version or '(newest)'}"
    return f"{deployment.shape.name} on {deployment.num_gpus} × {device}, {engine}"


def show_advice(advice: TemplateAdvice, language: str) -> None:
    """Verdict, command to copy, the reasons, what was left out, and what no flag does."""
    show = {"fits": st.success, "at_risk": st.warning, "does_not_fit": st.error}[advice.plan.verdict]
    show(f"**{verdict_line(advice.plan)}**  \n{words.count(advice.concurrency)} requests of this template at once")
    command = advice.command()
    st.code(command, language="bash", wrap_lines=True)
    st.button(
        "Take it into the plan", key="take-template", icon=":material/tune:", on_click=_take, args=(command,),
        help="Becomes the plan's launch command; the sliders go back to their default.",
    )  # fmt: skip
    show_table([
        {"flag": one.flag, "value": flag_value(one.value), "reason": in_language(one.reason, language)}
        for one in advice.flags
    ])  # fmt: skip
    if advice.steps:
        st.markdown("**Besides, what no flag does**")
        steps = [words.plain(in_language(step, language)) for step in advice.steps]
        st.markdown("\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)))
    if advice.left_out:
        with st.expander(f"Considered and left out ({len(advice.left_out)})", key="left-out"):
            show_table([
                {"setting": one.setting, "value": flag_value(one.value), "why not": in_language(one.reason, language)}
                for one in advice.left_out
            ])  # fmt: skip
    sources = list(dict.fromkeys(one.source for one in advice.flags))
    st.caption(words.plain("Flags read from: " + "; ".join(sources) + ".") if sources else "No flag is needed.")


def show_article(template: Template, language: str) -> None:
    """What is wrong with the article's template of the same aim."""
    errors = article_errors(template)
    if errors:
        st.markdown(
            f"**The article's template {words.plain(template.article or '')}, computed on its own card and model**"
        )
        show_table([
            {
                "flag": one.flag,
                "its value": flag_value(one.value),
                "effect": EFFECTS[one.effect],
                "what holds": in_language(one.text, language),
            }
            for one in errors
        ])  # fmt: skip


def _take(command: str) -> None:
    st.session_state["launch-line"] = command
    st.session_state["view"] = "Plan"
    for key in SLIDERS:
        st.session_state[key] = "default"
