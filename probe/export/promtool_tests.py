"""Unit tests for `promtool test rules`: what our evaluator says of a trace, Prometheus has to say of its exposition.

One file a rule, because a test's evaluation interval is its file's. Each has a case that fires, with the last
evaluation before it and the words of the alert, and a near miss that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from probe.alerts.arithmetic import Moment
from probe.alerts.arithmetic import evaluate as vector
from probe.alerts.expr import Expr
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.state import Progress, step
from probe.alerts.window import Labels, Series, Window
from probe.export.alerts import ALL_MISSING, ExportedAlert, Selection, names_for, part_unit, said
from probe.export.cases import CASES, Scene, Traces, scene
from probe.export.exposition import MODEL, canonical_labels, input_series, target_labels
from probe.export.naming import RULE_BREACH, UP
from probe.export.prometheus import RULES_FILE, annotation_templates
from probe.export.promql import duration
from probe.export.yaml_text import yaml_text
from probe.store import Sample

LOOKBACK_S = 300.0  # of Prometheus
FOREVER_S = 1e9


@dataclass(frozen=True)
class Firing:
    """One alert that fires: its labels beyond the static ones, and the value of each field of its description."""

    labels: dict[str, str]
    figures: Mapping[str, float | None]


Judge = Callable[[int], list[Firing]]
"""The alerts whose condition holds at the i-th evaluation."""


def test_files(selection: Selection) -> dict[str, str]:
    """File name -> text; they look for the rules in the folder above."""
    by_rule: dict[str, list[ExportedAlert]] = {}
    for alert in selection.alerts:
        by_rule.setdefault(alert.rule_id, []).append(alert)
    return {f"{rule_id}.yaml": _file(selection, alerts) for rule_id, alerts in by_rule.items()}


def _file(selection: Selection, alerts: list[ExportedAlert]) -> str:
    tests = []
    for alert in alerts:
        at = _scene(selection, alert)
        tests += _vanished(selection, alert, at) if alert.name == ALL_MISSING else _pair(selection, alert, at)
    document = {
        "rule_files": [f"../{RULES_FILE}"],
        "evaluation_interval": duration(_scene(selection, alerts[0]).interval_s),
        "tests": tests,
    }
    tested = ", ".join(dict.fromkeys(alert.name for alert in alerts))
    return yaml_text(document, [f"Tests of {tested}: run `promtool test rules` on this file."])


def _scene(selection: Selection, alert: ExportedAlert) -> Scene:
    return scene(alert.rule, names_for(alert.original, selection.names), selection.options.scrape_interval_s)


def _pair(selection: Selection, alert: ExportedAlert, at: Scene) -> list[dict[str, Any]]:
    fires, quiet = (make(at) for make in CASES[alert.rule_id])
    tests = []
    for name, traces, expected in (("fires", fires, True), ("stays quiet", quiet, False)):
        traces = traces if (UP, "") in traces else {(UP, ""): at.flat(1), **traces}
        judge = _by_rule(at, alert, traces) if alert.told_by_rule else _by_resets(at, traces)
        tests.append(_test(selection, alert, at, name, input_series(at, traces), judge, fires=expected))
    return tests


def _vanished(selection: Selection, alert: ExportedAlert, at: Scene) -> list[dict[str, Any]]:
    job = dict(alert.static_labels)["job"]
    down, up = f"0x{at.scrapes - 1}", f"1x{at.scrapes - 1}"
    others = [_up(other, "c", up) for other in (*selection.names.own_jobs, f"not-{job}") if other != job]
    all_down = [_up(job, "a", down), _up(job, "b", down), *others]
    one_up = [_up(job, "a", down), _up(job, "b", up), *others]

    def holds(_: int) -> list[Firing]:
        return [Firing({}, {})]

    return [
        _test(selection, alert, at, "fires when all are down", all_down, holds, fires=True),
        _test(selection, alert, at, "fires when all vanished", others, holds, fires=True),
        _test(selection, alert, at, "stays quiet while one is up", one_up, lambda _: [], fires=False),
    ]


def _up(job: str, instance: str, values: str) -> dict[str, str]:
    return {"series": f'up{{job="{job}",instance="{instance}"}}', "values": values}


def _test(
    selection: Selection,
    alert: ExportedAlert,
    at: Scene,
    name: str,
    series: list[dict[str, str]],
    judge: Judge,
    *,
    fires: bool,
) -> dict[str, Any]:
    progress, first, states = Progress(), None, []
    for i in range(at.scrapes):
        found = judge(i)
        progress, _ = step(alert.rule, progress, "breach" if found else "ok", i * at.interval_s, FOREVER_S)
        states.append(found if progress.state == "firing" else [])
        if first is None and progress.state == "firing":
            first = i
    if (first is not None) != fires:
        raise AssertionError(f"the case {alert.name} {name} is no such case")
    asked = [at.scrapes - 1] if first is None else sorted({max(first - 1, 0), first, at.scrapes - 1} - {0})
    return {
        "name": f"{alert.name} {name}",
        "interval": duration(at.interval_s),
        "input_series": series,
        "alert_rule_test": [_expected(selection, alert, at, i, states[i]) for i in asked],
    }


def _expected(selection: Selection, alert: ExportedAlert, at: Scene, i: int, firing: list[Firing]) -> dict[str, Any]:
    asked: dict[str, Any] = {"eval_time": duration(i * at.interval_s), "alertname": alert.name, "exp_alerts": []}
    for found in firing:
        labels = {**found.labels, **alert.labels}
        told = {**annotation_templates(alert, selection), "description": _description(alert, found)}
        told["summary"] = alert.summary
        for label, value in labels.items():
            told["summary"] = told["summary"].replace(f"{{{{ $labels.{label} }}}}", value)
        asked["exp_alerts"].append({"exp_labels": labels, "exp_annotations": told})
    return asked


def _description(alert: ExportedAlert, found: Firing) -> str:
    signal = alert.rule.signal
    if alert.name == ALL_MISSING or not isinstance(signal, ValueSignal):
        return alert.description
    units: dict[str, str] = {"value": signal.unit}
    for name, part in (("numerator", signal.numerator), ("denominator", signal.denominator)):
        units[name] = part_unit(part, signal) if part is not None else signal.unit
    figures = {name: said(units[name], value) for name, value in found.figures.items() if value is not None}
    fields = {"numerator": "", "denominator": "", "where": "", **figures}
    return signal.sentence.format(window=duration(alert.rule.window_s), threshold=alert.rule.threshold, **fields)


def _by_rule(at: Scene, alert: ExportedAlert, traces: Traces) -> Judge:
    """What the rule's condition is on the traces, by our own evaluator."""
    rule, window = alert.rule, _window(at, traces)
    condition, signal = rule.condition, rule.signal
    assert condition is not None
    assert isinstance(signal, ValueSignal)

    def judge(i: int) -> list[Firing]:
        moment = Moment(window, i * at.interval_s, LOOKBACK_S)

        def single(part: Expr | None) -> float | None:
            return None if part is None else next(iter(vector(part, moment).values()), None)

        return [
            Firing(
                _alert_labels(at, rule, key),
                {"value": value, "numerator": single(signal.numerator), "denominator": single(signal.denominator)},
            )
            for key, value in vector(condition, moment).items()
        ]

    return judge


