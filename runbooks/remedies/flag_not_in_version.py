"""A flag, or a value of one, that this version does not have: it is refused at start, or silently does nothing.

Each is removed; where the version has another name or another way to the same end, that comes in its place.
"""

from __future__ import annotations

import json
from typing import Any

from runbooks.changes import Draft, Recommendation
from runbooks.facts import TargetFacts
from runbooks.flags import flag_facts, never_existed, why_absent, why_value_absent
from runbooks.quality_candidates import is_set

ID = "flag-not-in-version"
STARTS = "up == 1"
OFFLOAD = "--kv-offloading-size"
_SAME_MEANING = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--tensor-parallel-size": "--tp-size",
    "--tp-size": "--tensor-parallel-size",
}
_AGAINST = {"--disable-log-requests": ("--enable-log-requests", False)}


def advise(facts: TargetFacts) -> Recommendation:
    """What to take out of the launch line, and what to put in its place."""
    draft = Draft(ID, facts)
    draft.step("Run the new version's `--help` on the launch line before an upgrade: what it does not know it refuses")
    if facts.version is None:
        draft.lacks("the version of the engine")
    strangers = [(flag, value) for flag, value in facts.flags.items() if is_set(value)]
    for flag, value in strangers:
        absent = why_absent(facts.engine, facts.version, flag)
        if absent is not None:
            _take_out(draft, flag, value, absent)
        elif (wrong := why_value_absent(facts.engine, facts.version, flag, value)) is not None:
            _another_value(draft, flag, value, wrong)
    if not facts.flags:
        draft.lacks("the flags in force, or the launch command")
    if not draft.changes:
        return draft.done("Every flag known to be set exists in this version, with the value it has")
    out = [c.flag for c in draft.changes if c.to is None]
    put = [f"{c.flag} {c.to}" for c in draft.changes if c.to is not None]
    parts = [f"take out {', '.join(out)}"] if out else []
    parts += [f"set {', '.join(put)}"] if put else []
    return draft.done("; ".join(parts).capitalize())


def _take_out(draft: Draft, flag: str, value: Any, absent: str) -> None:
    instead = never_existed(draft.facts.engine).get(flag)
    draft.propose(
        flag,
        None,
        why=f"{absent}. The value {value} has had no effect, or the start fails on it."
        + (f" Instead: {instead}." if instead else ""),
        expected="the launch line is what the engine does: 1 flag fewer that is void",
        cost="none: nothing reads it in this version",
        verify=STARTS,
        risk="a plan that counted on it was wrong before: see what it was meant to give",
    )
    _put_in_its_place(draft, flag, value)


def _put_in_its_place(draft: Draft, flag: str, value: Any) -> None:
    facts = draft.facts
    why = f"it has the meaning that {flag} had"
    if flag == "--swap-space" and facts.flags.get(OFFLOAD) is None:
        if isinstance(value, int | float) and value > 0:
            ranks = (facts.tp or 1) * (facts.pp or 1)
            draft.refuse(
                OFFLOAD,
                value * ranks,
                f"only if a host tier for KV is wanted: {value:g} GiB x {ranks} GPUs. Nothing was swapped for "
                "years, so nothing is lost without it",
            )
        return
    if flag in _AGAINST:
        other, off = _AGAINST[flag]
        if value:
            _set(draft, other, off, why)
        return
    known = flag_facts(facts.engine, facts.version, flag)
    other = _SAME_MEANING.get(flag) or (known.replaced_by if known is not None else None) or ""
    if other and facts.flags.get(other) is None and why_absent(facts.engine, facts.version, other) is None:
        _set(draft, other, value, why)


def _set(draft: Draft, flag: str, to: Any, why: str) -> None:
    draft.propose(
        flag,
        to,
        why=f"{why}: the value stays {json.dumps(to)}.",
        expected="1 setting in force that was void",
        cost="none besides what the flag does",
        verify=STARTS,
    )


def _another_value(draft: Draft, flag: str, value: Any, wrong: str) -> None:
    """Back to the default, which every version takes; the nearest value is another page's matter."""
    step = "; see kv-dtype-unsupported for the nearest that works" if flag == "--kv-cache-dtype" else ""
    draft.propose(
        flag,
        None,
        why=f"{wrong}.",
        expected=f"1 value fewer that the parser refuses, with the default in place of {value}",
        cost=f"what {value} was meant to give{step}",
        verify=STARTS,
    )
