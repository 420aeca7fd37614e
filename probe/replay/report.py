"""The report of a replay: one JSON object, and its summary for people.

Keys: scenario, title, replay_id, target, reproduced, verified, alerts, runbook, changes, steps, repair, refused,
checks, before, after, engine_exit, article_case, windows, time_scale, load, duration_s; "error" when it could not be
carried out. An exercise may add keys of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from probe.replay.observation import Check, Observation
from probe.store import Alert, Store

if TYPE_CHECKING:
    from probe.replay.scenario import Scenario


def blank(scenario: Scenario, target: str, replay_id: str, remedy: bool) -> dict[str, Any]:
    """The report before anything was done: nothing reproduced, nothing verified."""
    return {
        "scenario": scenario.id,
        "title": scenario.title,
        "replay_id": replay_id,
        "target": target,
        "remedy": remedy,
        "reproduced": False,
        "alerts": [],
        "runbook": scenario.runbook,
        "recommendation": None,
        "changes": [],
        "steps": [],
        "repair": None,
        "refused": [],
        "applied": False,
        "verified": False,
        "checks": {},
        "before": None,
        "after": None,
        "engine_exit": None,
        "load": None,
        "time_scale": scenario.time_scale,
        "windows": {},
        "article_case": dict(scenario.article_case),
        "duration_s": None,
    }


def alert_data(alert: Alert) -> dict[str, Any]:
    """One alert as the report shows it: value with numerator and denominator, window, state and times."""
    return {
        "rule": alert.rule,
        "value": alert.value,
        "threshold": alert.threshold,
        "state": alert.state,
        "numerator": alert.numerator,
        "denominator": alert.denominator,
        "window_s": alert.window_s,
        "summary": alert.summary,
        "firing_at": alert.firing_at,
        "resolved_at": alert.resolved_at,
    }


def alerts(store: Store, target: str, rule: str) -> list[dict[str, Any]]:
    """All alerts of the target that fired, the scenario's own first, then by time."""
    fired = [a for a in store.alerts.history(target=target) if a.firing_at is not None]
    return [alert_data(a) for a in sorted(fired, key=lambda a: (a.rule != rule, a.pending_at))]


def with_alert(observation: Observation, alert: Alert | None, *, refired: bool = False) -> Observation:
    """The observation with the scenario's alert in it."""
    return replace(observation, alert=None if alert is None else alert_data(alert), refired=refired)


def phase(observation: Observation, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`before` or `after`: the figures of one run, flat where a table shows them."""
    plan = facts.get("memory_plan") or {}
    load = observation.load.to_dict() if observation.load else {}
    flags = facts.get("flags") or {}
    return {
        "completed": load.get("completed"),
        "failed": load.get("failed"),
        "not_sent": load.get("not_sent"),
        "errors": load.get("errors"),
        "output_tokens_per_s": load.get("output_tokens_per_s"),
        "ttft_s": load.get("ttft_s"),
        "itl_s": load.get("itl_s"),
        "e2e_s": load.get("e2e_s"),
        "load_duration_s": load.get("duration_s"),
        **observation.metrics,
        **_quality(observation.quality),
        **_isolation(observation.isolation),
        "engine_exit": None if observation.engine_exit is None else observation.engine_exit.get("message"),
        "kv_cache_dtype": plan.get("kv_cache_dtype"),
        "kv_bytes_per_token": plan.get("kv_bytes_per_token"),
        "kv_cache_bytes": plan.get("kv_cache_bytes"),
        "kv_cache_size_tokens": plan.get("kv_cache_size_tokens"),
        "activation_peak_bytes": plan.get("activation_peak_bytes"),
        "weights_bytes": plan.get("weights_bytes"),
        "device_memory_bytes": plan.get("device_memory_bytes"),
        "max_num_seqs": flags.get("--max-num-seqs"),
        "max_num_batched_tokens": flags.get("--max-num-batched-tokens"),
        "gpu_memory_utilization": flags.get("--gpu-memory-utilization"),
        "kv_cache_memory_bytes": flags.get("--kv-cache-memory-bytes"),
    }


def _quality(quality: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of a quality run that stand in one row; drops are shares, against full precision."""
    if quality is None:
        return {}
    overall, against, likelihood = (quality.get(key) or {} for key in ("overall", "against", "likelihood"))
    return {
        "items": overall.get("items"),
        "accuracy": overall.get("accuracy"),
        "accuracy_low": overall.get("low"),
        "accuracy_high": overall.get("high"),
        "invalid": overall.get("invalid"),
        "quality_drop": against.get("drop"),
        "quality_drop_low": against.get("low"),
        "quality_drop_high": against.get("high"),
        "mean_kl": likelihood.get("mean_kl"),
        "top1_agreement": likelihood.get("top1_agreement"),
    }


def _isolation(isolation: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of an attack that stand in one row, with the first thing it got."""
    if isolation is None:
        return {}
    first: Mapping[str, Any] = next(iter(isolation["examples"]), {})
    return {
        "cross_session_requests": isolation["requests"],
        "breaches": isolation["breaches"],
        "breach_rate": isolation["breach_rate"],
        "breach_rate_upper_bound": isolation["upper_bound"],
        "legit_hit_rate": isolation["legit"]["rate"],
        "hit_rate_lost_to_isolation": isolation["engine"]["hit_rate_lost"],
        "leaked": first.get("leaked"),
        "leak": first.get("sentence"),
    }


def load_sentence(observation: Observation) -> str:
    """What a load came to, in a line."""
    load, metrics = observation.load, observation.metrics
    if load is None:
        return "nothing was sent"
    parts = [f"{load.completed} of {load.total} completed, {load.failed} failed in {load.duration_s:.1f} s"]
    if metrics.get("preemptions") is not None:
        parts.append(f"{metrics['preemptions']:g} preemptions, {metrics['finished']} finished")
    if observation.engine_exit is not None:
        parts.append(f"engine exit: {observation.engine_exit.get('message')}")
    return "; ".join(parts)


def sentence(checks: Sequence[Check], word: str) -> str:
    """`reproduced` or `not reproduced: …` with the conditions that were not met."""
    failed = [f"{c.name}: {c.measured}, expected {c.expected}" for c in checks if not c.ok]
    return word if not failed else f"not {word}: {'; '.join(failed)}"


def summary(result: Mapping[str, Any]) -> str:
    """The report in a few lines."""
    lines = [
        f"{result['scenario']}: {result['title']}",
        f"  reproduced  {_yes(result['reproduced'])}",
    ]
    if leak := (result["before"] or {}).get("leak"):
        lines.append(f"  leak        {leak}")
    lines += [
        f"  alert       {alert['rule']} {alert['value']} (threshold {alert['threshold']}), {alert['state']}"
        for alert in result["alerts"]
    ]
    lines.append(f"  runbook     {result['runbook']}")
    for change in result["changes"]:
        to = "removed" if change["to"] is None else change["to"]
        lines.append(f"  change      {change['flag']} {change['from']} -> {to}: {change['why']}")
    if result.get("repair"):
        lines.append(f"  step        {result['repair']}")
    for phase_checks in result["checks"].values():
        for check in phase_checks:
            mark = "ok" if check["ok"] else "NO"
            lines.append(f"  check {mark:>4}  {check['name']}: {check['measured']} (expected {check['expected']})")
    lines.append(f"  verified    {_yes(result['verified'])} in {result['duration_s']} s, replay {result['replay_id']}")
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
