"""Lint of a server's flags for its engine, version and hardware: what is wrong before anything runs.

`lint_flags` is the door; the rules are in `runbooks.lint.rules_*`. Existence and choices come from the catalog,
formats from `runbooks.hardware`, host tiers from `engine.memory.offload`. Nothing is guessed: a rule that lacks a
fact says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runbooks.flags import FlagFacts
from runbooks.launch_line import LaunchLine, LaunchLineError, read_flags
from runbooks.launch_line import read_yaml as _read_yaml
from runbooks.lint import combinations, isolation, memory
from runbooks.lint import flags as flags_rules
from runbooks.lint.lookup import facts_ever
from runbooks.lint.memory import Instance, lint_shared_gpu
from runbooks.lint.rules import RANK, LintFinding, Rule, Subject

__all__ = [
    "Instance", "LaunchLine", "LaunchLineError", "LintFinding", "Subject", "lint", "lint_flags", "lint_shared_gpu",
    "read_line", "read_yaml",
]  # fmt: skip

RULES: tuple[Rule, ...] = (
    flags_rules.unread_version,
    flags_rules.existence,
    flags_rules.without_effect,
    flags_rules.values,
    flags_rules.twice,
    flags_rules.same_as_default,
    combinations.step_budget,
    combinations.pool_size,
    combinations.context,
    combinations.kv_dtype,
    combinations.transfer_config,
    combinations.server,
    isolation.salt,
    isolation.hashes,
    memory.reserve,
    memory.takes_the_rest,
    memory.host_tier,
    memory.beside_others,
)


def lint_flags(
    engine: str, version: str | None, flags: Mapping[str, Any] | str | Sequence[str] | LaunchLine, **known: Any
) -> list[LintFinding]:
    """Findings about flags, the gravest first.

    flags: a command line (with the variables in front of it, where they are part of it), its words, a mapping of flags
    to values (None: unset), or what `read_yaml` read. known: fields of `Subject` (gpu, checkpoint_quantization,
    attention_backend, block_size, max_model_len, kv_tokens, multi_tenant, python, host_memory_bytes, …). Raises
    `LaunchLineError` for a command line that cannot be read.
    """
    line = flags if isinstance(flags, LaunchLine) else read_line(engine, version, flags)
    return lint(Subject(engine, version, line.given, line.env, line.program, line.from_yaml, **known))


def read_line(engine: str, version: str | None, flags: Mapping[str, Any] | str | Sequence[str]) -> LaunchLine:
    """The flags as written. Which of them take a value is told by the engine's version, or the last that had them."""
    return read_flags(flags, _lookup(engine, version))


def read_yaml(engine: str, version: str | None, text: str) -> LaunchLine:
    """The flags of a configuration file as `--config` takes it; raises `LaunchLineError`."""
    return _read_yaml(text, _lookup(engine, version))


def _lookup(engine: str, version: str | None) -> Callable[[str], FlagFacts | None]:
    return lambda flag: facts_ever(engine, version, flag)


def lint(subject: Subject) -> list[LintFinding]:
    """Findings about a subject, the gravest first."""
    found = [finding for rule in RULES for finding in rule(subject)]
    return sorted(dict.fromkeys(found), key=lambda finding: RANK[finding.severity])
