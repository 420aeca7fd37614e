"""Canonical traces as the series an engine's version exposes, in `promtool test rules` notation."""

from __future__ import annotations

from collections.abc import Mapping

from probe.export.cases import Scene, Traces
from probe.export.naming import OWN_JOB, RULE_BREACH, UP, quoted
from probe.export.promql import number

INSTANCE, MODEL = "engine-1:8000", "m"
OWN_TARGET = {"job": OWN_JOB, "instance": "kvoncall:8501"}
WATCHED_NAME = "chat"
CAPACITY = 1000.0  # of what an engine tells as used and whole

Input = dict[str, str]


def target_labels(scene: Scene, metric: str) -> dict[str, str]:
    """Job and instance of whoever exposes a canonical metric."""
    return OWN_TARGET if metric == RULE_BREACH else {"job": scene.names.own_jobs[0], "instance": INSTANCE}


def canonical_labels(scene: Scene, metric: str, which: str) -> dict[str, str]:
    """The labels that tell a canonical series from others of its name."""
    if metric == RULE_BREACH:
        return {"rule": which, "target": WATCHED_NAME}
    labels = {"gpu" if metric.startswith("device_") else "engine": which} if which else {}
    if metric.endswith("_bucket"):
        labels["le"] = number(scene.names.dialect.slo[metric.removesuffix("_bucket")])
    return labels


def input_series(scene: Scene, traces: Traces) -> list[Input]:
    """`input_series` of a test."""
    found: dict[str, str] = {}
    for (metric, which), values in traces.items():
        for name, labels, exposed in _exposed(scene, metric, which, values):
            found[f"{name}{{{','.join(f'{k}={quoted(v)}' for k, v in labels.items())}}}"] = notation(exposed)
    return [{"series": series, "values": values} for series, values in found.items()]


def _exposed(
    scene: Scene, metric: str, which: str, values: list[float]
) -> list[tuple[str, dict[str, str], list[float]]]:
    target, labels = target_labels(scene, metric), canonical_labels(scene, metric, which)
    if metric in (UP, RULE_BREACH):
        return [(metric, {**target, **labels}, values)]
    names = scene.names
    source, suffix = names.source(metric)
    exposed = {name: value for label, value in labels.items() if (name := names.exposed_label(label))}
    if "le" in exposed:
        exposed["le"] = repr(float(f"{float(exposed['le']) / source.factor:.12g}"))
    if which and "engine" in labels and names.dialect.engine_label is None and which != "0":
        return []  # this engine knows no replicas
    model = {names.dialect.model_label: MODEL} if names.dialect.model_label and metric not in _OF_THE_PROCESS else {}
    common = {**target, **model, **exposed}
    scale = 1.0 if suffix in ("_bucket", "_count") else source.factor
    whole = CAPACITY if source.over is not None else 1.0
    rows = [(source.name + suffix, {**common, **source.match}, [value * whole / scale for value in values])]
    if source.over is not None:
        rows.append((source.over.name, {**common, **source.over.match}, [CAPACITY] * len(values)))
    marker = names.select(metric).only_with
    if marker is not None:
        rows.append((names.dialect.only_models_of or "", {**target, **model}, [1.0] * len(values)))
    return rows


_OF_THE_PROCESS: Mapping[str, None] = dict.fromkeys(
    ("process_start_time_seconds", "device_memory_used_bytes", "device_memory_total_bytes")
)


def notation(values: list[float]) -> str:
    """Values as promtool writes them: runs of equal steps as a+bxn."""
    parts, i = [], 0
    while i < len(values):
        j = i + 1
        step = values[j] - values[i] if j < len(values) else 0.0
        while j + 1 < len(values) and values[j + 1] - values[j] == step:
            j += 1
        if j >= len(values) or (j == i + 1 and step):  # a value of its own
            parts.append(number(values[i]))
            i += 1
            continue
        parts.append(f"{number(values[i])}{'-' if step < 0 else '+'}{number(abs(step))}x{j - i}")
        i = j + 1
    return " ".join(parts)
