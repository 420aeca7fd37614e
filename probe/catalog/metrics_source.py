"""Metrics of an engine, read from its source: names, types and labels where Counter, Gauge or Histogram are made.

A name counts if it has the engine's prefix and a call, or an entry of a table of names, says its type. Labels that
come from outside the module are those the package's main logger gives its metrics, or left open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from probe.catalog.source import Modules, Scope, UnknownValueError, last_name

_NAME = re.compile(r"[a-z]+:[a-z][a-zA-Z0-9_]*")
_MAKER = re.compile(
    r"(?:^|_)(counter|gauge|histogram|summary)(?:_cls|histogram)?$|(counter|gauge|histogram)metadata$", re.IGNORECASE
)
_MAKES = re.compile(r"(?:Counter|Gauge|Histogram|Summary)(?:Metadata)?\(|_(?:counter|gauge|histogram)_cls\(")
_ROOTS = {"vllm": "vllm/", "sglang": "sglang/srt/"}  # of the server; the rest are other programs
_LABELS = re.compile(r"label_?names?$|^labels$")


@dataclass(frozen=True)
class SourceMetric:
    """A metric as exposed. `open_labels`: more labels than those listed come from outside."""

    name: str
    type: str
    labels: tuple[str, ...]
    open_labels: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As in the catalog file, without its versions."""
        found: dict[str, Any] = {"type": self.type, "labels": list(self.labels)}
        return found | ({"open_labels": True} if self.open_labels else {})


def source_metrics(modules: Modules, engine: str) -> dict[str, SourceMetric]:
    """All metrics by exposed name: a counter with its `_total`."""
    root = _ROOTS[engine]
    paths = [path for path, text in modules.files.items() if path.startswith(root) and _may_make(text, engine)]
    base = _base_labels(modules, paths, engine)
    found: dict[str, SourceMetric] = {}
    for path in sorted(paths):
        for metric in _Reader(modules, path, engine, base).metrics():
            known = found.get(metric.name)
            if known is None or len(metric.labels) > len(known.labels):
                found[metric.name] = metric
    return found


def _may_make(text: str, engine: str) -> bool:
    return (f"{engine}:" in text or "prometheus" in text or "Metadata(" in text) and _MAKES.search(text) is not None


def _base_labels(modules: Modules, paths: list[str], engine: str) -> tuple[str, ...] | None:
    """What `labelnames` holds in the module with the most metrics."""
    if not paths:
        return None
    main = max(paths, key=lambda path: modules.files[path].count(f'"{engine}:'))
    for node in ast.walk(modules.tree(main)):
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "labelnames":
            try:
                return tuple(modules.value(node.value, Scope(main, {})))
            except UnknownValueError:
                continue
    return None


