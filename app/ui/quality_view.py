"""A measurement on a page: accuracy by turn, bytes against accuracy, the tables, and which layers are sensitive."""

from __future__ import annotations

import streamlit as st

from app.ui import quality_charts as charts
from app.ui import quality_tables as tables
from app.ui import words
from app.ui.quality_data import ALL, Measurement, full_precision_bytes, points, recommended, tasks_of, turns

OUTLIERS = "testbed-outliers"
_OUTLIERS_NOTE = (
    "**This model was altered on purpose, and its full-precision answers were not.** `testbed-outliers` is the "
    "testbed model with a few key channels multiplied by 16 and the matching query channels divided by 16, in every "
    "layer and head: each product of query and key is what it was, so at full precision it computes the same function. "
    "Large models have such outlier key channels by training; the small testbed model has none. A scheme with one "
    "scale for all channels of a key loses the other channels to them. Both variants are measured: the figures of the "
    "unaltered model are on this page once it was measured (start the engine without `--model`), and in the model card."
)


def show_model_note(*models: str | None) -> None:
    """Says in plain words what the transformed testbed model is, when one of these names it."""
    if any(model and OUTLIERS in model for model in models):
        st.info(_OUTLIERS_NOTE)


def show_measurement(measurement: Measurement, *, running: str | None = None, key: str) -> None:
    """Charts and tables of one measurement; `key` tells its controls from those of another on the page."""
    arms = measurement.arms
    names = [arm.name for arm in arms]
    task = choose_task(tasks_of(arms), key)
    left, right = st.columns(2)
    with left:
        asked = "all tasks" if task == ALL else task
        rows = {arm.name: turns(arm, task) for arm in arms}
        if any(rows.values()):
            title = f"Accuracy by turn, {asked} (band: 95% interval)"
            charts.by_turn(rows, baseline=measurement.baseline, title=title)
        else:
            st.caption("No question was asked turn by turn in this measurement.")
    with right:
        found = points(arms, running)
        if found:
            charts.pareto(found, names=names, title="Bytes per token against accuracy, all tasks (dashed: the front)")
        else:
            st.caption("Bytes per token of these formats are not known, so there is no front to draw.")
    tables.show_arms(arms)
    with st.expander("By task"):
        tables.show_tasks(arms)
    with st.expander(f"By turn in figures, {asked}"):
        tables.show_turns(arms, task)
    show_layers(measurement)


def choose_task(tasks: list[str], key: str) -> str:
    """Which task's turns are drawn."""
    if len(tasks) < 3:  # one task alone is all of them
        return ALL
    chosen = st.segmented_control("Task", tasks, default=ALL, required=True, key=f"{key}-task")
    return chosen or ALL


def show_layers(measurement: Measurement) -> None:
    """Bars of the layers' sensitivity, where it was measured."""
    if measurement.layers:
        charts.layers(measurement.layers, title="Mean KL with only this layer's cache in the incident's format")
        st.caption("Measured layer by layer on this model: the higher a bar, the more that layer needs full precision.")


def show_recommended(measurement: Measurement) -> None:
    """Which format the figures favour, in a sentence."""
    best = recommended(measurement.arms)
    if best is None:
        st.warning("No measured format holds quality here (a fall within 1 point and not clear of zero).")
        return
    text = f"Of the formats that hold quality, **{words.plain(best.name)}** has the fewest bytes per token"
    text = f"{text}: {tables.share_of_bytes(best, full_precision_bytes(measurement.arms))}."
    if best.against.get("verdict") == "inconclusive":
        allowed = tables.points_of(float(best.against["high"]))
        text += f" With so few questions a fall of {allowed} points cannot be excluded: measure more conversations."
    st.markdown(text)
