"""Reads values out of Python source without running it: constants, names across modules, fields of classes.

Understands what engines write in their configuration: literals, sums of them, names imported from other modules of
the package, attributes of classes and enums, `Literal` aliases. Everything else is `Unknown`.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_SHALLOW = 40  # names that lead to names: more than this is a circle
_LARGEST = 10_000  # characters or items of a value


class UnknownValueError(Exception):
    """The value depends on something that only running the code would tell."""


@dataclass(frozen=True)
class Scope:
    """Where a piece of source stands: its module and the names bound around it."""

    path: str
    names: Mapping[str, Any]  # local names to values

    def with_names(self, names: Mapping[str, Any]) -> Scope:
        """The scope with more names bound."""
        return Scope(self.path, {**self.names, **names})


@dataclass(frozen=True, eq=False)
class ClassSource:
    """A class and the module it stands in."""

    path: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The class's name."""
        return self.node.name

    def decorators(self) -> set[str]:
        """Last parts of the decorators' names."""
        calls = (d.func if isinstance(d, ast.Call) else d for d in self.node.decorator_list)
        return {last_name(node) for node in calls}


def last_name(node: ast.AST) -> str:
    """`a.b.C` -> `C`; empty for what is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class Modules:
    """The modules of one package, parsed when asked for."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self._trees: dict[str, ast.Module] = {}
        self._tables: dict[str, dict[str, list[ast.stmt]]] = {}

    def tree(self, path: str) -> ast.Module:
        """The parsed module; an empty one where the source does not parse or is missing."""
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.files.get(path, ""))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._trees[path] = ast.Module([], [])
        return self._trees[path]

    def path_of(self, dotted: str) -> str | None:
        """`vllm.config` -> its file in the package."""
        base = dotted.replace(".", "/")
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.files), None)

    def definition(self, path: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        """Module and statement that binds a name, through imports; the last binding wins."""
        if depth > _SHALLOW:
            return None
        for statement in self._table(path).get(name, ()):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                found = self._imported(path, statement, name, depth)
                if found is not None:
                    return found
            else:
                return path, statement
        return None

    def find_class(self, path: str, name: str) -> ClassSource | None:
        """A class by the name it has in a module, also where that is bound to something made from it later."""
        here = [s for s in self._table(path).get(name, ()) if isinstance(s, ast.ClassDef)]
        if here:
            return ClassSource(path, here[0])
        found = self.definition(path, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            return ClassSource(found[0], found[1])
        return None

    def bases(self, source: ClassSource) -> Iterator[ClassSource]:
        """The class and its bases of this package, nearest first."""
        waiting, seen = [source], set()
        while waiting:
            one = waiting.pop(0)
            if id(one.node) in seen:
                continue
            seen.add(id(one.node))
            yield one
            found = (self.find_class(one.path, last_name(base)) for base in one.node.bases)
            waiting += [base for base in found if base is not None]

    def method(self, source: ClassSource, name: str) -> tuple[ClassSource, ast.FunctionDef] | None:
        """A method of a class or of the nearest base that has it."""
        for one in self.bases(source):
            for statement in one.node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    return one, statement
        return None

    def value(self, node: ast.AST, scope: Scope, depth: int = 0) -> Any:
        """What an expression is; raises `UnknownValueError`."""
        if depth > _SHALLOW:
            raise UnknownValueError("a circle of names")
        found = self._value(node, scope, depth + 1)
        if isinstance(found, str | list | tuple | set | dict) and len(found) > _LARGEST:
            raise UnknownValueError("too large")
        return found

    def _value(self, node: ast.AST, scope: Scope, depth: int) -> Any:
        of = functools.partial(self.value, scope=scope, depth=depth)
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.List() | ast.Tuple() | ast.Set():
                items = [item for element in node.elts for item in self._elements(element, of)]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Dict():
                return {of(key): of(item) for key, item in zip(node.keys, node.values, strict=True) if key is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply(operator.neg, of(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._apply(_OPERATORS[type(op)], of(left), of(right))
            case ast.JoinedStr(values=parts):
                return "".join(str(of(p.value if isinstance(p, ast.FormattedValue) else p)) for p in parts)
            case ast.Name(id=name):
                return self._named(name, scope, depth)
            case ast.Attribute():
                return self._attribute(node, scope, depth)
            case ast.Call():
                return self._call(node, scope, depth)
            case ast.Subscript(value=base, slice=key) if last_name(base) == "Literal":
                return flat([of(item) for item in (key.elts if isinstance(key, ast.Tuple) else [key])])
            case ast.ListComp(elt=element, generators=[ast.comprehension(target=ast.Name(id=name), iter=each, ifs=[])]):
                return [self.value(element, scope.with_names({name: item}), depth) for item in self._members(of(each))]
        raise UnknownValueError(ast.unparse(node))

    def _elements(self, node: ast.expr, of: Callable[[ast.AST], Any]) -> list[Any]:
        return list(of(node.value)) if isinstance(node, ast.Starred) else [of(node)]

    def _apply(self, function: Callable[..., Any], *values: Any) -> Any:
        if function is operator.mul and not all(isinstance(v, int | float) for v in values):
            raise UnknownValueError("a repetition")
        try:
            return function(*values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UnknownValueError(str(error)) from error

    def _named(self, name: str, scope: Scope, depth: int) -> Any:
        if name in scope.names:
            return scope.names[name]
        found = self.definition(scope.path, name)
        if found is None:
            raise UnknownValueError(name)
        path, statement = found
        if isinstance(statement, ast.ClassDef):
            return ClassSource(path, statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return self.value(statement.value, Scope(path, {}), depth)
        raise UnknownValueError(name)

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Any:
        owner = self.value(node.value, scope, depth)
        if node.attr in ("value", "name") and not isinstance(owner, ClassSource):
            return owner  # of an enum's member, which stands for its value here
        if isinstance(owner, ClassSource):
            for one in self.bases(owner):
                value = _class_attribute(one.node, node.attr)
                if value is not None:
                    return self.value(value, Scope(one.path, {}), depth)
        raise UnknownValueError(ast.unparse(node))

    def _call(self, node: ast.Call, scope: Scope, depth: int) -> Any:
        name = last_name(node.func)
        if name in ("list", "tuple", "sorted", "set", "get_args") and len(node.args) == 1 and not node.keywords:
            found = self._members(self.value(node.args[0], scope, depth))
            return sorted(found, key=str) if name == "sorted" else found
        if name in ("list", "set", "dict") and not node.args and not node.keywords:
            return {} if name == "dict" else []
        if name == "keys" and isinstance(node.func, ast.Attribute):
            return list(self._members(self.value(node.func.value, scope, depth)))
        if name in ("Field", "field"):
            return self.value(field_default(node), scope, depth)
        if name in ("int", "float", "str") and len(node.args) == 1:
            found = self.value(node.args[0], scope, depth)
            if isinstance(found, int | float | str):
                return self._apply({"int": int, "float": float, "str": str}[name], found)
        raise UnknownValueError(ast.unparse(node))

    def _members(self, found: Any) -> list[Any]:
        if isinstance(found, ClassSource):
            values = (s.value for s in found.node.body if isinstance(s, ast.Assign))
            return [self.value(value, Scope(found.path, {})) for value in values]
        if isinstance(found, list | tuple | dict | set):
            return list(found)
        raise UnknownValueError("not a collection")

    def _table(self, path: str) -> dict[str, list[ast.stmt]]:
        """Statements that bind each name at the top of a module, the last first, those for type checkers before."""
        if path not in self._tables:
            table: dict[str, list[ast.stmt]] = {}
            for statement in _top(self.tree(path).body):
                for name in _bound(statement):
                    table.setdefault(name, []).insert(0, statement)
            self._tables[path] = table
        return self._tables[path]

    def _imported(
        self, path: str, statement: ast.Import | ast.ImportFrom, name: str, depth: int
    ) -> tuple[str, ast.stmt] | None:
        if isinstance(statement, ast.Import):
            return None
        origin = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        dotted = statement.module or ""
        if statement.level:
            package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
            up = statement.level - (1 if path.endswith("/__init__.py") else 0)
            dotted = ".".join([*package[: len(package) - up], *([dotted] if dotted else [])])
        target = self.path_of(dotted)
        return None if target is None else self.definition(target, origin, depth + 1)


def flat(found: list[Any]) -> list[Any]:
    """Literals within a literal count as its own."""
    return [inner for item in found for inner in (flat(item) if isinstance(item, list) else [item])]


def field_default(node: ast.Call) -> ast.expr:
    """The default of a `Field(…)` or `field(…)`; raises `UnknownValueError` where it has none."""
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if "default" in keywords:
        return keywords["default"]
    if node.args and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is ...):
        return node.args[0]
    factory = keywords.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    if factory is not None:
        return ast.Call(factory, [], [])
    raise UnknownValueError("no default")


def _class_attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == name for target in statement.targets):
                return statement.value
        elif isinstance(statement, ast.AnnAssign) and last_name(statement.target) == name:
            return statement.value
    return None


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` included; under `if` the first branch comes last and wins."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _top(statement.orelse)
            yield from _top(statement.body)
        elif isinstance(statement, ast.Try):
            yield from _top([*(s for handler in statement.handlers for s in handler.body), *statement.body])
        else:
            yield statement


def _bound(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            return [alias.asname or alias.name for alias in names]
    return []
