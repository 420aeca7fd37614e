"""From a window to ranked findings: alert rules first, each against what looks like it, then the doctor's own checks.

Pure: figures and facts in, an `Examination` out.
"""

from __future__ import annotations

import dataclasses

from probe.alerts.rule import AbsenceSignal, EventSignal, Rule, ValueSignal
from probe.alerts.rules import DEFAULT_RULES, FAST_BURN, SLOW_BURN, TARGET_MISSING
from probe.alerts.words import number, seconds
from probe.doctor.checks import CHECKS
from probe.doctor.figures import Figures
from probe.doctor.finding import (
    CONFIDENCES,
    Confidence,
    Evidence,
    Examination,
    Finding,
    LookAlike,
    lower,
    ranked,
)
from probe.doctor.look_alikes import DIFFERENTIALS, Scene
from probe.doctor.rules import Judged, judge
from runbooks.facts import TargetFacts

# Requests in service below which nothing is said to be well: the traffic floor of the eviction rate.
LEAST_REQUESTS = 20.0
LEAST_ANSWERS = 2

# A look-alike shown to be the case -> the finding that says it.
_CAUSES = {
    ("head-of-line-block", "all places of --max-num-seqs taken"): "queue-with-room",
    ("kv-saturated", "one hot replica: routing, not size"): "hot-replica",
    ("eviction-storm", "one hot replica: routing, not size"): "hot-replica",
}
# A rule's finding says what these of the doctor's own would say.
_COVERED = {
    "slow-first-tokens": ("ttft-slo-burn",),
    "slow-tokens": ("itl-slo-burn",),
    "over-admission": ("eviction-storm", "preemption-livelock"),
    "queue-with-room": ("head-of-line-block",),
}
# What users feel -> what causes it, the surest cause first.
_CAUSES_OF_LATE = ("oom", "restarted", "engine-stall", "preemption-livelock", "eviction-storm")
_CAUSES_OF_WAITING = (*_CAUSES_OF_LATE, "head-of-line-block", "kv-saturated", "hot-replica", "queue-with-room")
_SYMPTOMS = {
    "ttft-slo-burn": _CAUSES_OF_WAITING,
    "slow-first-tokens": _CAUSES_OF_WAITING,
    "itl-slo-burn": _CAUSES_OF_LATE,
    "slow-tokens": _CAUSES_OF_LATE,
}
_STATES = ("kv-saturated", "head-of-line-block", "engine-stall", "kv-block-leak")


def examine(figures: Figures, facts: TargetFacts) -> Examination:
    """What is wrong in the window, what else was seen, and what cannot be said."""
    scene = Scene(figures, facts)
    seen = figures.observed
    enough = seen.answers >= LEAST_ANSWERS
    judged, skipped = judge(figures, DEFAULT_RULES if enough else (TARGET_MISSING,))
    found = [_of_rule(scene, one) for one in judged if one.outcome.verdict == "breach"]
    found = [_stalled(scene, finding) for finding in found]
    for check in CHECKS if enough else ():
        found += check(scene)
    found = _explained(found, {one.rule.id: one.rule for one in judged})
    thin = _thin(scene, found, judged)
    return Examination(
        ranked(found),
        tuple(_remarks(scene, judged)),
        tuple(skipped),
        thin,
        tuple(one.rule.id for one in judged),
    )


def _of_rule(scene: Scene, one: Judged) -> Finding:
    rule, outcome = one.rule, one.outcome
    scene = Scene(scene.figures.ending(rule.window_s), scene.facts)
    look_alikes = tuple(tell(scene) for tell in DIFFERENTIALS.get(rule.id, ()))
    confidence, why = _confidence(scene, one, look_alikes)
    value = Evidence(
        rule.id,
        _against(rule, outcome.value),
        outcome.value,
        outcome.numerator,
        outcome.denominator,
        rule.window_s,
    )
    summary = outcome.summary.removeprefix(f"{rule.title}: ")
    return Finding(
        rule.id,
        rule.severity,
        rule.title,
        summary,
        (value, *_around(scene), Evidence("rests on", outcome.coverage)),
        confidence,
        why,
        look_alikes,
        rule.runbook,
    )


