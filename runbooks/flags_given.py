"""Flags in force as they are told: a mapping, a launch command, or TensorRT-LLM's nested YAML, with typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import ConfigError, EngineConfig, flag_of
from runbooks.engine_names import TENSORRT_LLM
from runbooks.flags import EMBEDDED, FlagFacts, flag_facts
from runbooks.launch_line import LaunchLineError, read_flags


def flags_given(told: Any, engine: str, version: str | None) -> dict[str, Any]:
    """`{"--flag": value}`; empty for what is no configuration, or cannot be read as one."""
    if isinstance(told, Mapping):
        return _nested(told) if engine == TENSORRT_LLM else {_dashed(name): value for name, value in told.items()}
    if isinstance(told, str) or (isinstance(told, Sequence) and told):
        return _of_command(told, engine, version)
    return {}


def _dashed(name: str) -> str:
    return name if name.startswith("--") else flag_of(name)


def _nested(told: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """YAML's fields by their path, `kv_cache_config.dtype`; flags of the command stay flags."""
    found: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping):
            found.update(_nested(value, f"{above}{name}."))
        else:
            found[above + name] = value
    return found


def _of_command(told: str | Sequence[str], engine: str, version: str | None) -> dict[str, Any]:
    if engine == EMBEDDED:
        try:
            return EngineConfig.from_args(
                told.split() if isinstance(told, str) else [str(w) for w in told]
            ).flag_values()
        except ConfigError:
            return {}

    def lookup(flag: str) -> FlagFacts | None:
        return flag_facts(engine, version, flag)

    try:
        line = read_flags(told if isinstance(told, str) else [str(word) for word in told], lookup)
    except LaunchLineError:
        return {}
    return {one.flag: _typed(one.value, lookup(one.flag)) for one in line.given}


def _typed(value: Any, known: FlagFacts | None) -> Any:
    """Text of a command as the flag's kind has it; a list of words as one text."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    kind = known.kind if known is not None else None
    if kind in ("bool", "bool-value", "switch"):
        return value.lower() in ("true", "yes", "on", "1")
    if kind in ("str", "json", "list"):
        return value
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value
