"""What each engine calls a setting, and how a server is started with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from runbooks.flags import EMBEDDED, catalog, default_of, flag_facts, known_versions, why_absent
from runbooks.knowledge.text import data

ENGINES = ("vllm", "sglang", "tensorrt-llm", "tgi", EMBEDDED)
_YAML_FILE = "kvoncall.yaml"  # TensorRT-LLM reads what is no flag from a file
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "tgi": "TGI", EMBEDDED: "kvoncall"}


def engine_title(engine: str) -> str:
    """How the engine writes itself."""
    return _NAMES.get(engine, engine)


def newest(engine: str) -> str | None:
    """The newest version read; None for the embedded engine."""
    versions = known_versions(engine)
    return versions[-1] if versions else None


def flag_for_setting(engine: str, version: str | None, setting: str) -> tuple[str | None, str | None]:
    """(flag, None) where this version has one for the setting, else (None, why not); both None: the engine has none."""
    names = data("engine_flags")[setting].get(engine, [])
    problem = None
    for name in names:
        problem = why_absent(engine, version, name)
        if problem is None:
            return name, None
    return None, problem


def source_of(engine: str, version: str | None) -> str:
    """What the flag's existence and default were read from."""
    if engine == EMBEDDED:
        return "engine/flags.py of this project"
    return f"{engine_title(engine)} {version}: {catalog(engine).get('read', '')}"


def declared_default(engine: str, version: str | None, flag: str) -> Any:
    """The default that holds where hardware does not decide; None: unset, or decided at the start."""
    return default_of(engine, version, flag)


def launch_command(engine: str, version: str | None, model: str, flags: Mapping[str, Any]) -> str:
    """The command that starts a server with these flags, one flag a line; for TensorRT-LLM also its YAML file.

    `None` as a value leaves a flag out. Raises `LookupError` for an engine that is not known here.
    """
    in_file = {name: value for name, value in flags.items() if not name.startswith("--") and value is not None}
    words = [_written(engine, version, name, value) for name, value in flags.items() if name.startswith("--")]
    if in_file:
        words.append(f"--extra_llm_api_options {_YAML_FILE}")
    command = " \\\n  ".join([_start(engine, model), *(word for word in words if word)])
    return command if not in_file else f"cat > {_YAML_FILE} <<'EOF'\n{_nested(in_file)}EOF\n{command}"


def _start(engine: str, model: str) -> str:
    name = shlex.quote(model)
    starts = {
        "vllm": f"vllm serve {name}",
        "sglang": f"python -m sglang.launch_server --model-path {name}",
        "tensorrt-llm": f"trtllm-serve {name}",
        "tgi": f"text-generation-launcher --model-id {name}",
        EMBEDDED: f"kvoncall serve --model {name}",
    }
    if engine not in starts:
        raise LookupError(f"how {engine!r} is started is not known here; known are {', '.join(ENGINES)}")
    return starts[engine]


def _written(engine: str, version: str | None, flag: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        facts = flag_facts(engine, version, flag)
        if facts is not None and facts.kind == "bool-value":
            return f"{flag} {str(value).lower()}"
        return flag if value else flag.replace("--", "--no-", 1)
    if isinstance(value, dict):
        return f"{flag} {shlex.quote(json.dumps(value))}"
    return f"{flag} {shlex.quote(str(value))}"


def _nested(settings: Mapping[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        group, dot, field = name.partition(".")
        if dot:
            tree.setdefault(group, {})[field] = value
        else:
            tree[name] = value
    return str(yaml.safe_dump(tree, sort_keys=False))
