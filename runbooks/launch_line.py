"""A server's configuration as operators write it: a command line, a YAML file of flags, or a mapping.

Flags are brought to one spelling: `--tensor-parallel-size` for `-tp` and `--tensor_parallel_size`, `False` for
`--no-enable-prefix-caching`. What was written is kept beside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from runbooks.flag_facts import FlagFacts

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
}
TRUTH = ("true", "false", "yes", "no", "on", "off", "0", "1")
_ENV = re.compile(r"((?:VLLM|SGLANG|LMCACHE|TLLM|TRTLLM|PYTHON)[A-Z0-9_]*)=(.*)", re.DOTALL)
# What is known of a flag under the spelling it was written in; None: nothing.
Lookup = Callable[[str], FlagFacts | None]


class LaunchLineError(ValueError):
    """A configuration that cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Given:
    """One flag as it was written. `value`: text, True for a bare flag, False for its `--no-` form, or a mapping's own
    value. `glued`: written as `--flag=value`."""

    flag: str
    value: Any
    written: str
    negated: bool = False
    glued: bool = False


@dataclass(frozen=True)
class LaunchLine:
    """All flags in order, the environment set in front of them, and the words before the first flag."""

    given: tuple[Given, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    from_yaml: bool = False


def read_flags(flags: Mapping[str, Any] | str | Sequence[str], lookup: Lookup) -> LaunchLine:
    """The configuration in `flags`; raises `LaunchLineError`."""
    if isinstance(flags, Mapping):
        return LaunchLine(_of_mapping(flags, lookup))
    if isinstance(flags, str):
        try:
            words = shlex.split(flags.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise LaunchLineError(f"the flags cannot be read as a command line: {str(error).lower()}") from None
    else:
        words = list(flags)
    return _of_words(words, lookup)


def read_yaml(text: str, lookup: Lookup) -> LaunchLine:
    """The flags of a YAML configuration file, as `--config` takes it; raises `LaunchLineError`."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        raise LaunchLineError("the configuration file is not YAML") from None
    if not isinstance(found, dict):
        raise LaunchLineError("the configuration file holds no mapping of flags to values")
    return LaunchLine(_of_mapping({str(key): value for key, value in found.items()}, lookup), from_yaml=True)


def dashed(name: str) -> str:
    """`tensor_parallel_size`, `--tensor_parallel_size` and `-tp` as `--tensor-parallel-size`."""
    if name in SHORT:
        return SHORT[name]
    return "--" + name.lstrip("-").replace("_", "-")


def _of_mapping(flags: Mapping[str, Any], lookup: Lookup, above: str = "") -> tuple[Given, ...]:
    """A mapping's entries; one that is None is unset. A mapping below one is taken apart where its fields are flags."""
    given: list[Given] = []
    for name, value in flags.items():
        key = above + name
        if isinstance(value, Mapping) and any(lookup(f"{key}.{field}") for field in value):
            given += _of_mapping(value, lookup, f"{key}.")
        elif value is not None:
            written = f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            flag, negated = _canonical(key, lookup)
            told = not value if negated and isinstance(value, bool) else value
            given.append(Given(flag, told, written, negated and value is not False))
    return tuple(given)


def _canonical(name: str, lookup: Lookup) -> tuple[str, bool]:
    """A flag's own name, and whether it was written in the form that switches it off."""
    for flag in (name, dashed(name)):
        facts = lookup(flag)
        bare = dashed(flag.replace("--no-", "--", 1))
        if facts is None and bare != dashed(flag) and lookup(bare) is not None:
            return bare, True
        if facts is None:
            continue
        if facts.name == flag or facts.kind not in ("bool", "switch", "bool-value"):
            return facts.name, False
        bare = dashed(flag).removeprefix("--no-").removeprefix("--disable-").removeprefix("--")
        return facts.name, dashed(flag) != f"--{bare}" and facts.name in (f"--{bare}", f"--enable-{bare}")
    return dashed(name), False


def _of_words(words: list[str], lookup: Lookup) -> LaunchLine:
    env: dict[str, str] = {}
    given: list[Given] = []
    program: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if found := _ENV.fullmatch(word):
            env[found[1]] = found[2]
        elif word == "-m" and not given:
            program += [word, *words[place : place + 1]]
            place += 1
        elif word.startswith("--") or word.partition("=")[0] in SHORT:
            one, used = _flag(word, words[place:], lookup)
            given.append(one)
            place += used
        elif not given and not word.startswith("-"):
            program.append(word)
    return LaunchLine(tuple(given), env, tuple(program))


def _flag(word: str, rest: list[str], lookup: Lookup) -> tuple[Given, int]:
    """The flag that begins here, and how many of the words behind it are its value."""
    name, glue, glued = word.partition("=")
    if "." in name and lookup(name) is not None:  # one field of a flag that takes JSON
        return Given(_canonical(name.split(".", 1)[0], lookup)[0], None, word), 0 if glue else min(1, len(rest))
    flag, negated = _canonical(name, lookup)
    facts = lookup(flag)
    if glue:
        return Given(flag, glued, word, negated, glued=True), 0
    values = _values(rest, None if facts is None else facts.kind)
    if not values:
        return Given(flag, not negated, word, negated), 0
    value = values[0] if len(values) == 1 else tuple(values)
    return Given(flag, value, " ".join((word, *values)), negated), len(values)


def _values(rest: Sequence[str], kind: str | None) -> list[str]:
    free: list[str] = []
    for word in rest:
        if (
            word.startswith("--")
            or word.partition("=")[0] in SHORT
            or (word.startswith("-") and not word[1:2].isdigit())
        ):
            break
        free.append(word)
    if kind in ("bool", "switch"):  # takes none: what looks like one is a mistake, anything else a positional word
        return free[:1] if free and free[0].lower() in TRUTH else []
    return free if kind == "list" else free[:1]
