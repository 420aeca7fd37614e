"""A diagnosis: the examination with what to change next, advisories and lint; as text for 3 a.m. and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from engine.memory.deployment import Gpu
from probe.alerts.words import seconds
from probe.doctor.examine import examine
from probe.doctor.figures import Figures
from probe.doctor.finding import Examination, Finding
from probe.doctor.observed import Observed
from probe.doctor.watched import with_alerts
from runbooks.advisories import Advisory, advisories_for
from runbooks.config_lint import LaunchLine, LintFinding, Subject, lint, read_line
from runbooks.facts import TargetFacts
from runbooks.load import RunbookError
from runbooks.recommend import from_facts, recommend

# What a target says of itself are values in force, defaults among them: nothing that somebody wrote wrongly.
_OF_WRITING = frozenset(
    {"is-default", "utilization-overridden", "never-existed", "not-yet", "removed", "value-refused", "version-not-read"}
)
HEALTHY, FOUND, STOPPED, ABSTAINED = 0, 1, 2, 3


@dataclass(frozen=True)
class Diagnosis:
    """All that a doctor says of one target. `lint` is of the flags that were given, or read off the target."""

    observed: Observed
    examination: Examination
    lint: tuple[LintFinding, ...]
    advisories: tuple[Advisory, ...]
    flags_from: str

    @property
    def code(self) -> int:
        """The exit code: 1 something is wrong, 3 too little was seen to say, 0 nothing is wrong."""
        if any(one.id != "metrics-unknown" for one in self.examination.serious) or self.lint_errors:
            return FOUND
        return ABSTAINED if self.examination.thin else HEALTHY

    @property
    def lint_errors(self) -> tuple[LintFinding, ...]:
        """What is wrong with the flags, beyond remarks."""
        return tuple(one for one in self.lint if one.severity != "info")

    @property
    def verdict(self) -> str:
        """One line: what is wrong, how sure, what to change, where to read on."""
        serious = [one for one in self.examination.serious if one.id != "metrics-unknown"]
        if self.code == FOUND and serious:
            top = serious[0]
            more = f" (and {len(serious) - 1} more)" if len(serious) > 1 else ""
            change = f" Next: {top.next}." if top.change else ""
            sure = f"{top.confidence} confidence{more}"
            return f"{top.severity.upper()}: {top.title}, {sure}.{change} Runbook: {top.runbook}."
        if self.code == FOUND:
            worst = self.lint_errors[0]
            return f"CONFIGURATION: {worst.message}. Write: {worst.instead}. Runbook: {worst.runbook}."
        if self.code == ABSTAINED:
            return f"CANNOT TELL: {self.examination.thin[0]}"
        served = Figures(self.observed).in_service or 0.0
        rules = len(self.examination.judged)
        return f"HEALTHY: {served:,.0f} requests in service in {seconds(self.observed.window_s)}, {rules} rules judged."

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        seen = self.observed
        return {
            "target": seen.target.name,
            "engine": seen.target.engine,
            "version": seen.version,
            "source": seen.source,
            "since": seen.since,
            "until": seen.until,
            "window_s": round(seen.window_s, 3),
            "scrapes": {"attempted": seen.attempts, "answered": seen.answers, "errors": list(seen.errors)},
            "verdict": self.verdict,
            "exit_code": self.code,
            "findings": [one.to_dict() for one in self.examination.findings],
            "too_thin": list(self.examination.thin),
            "remarks": list(self.examination.remarks),
            "judged": list(self.examination.judged),
            "not_judged": [dataclasses.asdict(one) for one in self.examination.not_judged],
            "lint": [one.to_dict() for one in self.lint],
            "flags_from": self.flags_from,
            "advisories": [one.to_dict() for one in self.advisories],
        }


def diagnose(observed: Observed, line: LaunchLine | None = None, **known: Any) -> Diagnosis:
    """Examines a window. `line`: the server's flags as its operator gives them; `known`: fields of `Subject`."""
    figures = Figures(observed)
    given = {one.flag: _plain(one.value) for one in line.given} if line is not None else None
    facts = facts_of(observed, figures, given, known.get("gpu"))
    examination = examine(figures, facts)
    findings = tuple(_with_change(one, facts) for one in with_alerts(examination.findings, observed))
    return Diagnosis(
        observed,
        dataclasses.replace(examination, findings=findings),
        tuple(_lint(facts, line, known)),
        tuple(
            advisories_for(
                facts.engine,
                facts.version,
                facts.flags,
                complete=given is not None,
                context_above_pool=_context_above_pool(facts),
            )
        ),
        "--flags" if line is not None else "what the target tells",
    )


def facts_of(observed: Observed, figures: Figures, given: dict[str, Any] | None, gpu: Gpu | None) -> TargetFacts:
    """What advice is computed from: the target's facts, the flags given, the traffic of the window."""
    facts = {**observed.target.facts, "engine": observed.target.engine, "traffic": figures.traffic}
    if gpu is not None:
        facts["gpu"] = gpu
    found = from_facts(facts)
    if not given:
        return found
    flags = {**found.flags, **given}
    fields = {"max_num_seqs": "--max-num-seqs", "max_num_batched_tokens": "--max-num-batched-tokens",
              "max_model_len": "--max-model-len"}  # fmt: skip
    told = {name: given[flag] for name, flag in fields.items() if isinstance(given.get(flag), int)}
    return dataclasses.replace(found, flags=flags, **told)


