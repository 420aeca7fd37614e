"""The arguments of `add_argument`, as far as source tells, and the form of a flag they make.

Two ways lead here: literal calls, and fields of configuration classes whose type decides (what vLLM's `get_kwargs`
and SGLang's `add_cli_args_from_dataclass` do at run time).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import Any

from probe.catalog.source import ClassSource, Modules, Scope, UnknownValueError, field_default, flat, last_name
from runbooks.catalog_data import Form

_SIMPLE = {"int", "float", "str", "bool", "None"}
_SEQUENCES = {"list", "List", "tuple", "Tuple", "set", "Set", "Sequence", "frozenset"}
_MAPPINGS = {"dict", "Dict", "Mapping", "OrderedDict"}
_WRAPPERS = {"Optional", "Union", "Annotated", "A", "SkipValidation"}
_DEPRECATED = re.compile(r"^\W*deprecated|^\W*\S+ is deprecated|\(deprecated:", re.IGNORECASE)
_INT_PARSERS = ("human_readable_int", "human_readable_int_or_auto", "int")


@dataclass(frozen=True)
class Default:
    """A default: its value, or the source it is computed from."""

    value: Any = None
    computed: str | None = None


@dataclass
class Arguments:
    """Keyword arguments of one `add_argument`. `kind` follows from the type, unless an action decides."""

    kind: str = "str"
    default: Default = field(default_factory=Default)
    choices: list[Any] | None = None
    deprecated: bool = False

    def form(self, aliases: tuple[str, ...]) -> Form:
        """The flag's form."""
        kind = "choice" if self.choices and self.kind in ("str", "value") else self.kind
        default = _plain(self.default.value)
        choices = tuple(choice for choice in self.choices or () if choice is not None) or None
        return Form(kind, default, choices, aliases, self.deprecated, self.default.computed)

    def copy(self) -> Arguments:
        """A copy whose choices can be changed."""
        return replace(self, choices=None if self.choices is None else list(self.choices))


