"""`kvoncall backtest`: a rule on the history of a stored target, or of one that a Prometheus server scrapes."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence

from probe.alerts import words
from probe.alerts.backtest import Backtest, BacktestError, History, needed_metrics
from probe.alerts.evaluate import LIFECYCLE_KINDS
from probe.alerts.rule import Rule
from probe.alerts.rules import DEFAULT_RULES
from probe.store import Store, Target

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("rule", metavar="RULE", help="a rule's id (`kvoncall rules list` names them)")
    add("--since", default="7d", metavar="SPAN", help="how far back: 90m, 24h, 7d (default: 7d)")
    add("--target", metavar="NAME", help="a stored target (default: every watched one)")
    add("--prometheus", metavar="URL", help="read the history of engines that this Prometheus server scrapes")
    add("--prometheus-auth-env", metavar="NAME", help="environment variable with its Authorization header")
    add("--threshold", type=float, metavar="X", help="another threshold than the rule's")
    add("--hold", metavar="SPAN", help="another hold time than the rule's: 0s, 5m")
    add("--step", metavar="SPAN", help="from one evaluation to the next (default: the scrape interval)")


def find_rule(rule_id: str, rules: Sequence[Rule] = DEFAULT_RULES) -> Rule:
    """A rule by its id; raises `BacktestError` naming those there are."""
    for rule in rules:
        if rule.id == rule_id:
            return rule
    raise BacktestError(f"there is no rule {rule_id!r}; there are: {', '.join(rule.id for rule in rules)}")


def span_s(text: str) -> float:
    """ "90m" as seconds; raises `BacktestError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not match:
        raise BacktestError(f"{text!r} is no span of time: write a number with s, m, h, d or w, such as 7d")
    return float(match[1]) * UNITS_S[match[2]]


def history(store: Store, rule: Rule, target: Target, since: float, until: float, step_s: float | None) -> History:
    """A rule's history on a stored target; raises `BacktestError` when nothing is stored of it."""
    reach = needed_metrics(rule)
    store.samples.flush()
    samples = [
        sample
        for metric, span in reach.items()
        for sample in store.samples.recent(target.name, [metric], since - span)
        if sample.ts <= until
    ]
    if not samples:
        raise BacktestError(f"nothing is stored of {target.name} since then: choose a later --since or another target")
    samples.sort(key=lambda s: s.ts)
    horizon = max(reach.values())
    events = store.events.recent(None, target.name, LIFECYCLE_KINDS, since - horizon)
    # No evaluation before the first sample: there was nothing to watch.
    first = min(sample.ts for sample in samples)
    return History(rule, target, samples, events, max(since, first), until, step_s)


def run(options: argparse.Namespace, store: Store) -> list[Backtest]:
    """One result a target; raises `BacktestError`."""
    rule = find_rule(options.rule)
    until = time.time()
    since = until - span_s(options.since)
    if options.target:
        chosen = store.targets.get(options.target)
        if chosen is None:
            raise BacktestError(f"there is no target {options.target!r} in this store")
        targets = [chosen]
    else:
        targets = store.targets.list()
    if not targets:
        raise BacktestError("this store watches no target: give --target NAME")
    step_s = span_s(options.step) if options.step else None
    hold_s = span_s(options.hold) if options.hold else None
    return [history(store, rule, t, since, until, step_s).judge(options.threshold, hold_s) for t in targets]


def text(result: Backtest) -> str:
    """A result for people."""
    rule = result.rule
    lines = [
        f"{rule.id} on {result.target}: {rule.comparison} {rule.threshold:g}, hold {words.seconds(rule.hold_s)}",
        f"  from {_clock(result.since)} to {_clock(result.until)}, {words.seconds(result.covered_s)} with data",
    ]
    for firing in result.firings:
        ended = f"for {words.seconds(firing.resolved_at - firing.firing_at)}" if firing.resolved_at else "to the end"
        lead = ""
        if firing.lead_s is not None:
            when = "before" if firing.lead_s >= 0 else "after"
            lead = f", {words.seconds(abs(firing.lead_s))} {when} users felt it"
        lines.append(f"  fired {_clock(firing.firing_at)} {ended}, worst {words.number(firing.worst, 'count')}{lead}")
    per_week = result.pages_per_week
    rate = "too little data for a weekly figure" if per_week is None else f"{per_week:.1f} pages a week"
    fired = f"{len(result.firings)} time{'' if len(result.firings) == 1 else 's'}"
    breaches = "breach" if result.visible_breaches == 1 else "breaches"
    felt = f"{result.visible_breaches} {breaches}, {result.missed_breaches} without this alert"
    lines.append(f"  {fired}, {rate}; users felt {felt}")
    return "\n".join(lines)


def _clock(ts: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ts))
