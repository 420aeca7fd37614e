"""Flags of SGLang's server, read from its source.

Three ways by version: literal `add_argument` calls in `ServerArgs.add_cli_args`; fields of `ServerArgs` annotated
`A[type, Arg(…)]`; and such fields in the classes of `arg_groups/fields`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from probe.catalog.arguments import Arguments, Default, apply_keywords, arguments_of_call, default_of, hints, kind_of
from probe.catalog.source import ClassSource, Modules, Scope, last_name
from runbooks.catalog_data import CatalogError, Form

_SERVER_ARGS = "sglang/srt/server_args.py"
_FIELDS = "sglang/srt/arg_groups/fields/"


def sglang_flags(modules: Modules) -> dict[str, Form]:
    """All flags by name; raises `CatalogError` where the source registers none."""
    flags: dict[str, Form] = {}
    for source in _records(modules):
        for statement in source.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                flags |= _of_field(modules, source.path, statement.target.id, statement)
    server_args = modules.find_class(_SERVER_ARGS, "ServerArgs")
    found = modules.method(server_args, "add_cli_args") if server_args is not None else None
    if found is not None and server_args is not None:
        scope = Scope(found[0].path, {"ServerArgs": server_args})
        flags |= dict(_of_calls(modules, found[1], scope))
    if not flags:
        raise CatalogError("No flags of SGLang were found in its source: the release is built in a way not known here.")
    return flags


def _records(modules: Modules) -> Iterator[ClassSource]:
    """`ServerArgs`, and the classes of `arg_groups/fields`."""
    server_args = modules.find_class(_SERVER_ARGS, "ServerArgs")
    if server_args is not None:
        yield server_args
    for path in sorted(modules.files):
        if path.startswith(_FIELDS):
            yield from (ClassSource(path, s) for s in modules.tree(path).body if isinstance(s, ast.ClassDef))


def _of_field(modules: Modules, path: str, name: str, statement: ast.AnnAssign) -> dict[str, Form]:
    """The flag of one field, if its annotation says that it is one."""
    annotation = statement.annotation
    if not isinstance(annotation, ast.Subscript) or last_name(annotation.value) not in ("A", "Annotated"):
        return {}
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    meta = next((part for part in parts[1:] if _is_meta(part)), None)
    if meta is None:
        return {}
    scope = Scope(path, {})
    keywords = {k.arg: k.value for k in meta.keywords if k.arg} if isinstance(meta, ast.Call) else {}
    if _says(modules, keywords.get("no_cli"), scope):
        return {}
    flag = str(_says(modules, keywords.get("cli_name"), scope) or f"--{name.replace('_', '-')}")
    aliases = _says(modules, keywords.get("aliases"), scope)
    made = _typed(modules, path, parts[0])
    made.default = Default() if statement.value is None else default_of(modules, statement.value, scope)
    if "type_parser" in keywords:
        keywords["type"] = keywords.pop("type_parser")
        made.kind = "str"
    apply_keywords(modules, made, {k: v for k, v in keywords.items() if k not in ("default", "fallback")}, scope)
    return {flag: made.form(tuple(aliases) if isinstance(aliases, list) else ())}


def _is_meta(node: ast.expr) -> bool:
    """Whether a part of an annotation makes the field a flag: a help text or an `Arg(…)`."""
    if isinstance(node, ast.Call):
        return last_name(node.func) == "Arg"
    return isinstance(node, ast.JoinedStr | ast.BinOp) or (isinstance(node, ast.Constant) and type(node.value) is str)


def _typed(modules: Modules, path: str, annotation: ast.expr) -> Arguments:
    """Kind and choices by the field's type; a bool is a switch here."""
    alternatives = hints(modules, annotation, path)
    literals = [option for hint in alternatives for option in hint.options]
    kind = kind_of([hint for hint in alternatives if hint.kind != "None"])
    only_bool = {hint.kind for hint in alternatives} <= {"bool", "None"}
    return Arguments("switch" if only_bool else "str" if kind == "json" else kind, choices=literals or None)


def _says(modules: Modules, node: ast.expr | None, scope: Scope) -> object:
    if node is None:
        return None
    found = default_of(modules, node, scope)
    return found.value if found.computed is None else None


def _of_calls(modules: Modules, function: ast.FunctionDef, scope: Scope) -> Iterator[tuple[str, Form]]:
    """Literal `add_argument` calls anywhere in the function."""
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found = default_of(modules, statement.value, scope)
            if found.computed is None:
                scope = scope.with_names({statement.targets[0].id: found.value})
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or last_name(call.func) != "add_argument":
            continue
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        flags = [name for name in names if name.startswith("--")]
        if flags:
            made = arguments_of_call(modules, call, scope)
            yield flags[0], made.form(tuple(name for name in names if name != flags[0]))