def _context_above_pool(facts: TargetFacts) -> bool | None:
    if facts.max_model_len is None or facts.kv_cache_size_tokens is None:
        return None
    return facts.max_model_len > facts.kv_cache_size_tokens


def _plain(value: Any) -> Any:
    """A value of a command line as the number it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _lint(facts: TargetFacts, line: LaunchLine | None, known: dict[str, Any]) -> list[LintFinding]:
    """Of what was given; else of what the target itself says is in force, which exists by that."""
    from_operator = line is not None
    if line is None:
        flags = {flag: value for flag, value in facts.flags.items() if value is not None}
        line = read_line(facts.engine, facts.version, flags)
    subject = Subject(
        facts.engine,
        facts.version,
        line.given,
        line.env,
        line.program,
        line.from_yaml,
        **{
            "gpu": facts.gpu,
            "checkpoint_quantization": facts.checkpoint_quantization,
            "attention_backend": facts.attention_backend,
            "block_size": facts.block_size,
            "max_model_len": facts.max_model_len,
            "kv_tokens": facts.kv_cache_size_tokens,
            **known,
        },
    )
    return [one for one in lint(subject) if from_operator or one.code not in _OF_WRITING]


def _with_change(finding: Finding, facts: TargetFacts) -> Finding:
    """The finding with the first change its runbook computes for this target, or what is missing for one."""
    try:
        advice = recommend(finding.runbook, facts)
    except RunbookError:
        return finding
    if advice.changes:
        change = advice.changes[0]
        to = f"leave {change.flag} out" if change.to is None else f"{change.flag} {_said(change.to)}"
        was = "" if change.from_ is None else f" (now {_said(change.from_)})"
        restart = ", with a restart" if change.restart else ""
        return dataclasses.replace(finding, next=f"{to}{was}{restart}", change=change.to_dict())
    if advice.missing:
        return dataclasses.replace(finding, next=f"no flag can be computed without {'; '.join(advice.missing)}")
    return dataclasses.replace(finding, next=(advice.steps[0] if advice.steps else advice.summary).rstrip("."))


def _said(value: Any) -> str:
    return shlex.quote(str(value)) if not isinstance(value, bool) else ("on" if value else "off")


def text(diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """The diagnosis for a terminal: the verdict first."""
    seen, examination = diagnosis.observed, diagnosis.examination
    engine = f"{seen.target.engine} {seen.version or '(version unknown)'}"
    answered = f"{seen.answers} of {seen.attempts} answered, window {seconds(seen.window_s)}"
    lines = [diagnosis.verdict, f"{seen.target.name}: {engine}, {seen.source}, {answered}"]
    for place, finding in enumerate(examination.findings, 1):
        lines += ["", *_finding(place, finding, brief=finding.explained_by is not None and not verbose)]
    if diagnosis.code == ABSTAINED:
        lines += ["", "To collect", *(f"  {reason}" for reason in examination.thin)]
    besides = [*examination.remarks, *(examination.thin if diagnosis.code == FOUND else ())]
    if besides:
        lines += ["", "Seen besides", *(f"  {remark}" for remark in besides)]
    shown = [one for one in diagnosis.lint if verbose or one.severity != "info"]
    if shown:
        lines += ["", f"Flags ({diagnosis.flags_from})"]
        for one in shown:
            instead = f"; write: {one.instead}" if one.instead else ""
            lines.append(f"  {one.severity} {one.code}: {one.message}{instead} [{one.runbook}; {one.source}]")
    lines += _advisories(diagnosis)
    if examination.not_judged and verbose:
        lines += ["", "Not judged", *(f"  {one.id}: {one.why}" for one in examination.not_judged)]
    elif examination.not_judged:
        lines += ["", f"{len(examination.not_judged)} rules could not be judged: --verbose says why"]
    return "\n".join(lines)


def _advisories(diagnosis: Diagnosis) -> list[str]:
    """Those that hold, and by their conditions those that only may."""
    if not diagnosis.advisories:
        return []
    seen = diagnosis.observed
    lines = ["", f"Advisories of {seen.target.engine} {seen.version}"]
    for one in diagnosis.advisories:
        if one.certain:
            fixed = f"fixed in {one.fixed}" if one.fixed else "no fixed version read"
            lines.append(
                f"  {one.id} ({one.confidence}): {one.what}; {fixed}; until then {one.workaround}. {one.source}"
            )
    lines += [
        f"  {one.id} with {one.condition}: {one.what}. {one.source}" for one in diagnosis.advisories if not one.certain
    ]
    return lines


def _finding(place: int, finding: Finding, *, brief: bool) -> list[str]:
    because = f", may follow from {finding.explained_by}" if finding.explained_by else ""
    lines = [
        f"{place}. {finding.title} [{finding.id}, {finding.severity}{because}]",
        f"   {finding.summary}",
        f"   confidence {finding.confidence}: {finding.why}",
    ]
    if brief:
        return lines
    lines += [f"   {one.name}: {one.text}" for one in finding.evidence]
    for one in finding.look_alikes:
        word = {True: "ruled out", False: "IS THE CASE", None: "not ruled out"}[one.excluded]
        lines.append(f"   {word}: {one.name} ({one.by})")
    if finding.next:
        lines.append(f"   next: {finding.next}")
    lines.append(f"   runbook: kvoncall runbooks show {finding.runbook}")
    return lines
