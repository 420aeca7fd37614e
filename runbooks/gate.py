"""The gate every recommended change must pass, and the check of an operator's own idea.

It refuses, with the reason, what does not exist for the engine and version, what the version's parser would not take,
what changes nothing, what points the wrong way for the runbook, what the hardware cannot do, and what another flag in
force makes void or impossible.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

from runbooks.contradictions import why_contradicts
from runbooks.engine_names import vllm_flag
from runbooks.facts import TargetFacts, bytes_of
from runbooks.flags import EMBEDDED, flag_facts, why_absent, why_value_absent
from runbooks.hardware import why_not_block_size, why_not_on
from runbooks.in_force import InForce, effective_default, value_in_force
from runbooks.isolation_flags import why_weaker
from runbooks.kv_dtypes import why_worse
from runbooks.ranges import why_out_of_range
from runbooks.wrong_way import why_wrong_way

DTYPE = "--kv-cache-dtype"
NOT_IN_VERSION = "flag-not-in-version"
_IN_BYTES = ("--kv-cache-memory-bytes", "--device-memory")
_SWITCHES = ("switch",)


def refusal_reason(
    runbook: str, facts: TargetFacts, flag: str, to: Any, *, planned: Mapping[str, Any] | None = None
) -> str | None:
    """Why this change must not be recommended for this target (None: it may).

    planned: flags as they will be after the changes that come with this one. Also the check of an operator's own
    idea: "would lowering --gpu-memory-utilization help?".
    """
    return (
        _why_impossible(runbook, facts, flag, to)
        or _why_wrong(runbook, facts, flag, to)
        or _why_no_change(facts, flag, to)
        or _why_not_this_hardware(facts, flag, to)
        or why_contradicts(facts, flag, to, facts.flags if planned is None else planned)
    )


def spelled(facts: TargetFacts, flag: str, to: Any) -> Any:
    """The value as the version's parser knows it: a switch has no negative form, it is left out."""
    if to is False and facts.engine != EMBEDDED:
        known = flag_facts(facts.engine, facts.version, flag) if facts.version is not None else None
        if known is not None and known.kind in _SWITCHES:
            return None
    return to


def needs_restart(facts: TargetFacts, flag: str) -> bool:
    """Whether the flag is read at start only, as nearly all are."""
    if facts.engine == EMBEDDED:
        return True
    known = flag_facts(facts.engine, facts.version, flag)
    return known is None or known.restart


def _why_impossible(runbook: str, facts: TargetFacts, flag: str, to: Any) -> str | None:
    absent = _absent(facts, flag)
    now = facts.flags.get(flag)
    if runbook == NOT_IN_VERSION and to is None and now is not None:
        if absent is None and why_value_absent(facts.engine, facts.version, flag, now) is None:
            return f"not needed: {_release(facts)} takes {flag} {now}"
        return None  # what does not exist is what has to go
    if absent is None and to is not None:
        absent = (
            _value_absent(facts, flag, to)
            or _why_wrong_kind(facts, flag, to)
            or why_out_of_range(facts.engine, flag, to)
        )
    return absent


def _absent(facts: TargetFacts, flag: str) -> str | None:
    return _embedded_absent(flag) if facts.engine == EMBEDDED else why_absent(facts.engine, facts.version, flag)


def _value_absent(facts: TargetFacts, flag: str, to: Any) -> str | None:
    if facts.engine == EMBEDDED and isinstance(to, Hashable):
        return _embedded_value_absent(flag, to)
    return why_value_absent(facts.engine, facts.version, flag, to)


@functools.cache
def _embedded_absent(flag: str) -> str | None:
    """The embedded engine's flags are those of this process: its parser is built once for each."""
    return why_absent(EMBEDDED, None, flag)


@functools.lru_cache(maxsize=1024, typed=True)
def _embedded_value_absent(flag: str, to: Hashable) -> str | None:
    return why_value_absent(EMBEDDED, None, flag, to)


