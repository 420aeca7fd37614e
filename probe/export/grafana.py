"""A Grafana dashboard for one engine's version: KV cache, evictions, queue, latency, with links to runbooks.

Panels show the hottest engine, never an average over engines; ratios are ratios of sums. A panel whose metric the
version lacks is left out, and the reason stands in the dashboard's description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from probe.alerts.expr import Aggregate, Instant
from probe.alerts.fit import split_histogram
from probe.alerts.rule import ValueSignal
from probe.alerts.rules import EVICTION_STORM
from probe.dialects import canonical_names
from probe.export.alerts import Selection
from probe.export.naming import Names, NotExposedError, quoted
from probe.export.promql import promql, quantile, reading
from probe.export.stand_in import sign_of

DASHBOARD_FILE = "kvoncall-dashboard.json"
WIDTH, HEIGHT = 8, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RANGE = "$__rate_interval"

Query = tuple[str, str]  # (expression, legend)


@dataclass(frozen=True)
class Panel:
    """One chart. `metrics` are the canonical series its description tells of; `rule` has the runbook."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    queries: Callable[[Names], list[Query]]
    rule: str | None = None
    limit: float | None = None
    most: float | None = None


def _by_engine(how: str, metric: str) -> Callable[[Names], list[Query]]:
    """A gauge by engine; how: max or sum."""

    def queries(names: Names) -> list[Query]:
        by = names.labels(("engine",))
        legend = " ".join(f"{{{{{label}}}}}" for label in by if label != "job")
        expr = Aggregate("max" if how == "max" else "sum", Instant(metric), ("engine",))
        return [(promql(expr, names), legend)]

    return queries


def _rates(**named: str) -> Callable[[Names], list[Query]]:
    """Counters a second by target: legend -> metric."""
    return lambda names: [(_rate(names, metric), f"{{{{instance}}}} {name}") for name, metric in named.items()]


def _rate(names: Names, metric: str) -> str:
    by = ", ".join(names.labels(()))
    return f"sum by ({by}) ({reading(names.select(metric), lambda selector: f'rate({selector}[{_RANGE}])')})"


def _share(part: str, whole: str) -> Callable[[Names], list[Query]]:
    return lambda names: [(f"{_rate(names, part)}\n/\n{_rate(names, whole)}", "{{instance}}")]


def _quantiles(metric: str) -> Callable[[Names], list[Query]]:
    def read(selector: str) -> str:
        return f"rate({selector}[{_RANGE}])"

    def queries(names: Names) -> list[Query]:
        return [(quantile(q, metric, names, read), f"{{{{instance}}}} p{q * 100:g}") for q in (0.5, 0.95, 0.99)]

    return queries