class _Reader:
    """One module."""

    def __init__(self, modules: Modules, path: str, engine: str, base: tuple[str, ...] | None) -> None:
        self.modules, self.path, self.base = modules, path, base
        self.prefix = f"{engine}:"
        self._attributes: dict[str, ast.expr] = {}
        for node in ast.walk(modules.tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                self._attributes.setdefault(node.targets[0].attr, node.value)

    def metrics(self) -> Iterator[SourceMetric]:
        """Every metric the module makes."""
        yield from self._within(self.modules.tree(self.path), Scope(self.path, {}), {})

    def _within(self, owner: ast.AST, scope: Scope, outer: dict[str, ast.expr]) -> Iterator[SourceMetric]:
        """Metrics made in a function, class or module; those of inner ones with their own variables."""
        local = dict(outer)
        inner: list[ast.AST] = []
        nodes: list[ast.AST] = []
        for node in _own_nodes(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner.append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                local[node.targets[0].id] = node.value
                nodes.append(node)
            else:
                nodes.append(node)
        named: set[str] = set()
        unnamed: list[tuple[str, ast.Call]] = []
        for node in nodes:
            for metric in self._of_node(node, scope, local, unnamed):
                named.add(metric.name.removesuffix("_total"))
                yield metric
        if len({kind for kind, _ in unnamed}) == 1:  # the name is a variable: every name around that none has taken
            kind, call = unnamed[0]
            for name in dict.fromkeys(self._names_in(nodes)):
                if name.removesuffix("_total") not in named:
                    yield self._metric(name, kind, call, scope, local)
        for node in inner:
            yield from self._within(node, scope, local)

    def _of_node(
        self, node: ast.AST, scope: Scope, local: dict[str, ast.expr], unnamed: list[tuple[str, ast.Call]]
    ) -> Iterator[SourceMetric]:
        if isinstance(node, ast.Call) and (kind := _type(node)):
            name = self._name(_argument(node, "name", 0), scope, local)
            if name is not None and name.startswith(self.prefix):
                yield self._metric(name, kind, node, scope, local)
            elif name is None and _argument(node, "name", 0) is not None and node.keywords:
                unnamed.append((kind, node))
        for key, value in _entries(node):
            if isinstance(value, ast.Call) and (kind := _type(value)):
                name = self._name(key, scope, local)
                if name is not None and name.startswith(self.prefix):
                    yield self._metric(name, kind, value, scope, local)

    def _name(self, node: ast.expr | None, scope: Scope, local: dict[str, ast.expr]) -> str | None:
        """A metric's name; None where it is no constant."""
        if node is None:
            return None
        if isinstance(node, ast.Name) and node.id in local and local[node.id] is not node:
            node = local[node.id]
        try:
            found = self.modules.value(node, scope)
        except UnknownValueError:
            return None
        return found if isinstance(found, str) and _NAME.fullmatch(found) else None

    def _names_in(self, nodes: list[ast.AST]) -> Iterator[str]:
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.startswith(self.prefix) and _NAME.fullmatch(text):
                yield text

    def _metric(self, name: str, kind: str, call: ast.Call, scope: Scope, local: dict[str, ast.expr]) -> SourceMetric:
        node = _argument(call, "labelnames", 2) or _argument(call, "extra_labelnames", 9)
        labels, is_open = self._labels(node, scope, local, 0)
        if last_name(call.func).endswith("Metadata"):  # an entry of a table: its labels come on top of the base
            labels = [*(self.base or ()), *labels]
        exposed = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
        return SourceMetric(exposed, kind, tuple(dict.fromkeys(labels)), is_open)

    def _labels(
        self, node: ast.expr | None, scope: Scope, local: dict[str, ast.expr], depth: int
    ) -> tuple[list[str], bool]:
        """Labels, and whether more come from outside."""
        if node is None:
            return [], False
        if depth > 10:
            return [], True
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                (first, open_first), (second, open_second) = (
                    self._labels(side, scope, local, depth + 1) for side in (left, right)
                )
                return first + second, open_first or open_second
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                parts = [self._label(element, scope, local, depth) for element in elements]
                return [label for labels, _ in parts for label in labels], any(is_open for _, is_open in parts)
            case ast.Name(id=name) if name in local and local[name] is not node:
                return self._labels(local[name], scope, {k: v for k, v in local.items() if k != name}, depth + 1)
            case ast.Attribute(attr=attr) if attr in self._attributes:
                return self._labels(self._attributes[attr], scope, local, depth + 1)
            case ast.Call(func=func, args=[argument]) if last_name(func) in ("list", "tuple"):
                return self._labels(argument, scope, local, depth + 1)
            case ast.Call(func=ast.Attribute(value=owner, attr="keys")):
                return self._labels(owner, scope, local, depth + 1)
            case ast.Dict(keys=keys):
                parts = [self._label(key, scope, local, depth) for key in keys if key is not None]
                return [label for labels, _ in parts for label in labels], None in keys or any(o for _, o in parts)
        if self.base is not None and _LABELS.search(last_name(node)):
            return list(self.base), False
        try:
            found = self.modules.value(node, scope)
        except UnknownValueError:
            return [], True
        return ([str(label) for label in found], False) if isinstance(found, list | tuple) else ([], True)

    def _label(self, node: ast.expr, scope: Scope, local: dict[str, ast.expr], depth: int) -> tuple[list[str], bool]:
        if isinstance(node, ast.Starred):
            return self._labels(node.value, scope, local, depth + 1)
        if isinstance(node, ast.Attribute) and node.attr in self._attributes:
            node = self._attributes[node.attr]
        if isinstance(node, ast.Name) and node.id in local:
            node = local[node.id]
        try:
            return [str(self.modules.value(node, scope))], False
        except UnknownValueError:
            return [], True


def _entries(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Keys and values of a table: `{NAME: …}` or `table[NAME] = …`."""
    if isinstance(node, ast.Dict):
        return [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return [(node.targets[0].slice, node.value)]
    return []


def _own_nodes(owner: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function, class or module, without what is inside its functions and classes; in order."""
    waiting = [*ast.iter_child_nodes(owner)][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += [*ast.iter_child_nodes(node)][::-1]


def _type(call: ast.Call) -> str | None:
    """The type a call makes, by its name: `Counter`, `self._gauge_cls`, `OffloadingHistogramMetadata`."""
    found = _MAKER.search(last_name(call.func))
    return None if found is None else (found[1] or found[2]).lower()


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if len(call.args) > position else None
