"""Facts of the embedded engine's flags: from its parser, and what holds for vLLM's flag of the same name."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from engine.config import EngineConfig, build_parser, flag_of
from runbooks.catalog_data import notes

EMBEDDED = "kvoncall"
THIS = "this version"  # the engine is a part of this package


@functools.cache
def embedded_actions() -> tuple[argparse.Action, ...]:
    """The actions of the embedded engine's parser, which takes milliseconds to build."""
    return tuple(build_parser()._actions)


@functools.cache
def embedded_flags() -> frozenset[str]:
    """Every flag the embedded engine's parser takes, its `--no-` forms included."""
    return frozenset(s for action in embedded_actions() for s in action.option_strings if s.startswith("--"))


@functools.cache
def embedded_defaults() -> dict[str, Any]:
    """Defaults by flag."""
    return {flag_of(f.name): f.default for f in fields(EngineConfig)}


def embedded_facts() -> Iterator[dict[str, Any]]:
    """The fields of `FlagFacts` for every flag, in the parser's order."""
    for action in embedded_actions():
        names = [s for s in action.option_strings if s.startswith("--") and not s.startswith("--no-")]
        if not names or isinstance(action, argparse._HelpAction):
            continue
        note = notes("vllm")["flags"].get(names[0], {})
        yield {
            "name": names[0],
            "kind": _kind(action),
            "default": embedded_defaults().get(names[0]),
            "choices": None if action.choices is None else tuple(action.choices),
            "since": THIS,
            "until": None,
            "restart": True,
            "meaning": action.help or note.get("meaning", ""),
            "raising": note.get("raising", ""),
            "deprecated": False,
            "replaced_by": None,
            "kv": note.get("kv", False) or "(ours)" in (action.help or ""),
            "aliases": tuple(names[1:]),
        }


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs == 0:
        return "switch"
    if action.nargs in ("*", "+"):
        return "list"
    if action.choices is not None:
        return "choice"
    if action.type is float:
        return "float"
    return "int" if action.type is int or action.metavar == "SIZE" else "str"