def _eviction_rate(names: Names) -> list[Query]:
    assert isinstance(EVICTION_STORM.signal, ValueSignal)
    return [(promql(EVICTION_STORM.signal.value, names), "{{instance}}")]


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "KV cache",
        (
            Panel("KV cache in use", "percentunit", ("kv_usage_ratio",), _by_engine("max", "kv_usage_ratio"),
                  "kv-saturated", 0.9, 1.0),
            Panel("Prefix cache hit rate", "percentunit", ("prefix_hits_total",),
                  _share("prefix_hits_total", "prefix_queries_total"), "prefix-hit-collapse", most=1.0),
            Panel("Cached blocks evicted", "ops", ("kv_block_evictions_total", "kv_evicted_before_reuse_total"),
                  _rates(evicted="kv_block_evictions_total", missed="kv_evicted_before_reuse_total"), "cache-thrash"),
        ),
    ),
    (
        "Evictions of requests",
        (
            Panel("Eviction rate: preemptions per request in service, 5 min", "percentunit",
                  ("preemptions_total",), _eviction_rate, "eviction-storm", EVICTION_STORM.threshold),
            Panel("Preemptions", "ops", ("preemptions_total",), _rates(preempted="preemptions_total"),
                  "preemption-livelock"),
            Panel("Requests finished", "reqps", ("requests_finished_total",),
                  _rates(finished="requests_finished_total"), "preemption-livelock"),
        ),
    ),
    (
        "Queue",
        (
            Panel("Requests waiting", "short", ("requests_waiting",), _by_engine("sum", "requests_waiting"),
                  "head-of-line-block"),
            Panel("Requests running", "short", ("requests_running",), _by_engine("sum", "requests_running"),
                  "engine-stall"),
            Panel("Time in the queue", "s", ("queue_seconds",), _quantiles("queue_seconds"), "head-of-line-block"),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", "s", ("ttft_seconds",), _quantiles("ttft_seconds"), "ttft-slo-burn"),
            Panel("Time between tokens", "s", ("itl_seconds",), _quantiles("itl_seconds"), "itl-slo-burn"),
            Panel("Time of a request", "s", ("e2e_seconds",), _quantiles("e2e_seconds")),
        ),
    ),
    (
        "Work",
        (
            Panel("Tokens generated", "short", ("generation_tokens_total",),
                  _rates(generated="generation_tokens_total"), "engine-stall"),
            Panel("Prompt tokens", "short", ("prompt_tokens_total",), _rates(prompt="prompt_tokens_total")),
            Panel("Memory of the process", "bytes", ("process_resident_memory_bytes",),
                  _by_engine("max", "process_resident_memory_bytes"), "oom"),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Board:
    """The dashboard as JSON data, and the panels that are not in it: (title, why not)."""

    document: dict[str, Any]
    left_out: tuple[tuple[str, str], ...]


def dashboard_text(selection: Selection) -> str:
    """The dashboard's JSON."""
    return json.dumps(dashboard(selection).document, indent=2) + "\n"


def dashboard(selection: Selection) -> Board:
    """The dashboard for a dialect's version; variables: data source, job, instance and, where it is told, model."""
    plain = dataclasses.replace(selection.names, jobs=(), notes={})
    model = plain.dialect.model_label
    names = dataclasses.replace(plain, matchers=('job=~"$job"', 'instance=~"$instance"'))
    panels: list[dict[str, Any]] = [_alerts_panel(selection)]
    left_out: list[tuple[str, str]] = []
    y = HEIGHT
    for title, row in ROWS:
        made = []
        for panel in row:
            try:
                made.append(_panel(panel, _of_model(panel, names, model), selection))
            except NotExposedError as error:
                left_out.append((panel.title, str(error)))
        if not made:
            continue
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        for place, panel_json in enumerate(made):
            panels.append({**panel_json, "gridPos": {"x": place * WIDTH, "y": y + 1, "w": WIDTH, "h": HEIGHT}})
        y += HEIGHT + 1
    for number, found in enumerate(panels, 1):
        found["id"] = number
    return Board(_document(selection, panels, left_out, plain), tuple(left_out))


def _of_model(panel: Panel, names: Names, model: str | None) -> Names:
    """The names with the matcher of the model variable, where every metric of the panel is told by model."""
    if model is None or any(metric.startswith(("process_", "device_")) for metric in panel.metrics):
        return names
    return dataclasses.replace(names, matchers=(*names.matchers, f'{model}=~"$model"'))


def _document(
    selection: Selection, panels: list[dict[str, Any]], left_out: list[tuple[str, str]], plain: Names
) -> dict[str, Any]:
    about = [f"By `kvoncall rules export` for {selection.dialect}.", *selection.notes]
    about += [f"Left out: {title}: {reason}." for title, reason in left_out]
    return {
        "uid": f"kvoncall-{plain.dialect.engine}",
        "title": f"KV cache of {selection.dialect}",
        "description": " ".join(about),
        "tags": ["kvoncall", plain.dialect.engine],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            _link("kvoncall: alerts", f"{selection.options.base_url}/alerts"),
            _link("kvoncall: runbooks", f"{selection.options.base_url}/runbooks"),
        ],
        "templating": {"list": _variables(plain)},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables(names: Names) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    ]
    within: list[str] = []
    model = names.dialect.model_label
    for name, label in (("job", "job"), ("instance", "instance"), *([("model", model)] if model else [])):
        selector = dataclasses.replace(names, matchers=tuple(within)).select(sign_of(names)).selector
        found.append(
            {
                "name": name,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": f"label_values({selector}, {label})", "refId": name},
                "refresh": 2,
                "sort": 1,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
        within.append(f'{label}=~"${name}"')
    return found


def _panel(panel: Panel, names: Names, selection: Selection) -> dict[str, Any]:
    queries = panel.queries(names)
    limit = panel.limit
    if panel.unit == "s":
        limit = names.dialect.slo.get(panel.metrics[0])
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if limit is not None:
        steps.append({"color": "red", "value": limit})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {"lineWidth": 2, "thresholdsStyle": {"mode": "line" if limit is not None else "off"}},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    runbook = f"{selection.options.base_url}/runbooks?runbook={panel.rule}"
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": _meaning(panel, names),
        "datasource": DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "links": [_link(f"Runbook: {panel.rule}", runbook)] if panel.rule else [],
    }


def _meaning(panel: Panel, names: Names) -> str:
    """What the metrics of a panel mean, and where this engine means something else by them."""
    said = []
    for metric in panel.metrics:
        base, _ = split_histogram(metric)
        source, _ = names.source(base)
        to_know = [text for text in (source.note, f"needs {source.gate}" if source.gate else None) if text]
        said.append(f"{canonical_names()[base].meaning} ({': '.join([source.name, *to_know])})")
    return "; ".join(said) + "."


def _alerts_panel(selection: Selection) -> dict[str, Any]:
    ours = "|".join(dict.fromkeys(alert.rule_id for alert in selection.alerts))
    expr = f'ALERTS{{alertstate="firing",kvoncall_rule=~{quoted(ours)}}}' if ours else "ALERTS"
    return {
        "type": "state-timeline",
        "title": "Alerts of kvoncall that fire",
        "description": "By rule and instance; the runbooks are behind the links.",
        "datasource": DATASOURCE,
        "targets": [
            {
                "refId": "A",
                "datasource": DATASOURCE,
                "expr": f"max by (kvoncall_rule, severity, instance) ({expr})",
                "legendFormat": "{{kvoncall_rule}} {{instance}}",
            }
        ],
        "fieldConfig": {
            "defaults": {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": [
                {"color": "green", "value": None}, {"color": "red", "value": 1}]}},
            "overrides": [],
        },
        "links": [_link("Alerts in kvoncall", f"{selection.options.base_url}/alerts")],
        "gridPos": {"x": 0, "y": 0, "w": 24, "h": HEIGHT},
    }  # fmt: skip


def _link(title: str, url: str) -> dict[str, Any]:
    return {"title": title, "url": url, "type": "link", "targetBlank": True}
