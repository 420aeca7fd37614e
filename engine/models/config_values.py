"""Values of a `config.json`, checked: each function raises `ModelLoadError` naming the key that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelLoadError


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; without a default the key must be there."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(key, "a positive integer", value)
    return value


def non_negative_int(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A whole number, 0 included."""
    return 0 if config.get(key, default) == 0 else positive_int(config, key, default)


def positive_float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; without a default the key must be there."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise _wrong(key, "a positive number", value)
    return float(value)


def optional_float(config: Mapping[str, Any], key: str) -> float | None:
    """A number above 0, or None where the key is null or missing."""
    return None if config.get(key) is None else positive_float(config, key)


def _wrong(key: str, kind: str, value: object) -> ModelLoadError:
    return ModelLoadError(f"config.json: {key} must be {kind}, found {value!r}")