def _plain(found: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(found, tuple | list):
        return [_plain(item) for item in found]
    if isinstance(found, dict):
        return {str(key): _plain(item) for key, item in found.items()}
    return found if isinstance(found, bool | int | float | str | None) else str(found)


def default_of(modules: Modules, node: ast.expr, scope: Scope) -> Default:
    """A default as written."""
    try:
        found = modules.value(node, scope)
    except UnknownValueError:
        return Default(computed=_source(node))
    if isinstance(found, ClassSource):
        return Default(computed=_source(node))
    return Default(found)


def _source(node: ast.expr) -> str:
    """What a default is computed from, short."""
    if isinstance(node, ast.Call) and last_name(node.func) in ("Field", "field"):
        try:
            node = field_default(node)
        except UnknownValueError:
            return ast.unparse(node)[:60]
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        return f"factory {ast.unparse(node.func)}"
    return ast.unparse(node)[:60]


@dataclass(frozen=True)
class Hint:
    """One alternative of a type: a simple name, literal, sequence, mapping, dataclass or other."""

    kind: str
    options: tuple[Any, ...] = ()


def hints(modules: Modules, node: ast.expr | None, path: str, depth: int = 0) -> list[Hint]:
    """The alternatives of an annotation, aliases resolved."""
    if node is None or depth > 20:
        return [Hint("other")]
    match node:
        case ast.Constant(value=None):
            return [Hint("None")]
        case ast.Constant(value=str(text)):
            try:
                return hints(modules, ast.parse(text, mode="eval").body, path, depth + 1)
            except SyntaxError:
                return [Hint("other")]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return hints(modules, left, path, depth + 1) + hints(modules, right, path, depth + 1)
        case ast.Subscript(value=base, slice=inner):
            return _subscript(modules, last_name(base), inner, path, depth)
        case ast.Name() | ast.Attribute():
            return _named(modules, last_name(node), path, depth)
    return [Hint("other")]


def _subscript(modules: Modules, base: str, inner: ast.expr, path: str, depth: int) -> list[Hint]:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if base == "Literal":
        try:
            return [Hint("literal", tuple(flat([modules.value(part, Scope(path, {})) for part in parts])))]
        except UnknownValueError:
            return [Hint("other")]
    if base in _WRAPPERS:
        taken = parts if base in ("Optional", "Union") else parts[:1]
        found = [hint for part in taken for hint in hints(modules, part, path, depth + 1)]
        return [*found, Hint("None")] if base == "Optional" else found
    if base in _SEQUENCES:
        within = (option for hint in hints(modules, parts[0], path, depth + 1) for option in hint.options)
        return [Hint("sequence", tuple(within))]
    return [Hint("mapping" if base in _MAPPINGS else "other")]


def _named(modules: Modules, name: str, path: str, depth: int) -> list[Hint]:
    if name in _SIMPLE:
        return [Hint(name)]
    if name in _SEQUENCES or name in _MAPPINGS:
        return [Hint("sequence" if name in _SEQUENCES else "mapping")]
    found = modules.definition(path, name)
    if found is None:
        return [Hint("other")]
    where, statement = found
    if isinstance(statement, ast.ClassDef):
        source = ClassSource(where, statement)
        if source.decorators() & {"dataclass", "config"}:
            return [Hint("dataclass")]
        bases = (base.value if isinstance(base, ast.Subscript) else base for base in statement.bases)
        return [Hint("mapping" if any(last_name(base) in _MAPPINGS for base in bases) else "other")]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return hints(modules, statement.value, where, depth + 1)
    return [Hint("other")]


def arguments_of_fields(modules: Modules, source: ClassSource) -> dict[str, Arguments]:
    """By the fields of a configuration class, those of its bases first."""
    found: dict[str, Arguments] = {}
    for one in reversed(list(modules.bases(source))):
        for statement in one.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            annotation = statement.annotation
            outer = last_name(annotation.value) if isinstance(annotation, ast.Subscript) else last_name(annotation)
            if outer not in ("ClassVar", "InitVar"):
                found[statement.target.id] = _of_field(modules, one.path, annotation, statement.value)
    return found


def _of_field(modules: Modules, path: str, annotation: ast.expr, value: ast.expr | None) -> Arguments:
    alternatives = hints(modules, annotation, path)
    default = Default() if value is None else default_of(modules, value, Scope(path, {}))
    if alternatives[0].kind == "str":  # any text counts, whatever else is listed
        alternatives = [hint for hint in alternatives if hint.kind != "literal"]
    literals = [option for hint in alternatives for option in hint.options]
    return Arguments(kind_of(alternatives), default, literals or None)


def kind_of(alternatives: list[Hint]) -> str:
    """The kind of a flag whose value has this type."""
    kinds = {hint.kind for hint in alternatives}
    if "dataclass" in kinds:
        return "json"
    if kinds == {"bool", "str", "None"}:
        return "bool-or-value"
    for kind, result in (("bool", "bool"), ("literal", "choice"), ("sequence", "list"), ("int", "int")):
        if kind in kinds:
            return result
    return "float" if "float" in kinds else "json" if "mapping" in kinds else "str"


def arguments_of_call(modules: Modules, node: ast.Call, scope: Scope, base: Arguments | None = None) -> Arguments:
    """By the keywords of a literal call, over those spread into it."""
    made = base.copy() if base is not None else Arguments()
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    apply_keywords(modules, made, keywords, scope)
    return made


def apply_keywords(modules: Modules, made: Arguments, keywords: dict[str, ast.expr], scope: Scope) -> None:
    """Lays keywords of a call over arguments."""
    action = _word(keywords.get("action"))
    if "type" in keywords and made.kind != "list":
        made.kind = _kind_of_parser(keywords["type"])
    if "nargs" in keywords:
        nargs = keywords["nargs"]
        many = isinstance(nargs, ast.Constant) and (nargs.value in ("+", "*") or isinstance(nargs.value, int))
        made.kind = "list" if many else made.kind
    if "choices" in keywords:
        try:
            made.choices = list(modules.value(keywords["choices"], scope))
        except (UnknownValueError, TypeError):
            made.choices = None
    if action:
        _apply_action(made, action)
    if "default" in keywords:
        made.default = default_of(modules, keywords["default"], scope)
    if "deprecated" in keywords or "Deprecated" in action or _says_deprecated(modules, keywords.get("help"), scope):
        made.deprecated = True


def _apply_action(made: Arguments, action: str) -> None:
    if action in ("BooleanOptionalAction", "EnableDisableAction"):
        made.kind = "bool"
    elif action in ("store_true", "store_false"):
        made.kind, made.default = "switch", Default(action == "store_false")
    elif action in ("append", "extend"):
        made.kind = "list"
    elif "Deprecated" in action and action.startswith(("DeprecatedStore", "DeprecatedAction")):
        made.kind = "value"


def _word(node: ast.expr | None) -> str:
    """`"store_true"` or `argparse.BooleanOptionalAction`, as one word."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "" if node is None else last_name(node)


def _kind_of_parser(node: ast.expr) -> str:
    name, text = last_name(node), ast.unparse(node)
    if name in _INT_PARSERS:
        return "int"
    if name in ("str", "float"):
        return name
    if "json" in text:
        return "json"
    inner = re.match(r"(?:nullable|optional_type|parse_type)\((int|float|str)\)", text)
    if inner:
        return inner[1]
    return {"nullable_str": "str", "union_dict_and_str": "json"}.get(name, "value")


def _says_deprecated(modules: Modules, node: ast.expr | None, scope: Scope) -> bool:
    if node is None:
        return False
    try:
        text = modules.value(node, scope)
    except UnknownValueError:
        text = ast.unparse(node).strip("f'\"")
    return isinstance(text, str) and _DEPRECATED.search(text) is not None
