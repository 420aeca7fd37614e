"""The version the engine reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _read_version() -> str:
    try:
        return version("kvoncall")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


VERSION = _read_version()
