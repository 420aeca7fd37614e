"""What is wrong with a target before anything is measured: its flags for its version, and that version's advisories."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.ui import words
from app.ui.tables import show_table
from probe.store import Target
from runbooks.advisories import Advisory, advisories_for
from runbooks.config_lint import LintFinding, lint_flags
from runbooks.facts import TargetFacts

SEVERITIES = {
    "error": words.Mark("✖", "error", "red"),
    "warn": words.Mark("▲", "warning", "orange"),
    "info": words.Mark("●", "note", "blue"),
}
CERTAIN = words.Mark("✖", "affected", "red")
POSSIBLE = words.Mark("▲", "affected if", "orange")


def show_findings(target: Target, facts: TargetFacts) -> None:
    """Lint and advisories in one folded place, opened where the runbook at hand is concerned."""
    findings = lint_of(target, facts)
    advisories = advisories_for(facts.engine, facts.version, facts.flags)
    label = f"{target.name}: {_count(len(findings), 'finding')} in its flags, "
    label += f"{_count(len(advisories), 'advisory')} for {facts.engine} {facts.version or 'of unknown version'}"
    with st.expander(words.plain(label), key="findings"):
        if facts.version is None:
            st.caption("The target does not tell its version, so no advisory can be said to hold for it.")
        show_lint(findings)
        show_advisories(advisories)


def lint_of(target: Target, facts: TargetFacts) -> list[LintFinding]:
    """Findings about the command line where it is known, else about the flags that the engine exposes.

    Notes on what is as it would be anyway are left out of the latter: nobody wrote it.
    """
    known = {"gpu": facts.gpu, "checkpoint_quantization": facts.checkpoint_quantization,
             "attention_backend": facts.attention_backend, "block_size": facts.block_size,
             "max_model_len": facts.max_model_len, "kv_tokens": facts.kv_cache_size_tokens}  # fmt: skip
    if target.flags:
        return lint_flags(facts.engine, facts.version, target.flags, **known)
    found = lint_flags(facts.engine, facts.version, facts.flags, **known)
    return [finding for finding in found if finding.severity != "info"]


def show_lint(findings: Sequence[LintFinding]) -> None:
    """One line a finding, the gravest first."""
    show_table([
        {
            "": SEVERITIES[finding.severity],
            "flag": finding.flag,
            "what": finding.message,
            "instead": finding.instead or words.DASH,
            "source": finding.source,
        }
        for finding in findings
    ])  # fmt: skip


def show_advisories(advisories: Sequence[Advisory]) -> None:
    """What is known of the version, security first, with its source."""
    show_table([
        {
            "": CERTAIN if advisory.certain else POSSIBLE,
            "advisory": f"{advisory.id} ({advisory.kind})",
            "what": advisory.what,
            "when": advisory.condition or words.DASH,
            "fixed in": advisory.fixed or "not yet",
            "until then": advisory.workaround or words.DASH,
            "source": advisory.source,
        }
        for advisory in advisories
    ])  # fmt: skip


def _count(number: int, what: str) -> str:
    many = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number or 'no'} {what if number == 1 else many}"
