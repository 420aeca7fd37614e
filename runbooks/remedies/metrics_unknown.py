"""Metrics unknown: the target answers, and what alerts need is not among it. A blind spot, not an outage."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM, VLLM, has_vllm_flags
from runbooks.facts import TargetFacts
from runbooks.flags import catalog, version_key

ID = "metrics-unknown"
HIDDEN, NO_STATS, ENABLE = "--show-hidden-metrics-for-version", "--disable-log-stats", "--enable-metrics"


def advise(facts: TargetFacts) -> Recommendation:
    """What switches the missing metrics on, by engine and version."""
    draft = Draft(ID, facts)
    if facts.engine == SGLANG:
        _switch_on(draft)
    elif facts.engine == TENSORRT_LLM:
        draft.step(
            "Set return_perf_metrics: true in the YAML, and enable_iter_perf_stats: true for those of iterations; "
            "scrape /prometheus/metrics, as /metrics is JSON"
        )
    elif has_vllm_flags(facts.engine):
        stats_on(draft)
        if facts.engine == VLLM:
            hidden_again(draft)
    for metric in facts.unread or ():
        if metric.todo and (metric.required or metric.status == "hidden"):
            draft.step(f"{metric.name}: {metric.todo}")
    _newer_than_known(draft)
    draft.step("See who answers: `curl -s URL/metrics | head`; a proxy or a sidecar may stand in the engine's place")
    if facts.unread is None:
        draft.lacks("the report on which metrics the target exposes: attach it again")
    names = ", ".join(metric.name for metric in facts.unread or () if metric.required)
    what = f"Not read: {names}" if names else "Which metrics are missing is in the target's report"
    if draft.changes:
        return draft.done(f"{what}. " + ", ".join(_in_words(c.flag, c.to) for c in draft.changes))
    return draft.done(f"{what}. No flag can be named that would bring them; the steps say where to look")


def _in_words(flag: str, to: object) -> str:
    if to is None:
        return f"remove {flag}"
    return f"set {flag}" if to is True else f"set {flag} {to}"


def _switch_on(draft: Draft) -> None:
    draft.propose(
        ENABLE,
        True,
        why="SGLang exposes 0 metrics of its own without it; off is the default",
        expected="from 0 to all of the engine's series on /metrics, sglang:num_running_reqs first",
        cost="none worth naming",
        verify="sglang:num_running_reqs >= 0",
    )


def stats_on(draft: Draft) -> None:
    """Proposes statistics again where they are known to be off."""
    now = draft.facts.flags.get(NO_STATS)
    if now is None:
        draft.lacks(f"whether {NO_STATS} is set: it takes the engine's series away")
    elif not now:
        draft.refuse(NO_STATS, None, "no change: statistics are on already")
    else:
        draft.propose(
            NO_STATS,
            None,
            why="it is set, and leaves 0 of the engine's series on /metrics",
            expected="from 0 to all of the engine's series on /metrics, vllm:num_requests_running first",
            cost="a log line of statistics every few seconds",
            verify="vllm:num_requests_running >= 0",
        )


def hidden_again(draft: Draft) -> None:
    """vLLM takes only the minor before its own; what was hidden earlier is gone."""
    hidden = [metric.name for metric in draft.facts.unread or () if HIDDEN in metric.todo]
    version = version_key(draft.facts.version or "")
    if len(version) < 2 or version[1] == 0:
        draft.lacks(f"the version: {HIDDEN} takes the minor before it")
        return
    before = f"{version[0]}.{version[1] - 1}"
    if not hidden:
        draft.refuse(HIDDEN, before, "will not help alerts: none of what they need is hidden; it helps old dashboards")
        return
    draft.propose(
        HIDDEN,
        before,
        why=f"{draft.facts.version} hides {', '.join(hidden)}; {before}, the minor before, brings them back",
        expected=f"{len(hidden)} series back, for 1 more minor",
        cost="gone for good with the next minor: move to the new names",
        verify="up == 1",
    )


def _newer_than_known(draft: Draft) -> None:
    newest, version = catalog(draft.facts.engine).get("newest"), draft.facts.version
    if newest is None or version is None or version_key(version) <= version_key(newest):
        return
    draft.step(
        f"{draft.facts.engine} {version} is newer than {newest}, the newest read here: names may have changed. Upgrade "
        "kvoncall"
    )