def _why_wrong_kind(facts: TargetFacts, flag: str, to: Any) -> str | None:
    if facts.engine == EMBEDDED:
        return None
    known = flag_facts(facts.engine, facts.version, flag) if facts.version is not None else None
    if known is None:
        return None
    if known.kind in ("bool", "switch", "bool-value") and not isinstance(to, bool):
        return f"{flag} is {'--x or --no-x' if known.kind == 'bool' else 'on or off'} in {facts.version}: no {to}"
    if known.kind == "switch" and to is False:
        return f"{flag} has no negative form in {facts.version}: leave it out"
    if known.kind in ("int", "float") and (isinstance(to, bool) or not isinstance(to, int | float)):
        return None if flag in _IN_BYTES and bytes_of(to) is not None else f"{flag} takes a number, not {to}"
    if known.kind == "int" and to != int(to):
        return f"{flag} takes whole numbers, not {to}"
    return None


def _why_no_change(facts: TargetFacts, flag: str, to: Any) -> str | None:
    now = value_in_force(facts, flag)
    if to is None:
        if facts.flags.get(flag) is None:
            return f"no change: {flag} is unset already"
        default = effective_default(facts, flag)
        if default is not None and _same(flag, now.value, default):
            return f"no change: {flag} {now.value} is the default of {_release(facts)}, set or not"
        return None
    if not _same(flag, now.value, to):
        return None
    if now.how == "default" and facts.version is None and facts.engine != EMBEDDED:
        return None  # the default of the newest release says little of a version nobody knows
    if now.how == "default":
        return f"no change: {flag} {to} is the default of {_release(facts)}, and it is not known to be set otherwise"
    return f"no change: {flag} is {now.value} already"


def _same(flag: str, now: Any, to: Any) -> bool:
    if now is None:
        return False
    if flag in _IN_BYTES:
        return bytes_of(now) == bytes_of(to)
    if isinstance(now, bool) or isinstance(to, bool):
        return now is to
    return bool(now == to) or str(now) == str(to)


def _why_wrong(runbook: str, facts: TargetFacts, flag: str, to: Any) -> str | None:
    now = value_in_force(facts, flag)
    target = to if to is not None else effective_default(facts, flag)
    if flag in _IN_BYTES:
        now, target = InForce(bytes_of(now.value), now.how), bytes_of(target)
    wrong = why_wrong_way(runbook, vllm_flag(facts.engine, flag), now.value, target)
    if wrong is not None:
        return wrong
    if (runbook, flag) == ("kv-quality-drop", DTYPE) and not _measured_to_hold(facts, flag, to):
        return why_worse(now.value, to)
    return why_weaker(flag, facts.flags.get(flag), to) if runbook == "prefix-isolation-breach" else None


def _measured_to_hold(facts: TargetFacts, flag: str, to: Any) -> bool:
    """A measurement on the target's own model outweighs what is known of formats in general."""
    return any(c.holds and c.flags.get(flag) == to for c in facts.quality_candidates)


def _why_not_this_hardware(facts: TargetFacts, flag: str, to: Any) -> str | None:
    name = vllm_flag(facts.engine, flag)
    if name == DTYPE and to is not None and facts.engine != EMBEDDED:
        return why_not_on(
            facts.compute_capability,
            to,
            checkpoint_quantization=facts.checkpoint_quantization,
            attention_backend=facts.attention_backend,
            engine=facts.engine,
            version=facts.version,
            mla=facts.mla,
        )
    if name == "--block-size" and isinstance(to, int) and facts.engine != EMBEDDED:
        return why_not_block_size(
            to,
            attention_backend=facts.attention_backend,
            engine=facts.engine,
            version=facts.version,
            gpu_sm=facts.compute_capability,
        )
    return None


def _release(facts: TargetFacts) -> str:
    return f"{facts.engine} {facts.version}" if facts.version is not None else facts.engine
