"""Capacity: does a model fit, by how much, what each lever buys; templates, the choice of an engine, a checklist."""

from __future__ import annotations

import streamlit as st

from app.ui import words
from app.ui.capacity_attention import show_attentions
from app.ui.capacity_chart import show_bars
from app.ui.capacity_checklist import show_checklist
from app.ui.capacity_chooser import show_chooser
from app.ui.capacity_claims import show_claims
from app.ui.capacity_compare import show_comparison
from app.ui.capacity_inputs import Inputs, choose_inputs
from app.ui.capacity_measured import show_measured
from app.ui.capacity_templates import show_templates
from app.ui.capacity_view import (
    show_arithmetic,
    show_articles,
    show_figures,
    show_levers,
    show_parts,
    show_subject,
    show_verdict,
    show_warnings,
)
from app.ui.guard import guarded, page
from app.ui.language import choose_language
from app.ui.runbook_findings import show_lint
from engine.errors import ConfigError
from engine.memory.capacity import CapacityPlan
from engine.memory.levers import levers
from engine.memory.plan import plan as plan_of
from runbooks.plan_cautions import cautions

TABS = ["Plan", "Templates", "Choose an engine", "Checklist", "Articles against the truth"]


@page
def render() -> None:
    """The page."""
    st.title("Capacity")
    language = choose_language()
    tabs = st.tabs(TABS, key="view", on_change="rerun", bind="query-params")
    plan: CapacityPlan | None = None
    with tabs[0], guarded():
        plan = show_plan(language)
    with tabs[1], guarded():
        if tabs[1].open and plan is not None:
            show_templates(plan.deployment, language)
        elif plan is None:
            st.info("Templates are computed for the deployment of the Plan tab, which lacks something yet.")
    with tabs[2], guarded():
        if tabs[2].open:
            show_chooser(language)
    with tabs[3], guarded():
        if tabs[3].open:
            show_checklist(plan, language)
    with tabs[4], guarded():
        if tabs[4].open:
            show_claims(language)


def show_plan(language: str) -> CapacityPlan | None:
    """The verdict first, then the fields, then what it rests on; the plan, or None while there is none."""
    head = st.container()
    left, right = st.columns([2, 3], gap="medium")
    with left:
        inputs = choose_inputs()
    try:
        plan = plan_of(inputs.deployment) if inputs is not None else None
    except ConfigError as error:
        assert inputs is not None
        inputs.trouble(str(error))
        plan = None
    if inputs is None or plan is None:
        head.info("Nothing to plan yet: see the sentence beside the field.")
        return None
    with head:
        show_verdict(plan)
        for caution in cautions(inputs.deployment):
            st.error(f"✖ It does not run so: {words.plain(caution)}")
        show_subject(plan)
        show_figures(plan)
    with right:
        show_division(plan, inputs)
    if inputs.findings:
        st.subheader("What is wrong with the flags")
        show_lint(inputs.findings)
    st.subheader("What each lever buys")
    show_levers(levers(plan.deployment), plan)
    st.subheader("Two plans")
    show_comparison(plan)
    st.subheader("Kinds of attention")
    show_attentions(plan, language)
    show_arithmetic(plan)
    return plan


def show_division(plan: CapacityPlan, inputs: Inputs) -> None:
    """How the memory is divided, and the rule of thumb beside it."""
    if inputs.source.live is not None:
        show_measured(plan, inputs.source.live)
    show_bars({words.plain(plan.deployment.shape.name): plan}, title="Memory of one GPU")
    show_parts(plan)
    show_articles(plan)
    show_warnings(plan)
