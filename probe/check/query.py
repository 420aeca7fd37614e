"""The queries in documents: rules, panels, variables and annotations, wherever a document nests them.

Rule files, PrometheusRule and VMRule objects, lists of objects, ConfigMaps (whose strings are documents of their own),
Helm values with `groups`, dashboards of every schema, library panels and Grafana's provisioned alerts are all trees in
which a mapping with `expr` is a query; what lies above it says which kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import promql_parser

from probe.check.documents import DocumentError, Located, read_text
from probe.check.grafana import current_values, substitute

ALERT, RECORD, PANEL, VARIABLE = "alert", "record", "panel", "variable"
_LABEL_VALUES = re.compile(r"\s*label_values\s*\((?P<metric>.+),\s*[\w.]+\s*\)\s*$", re.DOTALL)
_QUERY_RESULT = re.compile(r"\s*query_result\s*\((?P<expr>.+)\)\s*$", re.DOTALL)
_OTHER_LANGUAGES = re.compile(
    r"loki|tempo|elasticsearch|influx|cloudwatch|graphite|sql|postgres|opentsdb|jaeger|pyroscope|clickhouse", re.I
)


@dataclass(frozen=True)
class Query:
    """One expression and what surrounds it. `text` is as written, `expr` what is parsed; durations in seconds."""

    file: str
    text: Located
    expr: str
    kind: str
    where: str
    hold_s: float = 0.0
    interval_s: float | None = None  # of the rule group
    annotations: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""  # Grafana's unit of the panel

    @property
    def line(self) -> int:
        return self.text.line


@dataclass(frozen=True)
class _Above:
    """What the mappings above say."""

    file: str
    title: str = ""
    interval_s: float | None = None
    unit: str = ""
    language: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


def find_queries(documents: list[Any], file: str) -> list[Query]:
    """All queries of the documents of one file, in its order; raises `DocumentError` for a broken inner file."""
    seen: set[int] = set()
    return [query for document in documents for query in _walk(document, _Above(file), seen)]


def _walk(node: Any, above: _Above, seen: set[int]) -> Iterator[Query]:
    if not isinstance(node, dict | list) or id(node) in seen:  # YAML's aliases would be walked again and again
        return
    seen.add(id(node))
    if isinstance(node, list):
        for item in node:
            yield from _walk(item, above, seen)
        return
    if node.get("kind") == "ConfigMap":
        yield from _inner_files(node.get("data"), above, seen)
        return
    above = _below(node, above)
    yield from _own(node, above)
    for key, value in node.items():
        if key == "json" and isinstance(value, Located) and value.lstrip()[:1] == "{":  # GrafanaDashboard objects
            yield from _inner_files({"dashboard.json": value}, above, seen)
        else:
            yield from _walk(value, above, seen)


def _inner_files(data: Any, above: _Above, seen: set[int]) -> Iterator[Query]:
    for key, text in data.items() if isinstance(data, dict) else ():
        if not isinstance(text, Located) or not re.search(r"\.(ya?ml|json|rules?)$", str(key)):
            continue
        try:
            documents = read_text(text, f"{above.file} ({key})", text.line)
        except DocumentError:
            if re.search(r"\b(expr|alert|record)\b", text):
                raise
            continue
        yield from _walk(documents, above, seen)


def _below(node: Mapping[Any, Any], above: _Above) -> _Above:
    changes: dict[str, Any] = {}
    title = node.get("title")
    if isinstance(title, str) and title.strip():
        changes["title"] = title.strip()
    if isinstance(node.get("rules"), list):
        changes["interval_s"] = _seconds(node.get("interval"))
    if "templating" in node:
        changes["values"] = current_values(node)
    if "targets" in node or "fieldConfig" in node:
        changes["unit"] = _unit(node)
    source = node.get("datasource")
    language = source.get("type") if isinstance(source, Mapping) else source
    if isinstance(language, str) and language:
        changes["language"] = language
    return replace(above, **changes) if changes else above


def _unit(panel: Mapping[Any, Any]) -> str:
    """Grafana's unit of a panel: of today's form, of graphs and of single stats; "" where some series have others."""
    overrides = _at(panel, "fieldConfig", "overrides")
    for override in overrides if isinstance(overrides, list) else ():
        properties = override.get("properties") if isinstance(override, Mapping) else None
        if any(isinstance(one, Mapping) and one.get("id") == "unit" for one in properties or ()):
            return ""
    axes = panel.get("yaxes")
    axis = axes[0] if isinstance(axes, list) and axes else {}
    for unit in (_at(panel, "fieldConfig", "defaults", "unit"), _at(axis, "format"), panel.get("format")):
        if isinstance(unit, str):
            return unit
    return ""


def _own(node: Mapping[Any, Any], above: _Above) -> Iterator[Query]:
    text = node.get("expr")
    if text is None:
        yield from _variable(node, above)
        return
    if not isinstance(text, Located):
        if isinstance(text, bool) or not isinstance(text, int | float):
            return
        text = Located(str(text), _line_of(node))
    if not text.strip() or _OTHER_LANGUAGES.search(above.language):
        return
    for kind in (ALERT, RECORD):
        if isinstance(node.get(kind), str):
            yield Query(
                above.file, text, str(text), kind, str(node[kind]),
                hold_s=_seconds(node.get("for")) or 0.0,
                interval_s=above.interval_s,
                annotations=_annotations(node),
            )  # fmt: skip
            return
    name = node.get("name")  # of an annotation; panels have titles
    where = f"annotation {name!r}" if isinstance(name, str) and name else f"panel {above.title!r}"
    yield Query(above.file, text, substitute(text, above.values), PANEL, where, unit=above.unit)


def _variable(node: Mapping[Any, Any], above: _Above) -> Iterator[Query]:
    """A template variable: `label_values(metric, label)` or `query_result(expression)`."""
    query = node.get("query")
    text = query.get("query") if isinstance(query, Mapping) else query
    if not isinstance(text, Located) or node.get("type", "query") != "query" or not isinstance(node.get("name"), str):
        return
    match = _LABEL_VALUES.match(text)
    inner = match["metric"] if match else ""
    if not match:
        match = _QUERY_RESULT.match(text)
        inner = match["expr"] if match else ""
    if match and inner.strip():
        located = Located(inner, text.line)
        yield Query(above.file, located, substitute(inner, above.values), VARIABLE, f"variable {node['name']!r}")


def _annotations(node: Mapping[Any, Any]) -> dict[str, str]:
    annotations = node.get("annotations")
    if not isinstance(annotations, Mapping):
        return {}
    return {str(key): str(value) for key, value in annotations.items() if value is not None}


def _line_of(node: Mapping[Any, Any]) -> int:
    return min((value.line for value in node.values() if isinstance(value, Located)), default=1)


def _at(node: Any, *keys: str) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _seconds(text: Any) -> float | None:
    if isinstance(text, str):
        try:
            return float(promql_parser.parse_duration(text.strip()).total_seconds())
        except (ValueError, OverflowError):
            return None
    return None
