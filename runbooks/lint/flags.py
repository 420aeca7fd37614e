"""Lint of single flags against a version: does it exist, does it still do anything, does it take this value?

What exists is the catalog's matter. What it cannot know is here: flags that a version takes without doing anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from runbooks.flags import known_versions, never_existed, version_key, why_absent, why_value_absent
from runbooks.launch_line import Given
from runbooks.lint.lookup import facts_ever, facts_of, has_flags, names, version_of
from runbooks.lint.rules import LintFinding, Subject, as_number
from runbooks.ranges import why_out_of_range

RUNBOOK = "flag-not-in-version"
_PARSER = "vllm/engine/arg_utils.py of 0.6.6 to 0.33.0"
_SPEAKS_FOR_ITSELF = ("--help", "--version", "--config", "--model")
_BOOL_KINDS = ("bool", "switch")
_NUMBER_KINDS = ("int", "float")


@dataclass(frozen=True)
class Idle:
    """A flag that versions take (`since` to `until`, inclusive) and that does nothing there."""

    since: str
    until: str
    why: str
    instead: str


IDLE: dict[str, Idle] = {
    "--swap-space": Idle(
        "0.8.0",
        "0.17.1",
        "only the V0 engine swapped; V1 recomputes what it preempts",
        "leave it out; a host tier for the KV cache is --kv-offloading-size (0.11.1 and later)",
    ),
    "--use-v2-block-manager": Idle("0.6.4", "0.9.2", "that block manager is the only one there is", "leave it out"),
    "--num-lookahead-slots": Idle("0.11.0", "0.11.2", "it belonged to the V0 scheduler, which is gone", "leave it out"),
}

# Choosing these keeps a server on the older engine, or does nothing on the newer one.
_V0_ONLY = {
    "--preemption-mode": "V1 has one way to preempt, recomputation",
    "--num-scheduler-steps": "V1 has no multi-step scheduling",
    "--scheduler-delay-factor": "V1 admits without delay",
}


def unread_version(subject: Subject) -> Iterator[LintFinding]:
    """A version whose flags were not read."""
    if not has_flags(subject.engine):
        if subject.given:
            message = f"flags of {subject.engine} were not read: whether they exist is not known"
            yield LintFinding("no-catalog", "info", "", message, "", "flag catalog", RUNBOOK)
        return
    _, note = version_of(subject.engine, subject.version)
    if note and subject.given:
        yield LintFinding("version-not-read", "info", "", note, "", "flag catalog", RUNBOOK)


def existence(subject: Subject) -> Iterator[LintFinding]:
    """Flags and variables that this version does not have."""
    for name in subject.env:
        if instead := never_existed(subject.engine).get(name):
            message = f"no version of {subject.engine} reads {name}: {_unknown_variable(subject)}"
            yield LintFinding("never-existed", "error", name, message, instead, "vllm/envs.py", RUNBOOK)
    if not has_flags(subject.engine):
        return
    oldest = known_versions(subject.engine)[:1]
    for given in subject.given:
        facts = facts_of(subject.engine, subject.version, given.flag)
        if facts is not None and facts.since in oldest and subject.older_than(facts.since):
            continue  # older than all that was read: taken to be like the oldest
        if given.flag not in _SPEAKS_FOR_ITSELF and (why := why_absent(subject.engine, subject.version, given.flag)):
            yield _absent(subject, given, why)
        elif given.negated and not _has_negation(subject, given.flag):
            no = given.flag.replace("--", "--no-", 1)
            yield LintFinding(
                "never-existed",
                "error",
                no,
                f"{given.flag} has no --no- form in {_name(subject)}",
                _off(subject, given.flag),
                _PARSER,
                RUNBOOK,
            )


def _absent(subject: Subject, given: Given, why: str) -> LintFinding:
    flag, source = given.flag, "flag catalog"
    known = facts_ever(subject.engine, subject.version, flag)
    if known is None:
        near = _nearest_name(subject, flag)
        advised = never_existed(subject.engine).get(flag)
        instead = advised or (f"did you mean {near}?" if near else "leave it out")
        message = f"{flag} is in no version of {subject.engine} that was read"
        return LintFinding("never-existed", "error", flag, message, instead, source, RUNBOOK)
    if version_key(subject.at) < version_key(known.since):
        return LintFinding("not-yet", "error", flag, why, f"upgrade to {known.since}, or leave it out", source, RUNBOOK)
    instead = known.replaced_by or (IDLE[flag].instead if flag in IDLE else "leave it out")
    what = "ends at once, or a wrapper drops the flag silently"
    message = f"{flag} is gone: its last version was {known.until}; {subject.engine} {subject.at} {what}"
    return LintFinding("removed", "error", flag, message, instead, source, RUNBOOK)


def without_effect(subject: Subject) -> Iterator[LintFinding]:
    """Flags that this version takes, but that do nothing or are on their way out."""
    for given in subject.given:
        idle = IDLE.get(given.flag) if subject.engine == "vllm" else None
        if idle and subject.within(idle.since, idle.until):
            yield LintFinding(
                "without-effect",
                "warn",
                given.flag,
                f"{given.flag} does nothing in vLLM {subject.at}: {idle.why}",
                idle.instead,
                _PARSER,
                RUNBOOK,
            )
            continue
        facts = facts_of(subject.engine, subject.version, given.flag)
        if facts is not None and facts.deprecated:
            instead = facts.replaced_by or "leave it out"
            yield LintFinding(
                "deprecated",
                "warn",
                given.flag,
                f"{given.flag} is deprecated in {_name(subject)}",
                instead,
                _PARSER,
                RUNBOOK,
            )
        if subject.engine == "vllm" and given.flag in _V0_ONLY and subject.within("0.8.0", "0.10.2"):
            yield LintFinding(
                "falls-back-to-v0",
                "warn",
                given.flag,
                f"{given.flag} makes vLLM {subject.at} fall back to its V0 engine, or stop if VLLM_USE_V1=1 is set: "
                f"{_V0_ONLY[given.flag]}",
                "leave it out",
                "vllm/engine/arg_utils.py, vllm#18115",
                RUNBOOK,
            )


def values(subject: Subject) -> Iterator[LintFinding]:
    """Values that the parser of this version refuses, or drops."""
    for given in subject.given:
        facts = facts_of(subject.engine, subject.version, given.flag)
        if facts is None or given.value is None:
            continue
        if facts.kind in _BOOL_KINDS and isinstance(given.value, str):
            yield from _value_of_a_switch(subject, given)
        elif given.value is True and facts.kind in _NUMBER_KINDS:
            yield _odd_value(given, f"{given.flag} needs a value", f"{given.flag} N")
        elif facts.kind in _NUMBER_KINDS and not _is_number(given):
            yield _odd_value(given, f"{given.flag} takes a number, not {given.value}", f"{given.flag} N")
        elif facts.kind in _NUMBER_KINDS and (why := _why_out_of_range(subject, given)):
            yield LintFinding("out-of-range", "error", given.flag, why, _in_range(given), "vllm/config", RUNBOOK)
        elif why := _why_no_choice(subject, given):
            choices = ", ".join(str(choice) for choice in facts.choices or ())
            near = difflib.get_close_matches(str(given.value), [str(c) for c in facts.choices or ()], 1)
            instead = f"{given.flag} {near[0]}" if near else f"one of {choices}"
            yield _odd_value(given, f"{why}: the parser refuses it", instead)
    if subject.from_yaml and subject.engine == "vllm" and subject.older_than("0.28.0"):
        yield from _dropped_by_yaml(subject)


def _why_out_of_range(subject: Subject, given: Given) -> str | None:
    number = as_number(given.value)
    if number is None or (given.flag, number) == ("--max-model-len", -1):
        return None
    return why_out_of_range(subject.engine, given.flag, number)


def _in_range(given: Given) -> str:
    number = as_number(given.value) or 0.0
    if given.flag == "--gpu-memory-utilization" and 1 < number <= 100:
        return f"{given.flag} {number / 100:g}"
    return f"{given.flag} within its range"


def _why_no_choice(subject: Subject, given: Given) -> str | None:
    facts = facts_of(subject.engine, subject.version, given.flag)
    if facts is None or not facts.choices or isinstance(given.value, bool | list | tuple):
        return None
    if str(given.value) in {str(choice) for choice in facts.choices}:
        return None
    why = why_value_absent(subject.engine, subject.version, given.flag, given.value)
    return why or f"{given.flag} {given.value} is no choice of {_name(subject)}"


def _value_of_a_switch(subject: Subject, given: Given) -> Iterator[LintFinding]:
    """`--enable-prefix-caching false`: what it looks like, and what each version made of it."""
    off = str(given.value).lower() in ("false", "no", "off", "0")
    instead = _off(subject, given.flag) if off != given.negated else given.flag
    message = f"{given.flag} takes no value"
    if given.glued:
        message += f": {given.written} is a usage error"
    elif off and subject.engine == "vllm":
        message += f": {_stray_word(subject)}"
    else:
        message += f": {given.value} is a stray word behind it"
    yield LintFinding("takes-no-value", "error", given.flag, message, instead, _PARSER, RUNBOOK)


def _stray_word(subject: Subject) -> str:
    if "-m" in subject.program:
        if subject.older_than("0.10.0"):
            return "'false' is a usage error"
        return "'false' is swallowed as an unused word and it stays ON, without a message"
    if subject.older_than("0.11.1"):
        return "'false' is a usage error, or taken for the model's name where the model is given by --model"
    return "'false' is a usage error"


def _dropped_by_yaml(subject: Subject) -> Iterator[LintFinding]:
    for given in subject.given:
        facts = facts_of(subject.engine, subject.version, given.flag)
        if given.value is False and not given.negated and facts is not None and facts.kind != "bool-value":
            key = given.flag.removeprefix("--")
            yield LintFinding(
                "yaml-false-dropped",
                "error",
                given.flag,
                f"{key}: false in a configuration file is dropped by vLLM 0.6.6 to 0.27.1: the default stays in force",
                f"{_off(subject, given.flag)} on the command line, or vLLM 0.28.0",
                "load_config_file in vllm/utils, 0.6.6 to 0.33.0",
                RUNBOOK,
            )


def twice(subject: Subject) -> Iterator[LintFinding]:
    """A flag given twice with different values: the last one wins silently."""
    seen: dict[str, Given] = {}
    for given in subject.given:
        before = seen.get(given.flag)
        if before is not None and before.value != given.value and given.value is not None and before.value is not None:
            yield LintFinding(
                "given-twice",
                "warn",
                given.flag,
                f"{before.written} and {given.written}: the last wins",
                f"{given.written} alone",
                "argparse",
                RUNBOOK,
            )
        seen[given.flag] = given


def same_as_default(subject: Subject) -> Iterator[LintFinding]:
    """A value that is the version's default anyway."""
    for given in subject.given:
        facts = facts_of(subject.engine, subject.version, given.flag)
        if facts is None or facts.default is None or given.value is None or isinstance(given.value, list | tuple):
            continue
        number, default = as_number(given.value), as_number(facts.default)
        same = number == default if number is not None and default is not None else given.value == facts.default
        if same:
            yield LintFinding(
                "is-default",
                "info",
                given.flag,
                f"{given.written} is the default of {_name(subject)}",
                "it may be left out",
                "flag catalog",
                RUNBOOK,
            )


