"""Edits a launch command: flags set, changed and taken out, everything else left as it was written.

A flag is found under every spelling its engine takes: another name, underscores, a short form, `--flag=value`, the
`--no-` form of a bool. Words keep their places; a flag that is new comes last.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from runbooks.flags import EMBEDDED, flag_facts
from runbooks.launch_line import SHORT

_PROGRAMS = {
    "vllm": "vllm serve MODEL",
    "sglang": "python -m sglang.launch_server --model-path MODEL",
    "tensorrt-llm": "trtllm-serve MODEL",
    "tgi": "text-generation-launcher --model-id MODEL",
    EMBEDDED: "kvoncall serve",
}


class CommandError(ValueError):
    """A launch command that cannot be read; the message is one sentence."""


def split_command(command: str) -> list[str]:
    """The words of a command as a shell would read it, continued lines included; raises `CommandError`."""
    try:
        return shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise CommandError(f"the launch command cannot be read: {str(error).lower()}") from None


def command_of(engine: str, version: str | None, flags: Mapping[str, Any]) -> list[str]:
    """A command that sets the flags, where none was given; MODEL stands for the model."""
    words = split_command(_PROGRAMS.get(engine, f"{engine} MODEL"))
    for flag, value in flags.items():
        if value is not None and flag.startswith("--"):
            words += words_for(engine, version, flag, value)
    return words


def words_for(engine: str, version: str | None, flag: str, value: Any) -> list[str]:
    """The words that set one flag in that version."""
    known = None if engine == EMBEDDED else flag_facts(engine, version, flag)
    kind = known.kind if known is not None else None
    if isinstance(value, bool):
        if kind == "bool-value":
            return [flag, str(value).lower()]
        return [flag] if value else [] if kind == "switch" else [f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, str) and (kind == "list" or flag == "--kv-cache-dtype-skip-layers"):
        return [flag, *value.split()]
    return [flag, str(value)]


def edited(words: Sequence[str], changes: Mapping[str, Any], engine: str, version: str | None) -> list[str]:
    """The command with each flag set to its new value; None takes it out."""
    out = list(words)
    for flag, value in changes.items():
        if not flag.startswith("--"):
            continue
        out = _set(out, flag, value, engine, version)
    return out


def _set(words: list[str], flag: str, value: Any, engine: str, version: str | None) -> list[str]:
    spellings = _spellings(flag, engine, version)
    new = [] if value is None else words_for(engine, version, flag, value)
    out: list[str] = []
    placed = value is None
    place = 0
    while place < len(words):
        word = words[place]
        if _dashed(word.partition("=")[0]) not in spellings:
            out.append(word)
            place += 1
            continue
        place += _length(words, place, flag, engine, version)
        if not placed:
            out += new
            placed = True
    return out if placed else out + new


def _dashed(name: str) -> str:
    if name in SHORT:
        return SHORT[name]
    return f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name


def _spellings(flag: str, engine: str, version: str | None) -> set[str]:
    known = None if engine == EMBEDDED else flag_facts(engine, version, flag)
    names = {flag, *(known.aliases if known is not None else ())}
    found = {_dashed(name) for name in names}
    found |= {f"--no-{name.removeprefix('--')}" for name in found}
    return found | {name.replace("--enable-", "--disable-", 1) for name in found if name.startswith("--enable-")}


def _length(words: Sequence[str], place: int, flag: str, engine: str, version: str | None) -> int:
    """How many words the flag at this place takes, itself included."""
    if "=" in words[place]:
        return 1
    known = None if engine == EMBEDDED else flag_facts(engine, version, flag)
    kind = known.kind if known is not None else _embedded_kind(flag)
    if kind in ("bool", "switch") or words[place].startswith("--no-"):
        return 1
    free = 0
    for word in words[place + 1 :]:
        if word.startswith("--") or word in SHORT:
            break
        free += 1
    return 1 + (free if kind == "list" else min(1, free))


def _embedded_kind(flag: str) -> str | None:
    """The kind of a flag of the embedded engine: what its default is."""
    from engine.config import EngineConfig, flag_of

    default = {flag_of(name): value for name, value in vars(EngineConfig()).items()}.get(flag)
    if isinstance(default, bool):
        return "bool"
    return "list" if isinstance(default, tuple) else None


def joined(words: Sequence[str]) -> str:
    """The command in one line, quoted for a shell."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Quoted for a shell; what sets a variable in front of a command keeps its name outside the quotes."""
    if found := re.fullmatch(r"([A-Z_][A-Z0-9_]*=)(.*)", word, re.DOTALL):
        return found[1] + (shlex.quote(found[2]) if found[2] else "")
    return shlex.quote(word)


def lines_of(words: Sequence[str]) -> list[str]:
    """The command with one flag a line, each but the last continued, quoted for a shell."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") or word in SHORT:
            lines.append([])
        lines[-1].append(_quoted(word))
    texts = [" ".join(line) for line in lines if line]
    return [("" if i == 0 else "  ") + text + (" \\" if i < len(texts) - 1 else "") for i, text in enumerate(texts)]