def _against(rule: Rule, value: float | None) -> str:
    """A value beside what its rule alerts at."""
    unit = rule.signal.unit if isinstance(rule.signal, ValueSignal) else "count"
    if isinstance(rule.signal, ValueSignal) and rule.signal.condition is not None:
        return f"{number(value, unit)} (alert > {FAST_BURN:g}, or > {SLOW_BURN:g} for longer)"
    return f"{number(value, unit)} (alert {rule.comparison} {number(rule.threshold, unit)})"


def _confidence(scene: Scene, one: Judged, look_alikes: tuple[LookAlike, ...]) -> tuple[Confidence, str]:
    """How sure a rule's finding is: by its window, by how much was counted, by what is not excluded."""
    rule, outcome = one.rule, one.outcome
    confidence: Confidence = "high"
    reasons = []
    if one.usual_s is not None:
        reasons.append(f"window shortened from {seconds(one.usual_s)} to {seconds(rule.window_s)}")
        counted = outcome.numerator is not None and outcome.numerator >= 5
        clear = outcome.value is not None and outcome.value >= 2 * rule.threshold
        if not (counted and clear) and not isinstance(rule.signal, EventSignal | AbsenceSignal):
            confidence = lower(confidence)
        elif counted:
            reasons.append(f"{outcome.numerator:,.0f} counted")
    answers = scene.figures.observed.answers
    if rule.id in _STATES:
        reasons.append(f"{answers} scrapes agree")
        if answers < 4:
            confidence = lower(confidence)
    unknown = [one.name for one in look_alikes if one.excluded is None]
    if unknown:
        confidence = lower(confidence)
        reasons.append(f"not excluded: {'; '.join(unknown)}")
    if any(one.excluded is False for one in look_alikes):
        confidence = CONFIDENCES[-1]
    return confidence, "; ".join(reasons) or f"full window of {seconds(rule.window_s)}"


def _around(scene: Scene) -> list[Evidence]:
    """The figures of the window beside a rule's own."""
    figures, found = scene.figures, []
    if figures.usage is not None:
        low, mean, high = figures.usage
        found.append(Evidence("KV usage", f"{low:.1%} to {high:.1%}, mean {mean:.1%}", mean, window_s=figures.window_s))
    for metric, name in (("requests_running", "running"), ("requests_waiting", "waiting")):
        values = figures.over_time(metric)
        if values:
            found.append(
                Evidence(name, f"{min(values):,.0f} to {max(values):,.0f}", values[-1], window_s=figures.window_s)
            )
    for metric, name in (("requests_finished_total", "finished"), ("preemptions_total", "preemptions")):
        grown = figures.grown(metric)
        if grown is not None:
            found.append(Evidence(name, f"{grown:,.0f} in {scene.window}", grown, window_s=figures.window_s))
    return found


def _stalled(scene: Scene, finding: Finding) -> Finding:
    """A stall with nothing running: the head of the queue is never admitted, or blocks are held by what waits."""
    figures = scene.figures
    if finding.id != "engine-stall" or figures.most("requests_running") != 0 or not figures.least("requests_waiting"):
        return finding
    held = figures.usage is not None and figures.usage[0] > 0.01
    if held:
        title, runbook = "Nothing runs, and what waits holds blocks", "offload-resume-deadlock"
    else:
        title, runbook = "Nothing runs, the pool is empty, and requests wait", "head-of-line-block"
    return dataclasses.replace(finding, title=title, runbook=runbook)