def _is_number(given: Given) -> bool:
    if as_number(given.value) is not None or (given.flag, given.value) == ("--max-model-len", "auto"):
        return True
    return isinstance(given.value, str) and bool(re.fullmatch(r"\d+(\.\d+)?\s*([kKmMgGtT]i?[bB]?)", given.value))


def _odd_value(given: Given, message: str, instead: str) -> LintFinding:
    runbook = "kv-dtype-unsupported" if given.flag == "--kv-cache-dtype" else RUNBOOK
    return LintFinding("value-refused", "error", given.flag, message, instead, "flag catalog", runbook)


def _has_negation(subject: Subject, flag: str) -> bool:
    facts = facts_of(subject.engine, subject.version, flag)
    return facts is None or facts.kind == "bool"


def _off(subject: Subject, flag: str) -> str:
    """How a switch is turned off in this version."""
    facts = facts_of(subject.engine, subject.version, flag)
    if facts is not None and facts.kind == "bool-value":
        return f"{flag}=false"
    return f"--no-{flag.removeprefix('--')}" if facts is None or facts.kind == "bool" else f"leave {flag} out"


def _nearest_name(subject: Subject, flag: str) -> str | None:
    near = difflib.get_close_matches(flag, names(subject.engine, subject.version), 1, cutoff=0.75)
    return near[0] if near else None


def _unknown_variable(subject: Subject) -> str:
    if subject.older_than("0.17.0"):
        return "it is ignored silently"
    return "a warning in the log, or the end of the start with --fail-on-environ-validation"


def _name(subject: Subject) -> str:
    return f"{subject.engine} {subject.at}"