def _alert_labels(at: Scene, rule: Rule, key: Labels) -> dict[str, str]:
    labels = target_labels(at, RULE_BREACH if RULE_BREACH in rule.metrics else UP)
    model = {at.names.dialect.model_label or "": MODEL} if at.names.by_model else {}
    return {**labels, **model, **{at.names.exposed_label(name) or name: value for name, value in key}}


def _by_resets(at: Scene, traces: Traces) -> Judge:
    """Where a counter began again within the window."""
    counter = next(values for (metric, _), values in traces.items() if metric != UP)
    series = Series({}, [(i * at.interval_s, value) for i, value in enumerate(counter)])

    def judge(i: int) -> list[Firing]:
        now_ms = round(i * at.interval_s * 1000)
        first, end = series.span(now_ms - round(at.rule.window_s * 1000), now_ms)
        resets = len(series.drops(series.times[first], series.times[end - 1]))
        return [Firing(target_labels(at, UP), {"value": float(resets)})] if resets else []

    return judge


def _window(at: Scene, traces: Traces) -> Window:
    window = Window({metric: FOREVER_S for metric, _ in traces})
    for i in range(at.scrapes):
        window.add(
            Sample("t", metric, canonical_labels(at, metric, which), i * at.interval_s, values[i])
            for (metric, which), values in traces.items()
            if not (which not in ("", "0") and metric != RULE_BREACH and at.names.dialect.engine_label is None)
        )
    return window