def _explained(found: list[Finding], rules: dict[str, Rule]) -> list[Finding]:
    """Findings with what explains them: the cause a look-alike names, or the rule that inhibits theirs."""
    sure = {one.id for one in found if one.confidence != "low"}
    ids = {one.id for one in found}
    result = []
    for one in found:
        if any(other in ids for other in _COVERED.get(one.id, ())):
            continue
        cause = next(
            (by for (rule, name), by in _CAUSES.items() if rule == one.id and by in ids and _is_shown(one, name)), None
        )
        if one.id == "preemption-livelock" and one.confidence == "low" and "eviction-storm" in sure:
            cause = "eviction-storm"  # answers longer than the window look the same
        inhibitors = (*_SYMPTOMS.get(one.id, ()), *(rules[one.id].inhibited_by if one.id in rules else ()))
        inhibited = next((by for by in inhibitors if by in sure), None)
        result.append(dataclasses.replace(one, explained_by=cause or inhibited))
    return result


def _is_shown(finding: Finding, name: str) -> bool:
    return any(one.name == name and one.excluded is False for one in finding.look_alikes)


def _thin(scene: Scene, found: list[Finding], judged: list[Judged]) -> tuple[str, ...]:
    """Why nothing can be said to be well, and what to collect."""
    figures, seen, reasons = scene.figures, scene.figures.observed, []
    span = max(60.0, 4 * figures.window_s)
    if seen.answers < LEAST_ANSWERS:
        why = f": {seen.errors[-1]}" if seen.errors else ""
        reasons.append(f"{seen.answers} of {seen.attempts} scrapes answered{why} Run again with --for {span:.0f}.")
    if any(one.id == "metrics-unknown" for one in found):
        lacking = scene.facts.unread or ()
        names = ", ".join(m.name for m in lacking if m.required) or "required metrics"
        todo = next((m.todo for m in lacking if m.required and m.todo), "look at the server's flags for metrics")
        reasons.append(f"{names} not exposed: {todo}.")
    served = figures.in_service
    if seen.answers < LEAST_ANSWERS:
        return tuple(reasons)
    if served is None:
        reasons.append("neither ended nor running requests are exposed: nothing can be said of what is served.")
    elif served < LEAST_REQUESTS:
        reasons.append(
            f"{served:,.0f} of {LEAST_REQUESTS:.0f} requests in service in {scene.window} that a verdict takes: run "
            f"again under load, or with --for {span:.0f}."
        )
    few = [one for one in judged if one.outcome.verdict == "below_floor"]
    return (
        *reasons,
        *(f"{one.rule.id} is above its threshold on too little traffic: {one.outcome.coverage}." for one in few),
    )


def _remarks(scene: Scene, judged: list[Judged]) -> list[str]:
    """What was seen and is no incident."""
    figures, remarks = scene.figures, []
    usage, waiting = figures.usage, figures.most("requests_waiting")
    preempted = figures.grown("preemptions_total")
    if usage is not None and usage[1] >= 0.9 and not waiting and not preempted:
        remarks.append(f"the pool is {usage[1]:.0%} full and nobody waits or is preempted: good use, no incident")
    total = sum(series.newest[1] for series in figures.window.series("preemptions_total"))
    if preempted == 0 and total > 0:
        remarks.append(f"{total:,.0f} preemptions since the start and none in {scene.window}: an old event")
    hits, prompts = figures.grown("prefix_hits_total"), figures.grown("prompt_tokens_total")
    if hits is not None and prompts:
        beside = f", with {preempted:,.0f} preemptions that count their own blocks as hits" if preempted else ""
        remarks.append(
            f"prefix hits {hits / prompts:.1%} ({hits:,.0f} of {prompts:,.0f} prompt tokens, {scene.window}){beside}: "
            "whether that is low depends on the workload: judged against its own past only"
        )
    resets = figures.resets("requests_finished_total") + figures.resets("prompt_tokens_total")
    if resets:
        remarks.append("counters were reset in the window: growth before and after is added up")
    shortened = [one for one in judged if one.usual_s is not None]
    if shortened:
        remarks.append(f"{len(shortened)} rules were judged on {scene.window} in place of their own windows")
    return remarks
