"""Flags of `vllm serve`, read from the functions that register them.

Follows `make_arg_parser` through every `add_cli_args` it calls: literal `add_argument` calls, and those that spread
`get_kwargs(SomeConfig)["field"]`, which come from the fields of configuration classes. What the functions do to these
before they register them (another type, other choices) is followed as well.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from probe.catalog.arguments import Arguments, apply_keywords, arguments_of_call, arguments_of_fields
from probe.catalog.source import ClassSource, Modules, Scope, UnknownValueError, last_name
from runbooks.catalog_data import CatalogError, Form

_ENGINE_ARGS = "vllm/engine/arg_utils.py"
Table = dict[str, Arguments]


@dataclass
class _Frame:
    """One function being followed: its module, its class, and what its variables hold."""

    scope: Scope
    owner: ClassSource | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    single: dict[str, Arguments] = field(default_factory=dict)


def vllm_flags(modules: Modules) -> dict[str, Form]:
    """All flags by name; raises `CatalogError` where no function registers any."""
    reader = _Reader(modules)
    for path, text in modules.files.items():
        if not path.startswith("vllm/entrypoints/"):
            continue
        if path.endswith("/cli_args.py") and "def make_arg_parser(" in text:
            entry = modules.definition(path, "make_arg_parser")
            if entry is not None and isinstance(entry[1], ast.FunctionDef):
                reader.follow(entry[1], _Frame(Scope(entry[0], {})))
        elif path.startswith("vllm/entrypoints/cli/serve") and "add_argument" in text:  # its own flags
            reader.follow_class(path, "ServeSubcommand", "subparser_init")
    if "--max-model-len" not in reader.flags:
        reader.follow_class(_ENGINE_ARGS, "AsyncEngineArgs", "add_cli_args")
    if not reader.flags:
        raise CatalogError("No flags of vLLM were found in its source: the release is built in a way not known here.")
    return reader.flags


class _Reader:
    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.flags: dict[str, Form] = {}
        self._followed: set[int] = set()

    def follow_class(self, path: str, name: str, method: str) -> None:
        """Follows a method of a class, if there is one."""
        source = self.modules.find_class(path, name)
        found = self.modules.method(source, method) if source is not None else None
        if source is not None and found is not None:
            self.follow(found[1], _Frame(Scope(found[0].path, {}), source))

    def follow(self, function: ast.FunctionDef, frame: _Frame) -> None:
        """Reads a function once for each class it is called on."""
        mark = hash((id(function), None if frame.owner is None else id(frame.owner.node)))
        if mark not in self._followed:
            self._followed.add(mark)
            for statement in function.body:
                self._statement(statement, frame)

    def _statement(self, statement: ast.stmt, frame: _Frame) -> None:
        match statement:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value, frame)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value, frame)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, frame)
            case ast.Return(value=ast.Call() as call):
                self._call(call, frame)
            case ast.For() if self._is_over_table(statement, frame):
                self._register_all(statement, frame)
            case ast.If() | ast.For() | ast.With() | ast.Try():
                for inner in [*statement.body, *getattr(statement, "orelse", [])]:
                    self._statement(inner, frame)

    def _assign(self, target: ast.expr, value: ast.expr, frame: _Frame) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value, frame)
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            arguments = self._arguments(target.value, frame)
            if arguments is not None:
                apply_keywords(self.modules, arguments, {str(target.slice.value): value}, frame.scope)

    def _bind(self, name: str, value: ast.expr, frame: _Frame) -> None:
        if isinstance(value, ast.Call):
            called = last_name(value.func)
            if called == "get_kwargs" and value.args:
                frame.tables[name] = self._table(value.args[0], frame)
                return
            if called == "_customize_cli_kwargs" and frame.owner is not None and name in frame.tables:
                self._customize(frame.tables[name], frame.owner)
                return
            self._call(value, frame)
        arguments = self._arguments(value, frame)
        if arguments is not None:
            frame.single[name] = arguments
            return
        try:
            frame.scope = frame.scope.with_names({name: self.modules.value(value, frame.scope)})
        except UnknownValueError:
            return

    def _table(self, node: ast.expr, frame: _Frame) -> Table:
        """What `get_kwargs(Class)` gives."""
        name = last_name(node)
        source = frame.owner if name in ("cls", "self") else self.modules.find_class(frame.scope.path, name)
        return {} if source is None else arguments_of_fields(self.modules, source)

    def _customize(self, table: Table, owner: ClassSource) -> None:
        """What the class and its bases change in the table, bases first."""
        for one in reversed(list(self.modules.bases(owner))):
            for function in one.node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "_customize_cli_kwargs":
                    frame = _Frame(Scope(one.path, {}), tables={"frontend_kwargs": table})
                    for statement in function.body:
                        self._statement(statement, frame)

    def _arguments(self, node: ast.expr, frame: _Frame) -> Arguments | None:
        """The arguments an expression stands for: a variable, `table["field"]`, or a dict of them."""
        match node:
            case ast.Name(id=name):
                return frame.single.get(name)
            case ast.Subscript(value=ast.Name(id=table), slice=ast.Constant(value=key)) if table in frame.tables:
                return frame.tables[table].get(str(key))
            case ast.Subscript(value=ast.Call(args=[of]) as call, slice=ast.Constant(value=key)):
                return self._table(of, frame).get(str(key)) if last_name(call.func) == "get_kwargs" else None
            case ast.Dict():
                return self._of_dict(node, frame)
        return None

    def _of_dict(self, node: ast.Dict, frame: _Frame) -> Arguments | None:
        spread = [item for key, item in zip(node.keys, node.values, strict=True) if key is None]
        base = next((a for a in (self._arguments(item, frame) for item in spread) if a is not None), None)
        if base is None:
            return None
        made = base.copy()
        pairs = zip(node.keys, node.values, strict=True)
        keywords = {str(key.value): item for key, item in pairs if isinstance(key, ast.Constant)}
        apply_keywords(self.modules, made, keywords, frame.scope)
        return made

    def _call(self, call: ast.Call, frame: _Frame) -> None:
        name = last_name(call.func)
        if name == "add_argument":
            self._register(call, frame)
        elif isinstance(call.func, ast.Attribute) and name in ("add_cli_args", "_add_cli_args"):
            self._call_class(call.func, name, frame)
        elif isinstance(call.func, ast.Attribute) and name in ("remove", "append", "extend"):
            self._change_choices(call, call.func, frame)
        elif isinstance(call.func, ast.Name):
            found = self.modules.definition(frame.scope.path, name)
            if found is not None and isinstance(found[1], ast.FunctionDef) and "parser" in name:
                self.follow(found[1], _Frame(Scope(found[0], {})))

    def _call_class(self, function: ast.Attribute, method: str, frame: _Frame) -> None:
        """`SomeArgs.add_cli_args(parser)`, also of `cls` and `super()`."""
        owner = last_name(function.value)
        if owner in ("cls", "self"):
            source = frame.owner
        elif isinstance(function.value, ast.Call) and frame.owner is not None:  # super()
            source = next(iter(list(self.modules.bases(frame.owner))[1:]), None)
        else:
            source = self.modules.find_class(frame.scope.path, owner)
        found = self.modules.method(source, method) if source is not None else None
        if source is not None and found is not None:
            self.follow(found[1], _Frame(Scope(found[0].path, {}), source))

    def _change_choices(self, call: ast.Call, function: ast.Attribute, frame: _Frame) -> None:
        target = function.value
        if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and call.args):
            return
        arguments = self._arguments(target.value, frame) if target.slice.value == "choices" else None
        if arguments is None or arguments.choices is None:
            return
        try:
            found = self.modules.value(call.args[0], frame.scope)
        except UnknownValueError:
            return
        if function.attr == "remove":
            arguments.choices = [choice for choice in arguments.choices if choice != found]
        else:
            arguments.choices += [found] if function.attr == "append" else list(found)

    def _register(self, call: ast.Call, frame: _Frame) -> None:
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        flags = [name for name in names if name.startswith("--")]
        if not flags:
            return
        spread = [self._arguments(k.value, frame) for k in call.keywords if k.arg is None]
        base = next((arguments for arguments in spread if arguments is not None), None)
        made = arguments_of_call(self.modules, call, frame.scope, base)
        name = flags[0]
        self.flags[name] = made.form(tuple(other for other in names if other != name))

    def _is_over_table(self, statement: ast.For, frame: _Frame) -> bool:
        call = statement.iter
        return (
            isinstance(call, ast.Call)
            and last_name(call.func) == "items"
            and isinstance(call.func, ast.Attribute)
            and last_name(call.func.value) in frame.tables
        )

    def _register_all(self, statement: ast.For, frame: _Frame) -> None:
        """`for key, value in table.items(): group.add_argument(f"--{key}", **value)`."""
        assert isinstance(statement.iter, ast.Call)
        assert isinstance(statement.iter.func, ast.Attribute)
        for key, arguments in frame.tables[last_name(statement.iter.func.value)].items():
            self.flags[f"--{key.replace('_', '-')}"] = arguments.form(())
