"""Checks of what is watched around a server: its metrics, alerts, isolation probe and drills."""

from __future__ import annotations

from collections.abc import Mapping

from runbooks.flags import version_key, why_absent
from runbooks.knowledge.checklist_asked import DONE, NO_TARGET, NOT_HERE, OPEN, Answer, Asked, Check, unknown
from runbooks.knowledge.text import Text

_READ = ("present", "renamed")
_SALT_SINCE = (0, 9)
NO_REPORT = unknown("the report on the target's metrics", "目标的指标报告")


def _required(asked: Asked) -> Answer:
    rows = (asked.coverage or {}).get("rows")
    if not rows:
        return NO_REPORT
    missing = [row["canonical"] for row in rows if row.get("required") and row.get("status") not in _READ]
    if missing:
        return Answer(OPEN, "open", {"names": ", ".join(missing)})
    read = sum(row.get("status") in _READ for row in rows)
    return Answer(DONE, "done", {"count": read, "all": len(rows)})


def _metric(*names: str) -> Check:
    """Whether all of these are read; the sentence is about the first that is not."""

    def check(asked: Asked) -> Answer:
        rows = [asked.row(name) for name in names]
        if all(row is None for row in rows):
            return NO_REPORT
        for name, row in zip(names, rows, strict=True):
            status = row.get("status") if row is not None else "missing"
            if status == "not exposed by this engine":
                return Answer(NOT_HERE, "not_there", {"name": name, "engine": asked.title})
            if status not in _READ:
                todo = (row or {}).get("todo") or ""
                return Answer(OPEN, "open", {"name": name, "status": status, "todo": todo})
        exposed = ", ".join(str((row or {}).get("exposed") or name) for name, row in zip(names, rows, strict=True))
        return Answer(DONE, "done", {"name": ", ".join(names), "exposed": exposed})

    return check


def _residency(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    row = asked.row("kv_block_evictions_total") or asked.row("kv_evicted_tokens_total")
    if row is not None and row.get("status") in _READ:
        return Answer(DONE, "counted", {"engine": asked.title})
    flag = "--kv-cache-metrics"
    if why_absent(asked.engine, asked.version, flag) is not None:
        return Answer(NOT_HERE, "no_flag", {"engine": asked.title, "version": asked.version or ""})
    value = asked.facts.flags.get(flag)
    seen = asked.row("kv_block_idle_before_evict_seconds")
    if value or (seen is not None and seen.get("status") in _READ):
        return Answer(DONE, "done", {"flag": flag})
    return Answer(OPEN, "open", {"flag": flag})


def _alert_rules(asked: Asked) -> Answer:
    exported, receivers = asked.watch.get("rules_exported"), asked.watch.get("receivers")
    if exported is None and receivers is None:
        return unknown("whether rules were exported or a receiver is set up", "是否导出规则或配置接收器")
    if not exported and not receivers:
        return Answer(OPEN, "open")
    what = Text("Rules are exported", "规则已导出") if exported else Text("", "")
    if receivers:
        count = Text(f"{receivers} receivers are set up", f"已配置 {receivers} 个接收器")
        what = Text(f"{what.en}; {count.en}", f"{what.zh}；{count.zh}") if exported else count
    return Answer(DONE, "done", {"what": what})


def _isolation(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    breach = asked.facts.isolation
    if breach is not None and (breach.kind is not None or breach.breaches):
        return Answer(OPEN, "breached", {"kind": breach.kind or str(breach.breaches)})
    if asked.engine == "vllm" and asked.version is not None and version_key(asked.version) < _SALT_SINCE:
        return Answer(OPEN, "absent", {"version": asked.version})
    if asked.watch.get("isolation_rounds"):
        return Answer(DONE, "probed")
    return unknown("no isolation probe was run", "未运行隔离探测")


def _drills(asked: Asked) -> Answer:
    passed = asked.watch.get("drills_passed")
    if passed is None:
        return unknown("whether drills were run", "是否做过演练")
    return Answer(DONE if passed else OPEN, "done" if passed else "open", {"count": passed})


CHECKS: Mapping[str, Check] = {
    "required-metrics": _required,
    "kv-usage-metric": _metric("kv_usage_ratio"),
    "preemption-metric": _metric("preemptions_total"),
    "prefix-metric": _metric("prefix_hits_total", "prefix_queries_total"),
    "latency-metrics": _metric("ttft_seconds", "itl_seconds"),
    "oom-events": _metric("process_start_time_seconds"),
    "residency": _residency,
    "alert-rules": _alert_rules,
    "tenant-isolation": _isolation,
    "drills": _drills,
}
