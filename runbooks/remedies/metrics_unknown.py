"""Metrics unknown: the target answers, and what alerts need is not among it. A blind spot, not an outage."""

from __future__ import annotations

from runbooks.changes import Draft, Recommendation
from runbooks.engine_names import SGLANG, TENSORRT_LLM, VLLM
from runbooks.facts import TargetFacts
from runbooks.flags import catalog, version_key

ID = "metrics-unknown"
HIDDEN, NO_STATS, ENABLE = "--show-hidden-metrics-for-version", "--disable-log-stats", "--enable-metrics"


def advise(facts: TargetFacts) -> Recommendation:
    """What switches the missing metrics on, by engine and version."""
    draft = Draft(ID, facts)
    missing = sorted(name for name, status in facts.coverage.items() if status == "missing")
    hidden = sorted(name for name, status in facts.coverage.items() if status == "hidden")
    if facts.engine == SGLANG:
        _switch_on(draft)
    elif facts.engine == TENSORRT_LLM:
        draft.step(
            "Set return_perf_metrics: true in the YAML, and for iterations enable_iter_perf_stats: true; scrape "
            "/prometheus/metrics, /metrics is JSON"
        )
    else:
        _stats_on(draft)
        if facts.engine == VLLM:
            _hidden_again(draft, hidden)
    _newer_than_known(draft)
    draft.step(
        "Look at what is served: `curl -s URL/metrics | grep -c ^# HELP`; a proxy or a sidecar may answer in the "
        "engine's place"
    )
    if not facts.coverage:
        draft.lacks("the report of which metrics the target exposes: attach it again")
    names = ", ".join(hidden + missing)
    what = f"Not exposed: {names}" if names else "Which metrics are missing is in the target's report"
    if draft.changes:
        return draft.done(f"{what}. " + ", ".join(f"{c.flag} {_word(c.to)}" for c in draft.changes))
    return draft.done(f"{what}. No flag can be named that would bring them; the steps say where to look")


def _word(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _switch_on(draft: Draft) -> None:
    draft.propose(
        ENABLE,
        True,
        why="SGLang exposes 0 metrics of its own without it; off is the default",
        expected="sglang:num_running_reqs and the rest on /metrics",
        cost="none worth naming",
        verify="sglang:num_running_reqs >= 0",
    )


def _stats_on(draft: Draft) -> None:
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
            expected="vllm:num_requests_running and the rest on /metrics",
            cost="a log line of statistics every few seconds",
            verify="vllm:num_requests_running >= 0",
        )


def _hidden_again(draft: Draft, hidden: list[str]) -> None:
    """vLLM takes only the minor before its own; what was hidden earlier is gone."""
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
        why=f"{len(hidden)} of the metrics are hidden in {draft.facts.version}: {', '.join(hidden)}; only the minor "
        "before brings them back",
        expected="the old names for one more minor",
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
