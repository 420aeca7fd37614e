"""Our arithmetic, our conditions and our states against Prometheus' own, on random traces.

KVONCALL_ORACLE_TRACES sets how many traces (each eighth is a day long); run with -s for the figures.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from probe.alerts.arithmetic import Moment, Vector, evaluate
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.expr import Expr, Quantile
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.rules import DEFAULT_RULES
from probe.alerts.window import Window
from probe.export.alerts import Options, select
from probe.export.naming import RULE_BREACH, Names, NotExposedError
from probe.store import AlertUpdate, Target
from tests.probe_oracle.probes import probes, text_of
from tests.probe_oracle.promtool import Alerting, ask, spelled
from tests.probe_oracle.traces import Key, Labels, Trace, trace

TRACES = int(os.environ.get("KVONCALL_ORACLE_TRACES", "4"))
MINUTES, DAY_MINUTES = 90, 26 * 60
LOOKBACK_S = 300.0  # Prometheus' default
RULES = [rule for rule in DEFAULT_RULES if isinstance(rule.signal, ValueSignal)]
PROBES = 24
AGREE = 1e-9
Said = dict[str, dict[Labels, float]]
pytestmark = pytest.mark.prometheus


@dataclass
class Figures:
    """What was compared, and how it came out."""

    values: Counter[str] = field(default_factory=Counter)
    conditions: Counter[tuple[str, bool]] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    frozen: Counter[str] = field(default_factory=Counter)
    frozen_now: set[str] = field(default_factory=set)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def differs(self, kind: str, by: float) -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), by)

    def tell(self) -> None:
        """For `pytest -s`."""
        conditions = {holds: sum(n for (_, h), n in self.conditions.items() if h == holds) for holds in (True, False)}
        print(f"\n{sum(self.values.values())} values {dict(self.values)}")
        print(f"greatest relative difference {self.worst}")
        print(f"conditions {conditions}, states {dict(self.states)}, frozen for want of data {dict(self.frozen)}")
        print(
            f"held: { ({rule: n for (rule, holds), n in self.conditions.items() if holds}) }; wrong: {len(self.wrong)}"
        )


def moments(found: Trace, windows: Sequence[Window | TargetEvaluator]) -> Iterable[int]:
    """Minute by minute, the samples until then fed to each of `windows`."""
    left = list(reversed(found.scrapes))
    for minute in range(found.minutes + 1):
        while left and left[-1].at <= 60 * minute:
            samples = left.pop().samples()
            for window in windows:
                window.add(samples) if isinstance(window, Window) else window.add_samples(samples)
        yield minute


def apart(ours: float, theirs: float) -> float:
    """Relative difference; 0 for equal infinities and for two that are no numbers."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    if not math.isfinite(ours) or not math.isfinite(theirs):
        return math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs))


def as_told(expr: Expr, theirs: dict[Labels, float]) -> dict[Labels, float]:
    """Prometheus' quantile of nothing is NaN, ours is none."""
    if isinstance(expr, Quantile):
        return {labels: value for labels, value in theirs.items() if not math.isnan(value)}
    return theirs


def compare_values(where: str, kind: str, ours: Vector, theirs: dict[Labels, float], figures: Figures) -> None:
    if ours.keys() != theirs.keys():
        figures.wrong.append(f"{where}: {ours} is not {theirs}")
    for labels in ours.keys() & theirs.keys():
        figures.values[kind] += 1
        difference = apart(ours[labels], theirs[labels])
        figures.differs(kind, difference)
        if difference > AGREE:
            figures.wrong.append(f"{where} {labels}: {ours[labels]!r} is not {theirs[labels]!r}")


def compare_states(where: str, update: AlertUpdate, theirs: str, figures: Figures) -> None:
    """Ours and theirs are equal, but after ours fired on without data: until it ends, or both see it hold again."""
    rule, verdict = update.reading.rule, update.reading.verdict
    ours = "inactive" if update.reading.state == "resolved" else update.reading.state
    both = verdict == "breach" and theirs == "firing"
    if ours == "firing" and (verdict == "no_data" or (rule in figures.frozen_now and not both)):
        figures.frozen_now.add(rule)
        figures.frozen[rule] += 1
        return
    figures.frozen_now.discard(rule)
    figures.states[ours] += 1
    if ours != theirs:
        figures.wrong.append(f"{where}: {ours} is not {theirs} ({update.reading.coverage})")


def judge(
    found: Trace, minute: int, rules: Sequence[Rule], updates: Sequence[AlertUpdate], said: Said, figures: Figures
) -> None:
    """Conditions and states of one minute against `said`."""
    states = {dict(labels)["alertname"]: dict(labels)["alertstate"] for labels in said.get("ALERTS", {})}
    for rule, update in zip(rules, updates, strict=True):
        where = f"trace {found.seed}, minute {minute}, {rule.id}"
        holds = bool(said.get(condition_name(rule)))
        figures.conditions[rule.id, holds] += 1
        if holds != (update.reading.verdict == "breach"):
            figures.wrong.append(f"{where}: {update.reading.verdict}, condition is {holds}")
        compare_states(where, update, states.get(rule.id, "inactive"), figures)


def watch(found: Trace, rules: Sequence[Rule], engine: str) -> TargetEvaluator:
    target = Target(1, "t", "http://h", "external", engine, [], {}, float(found.interval_s), 1.0, True, -1000.0)
    return TargetEvaluator(target, rules)


def condition_name(rule: Rule) -> str:
    return "c:" + rule.id.replace("-", "_")


def alerting(rule: Rule, expr: str) -> Alerting:
    return Alerting(rule.id, expr, rule.hold_s, rule.keep_firing_s)


def against_canonical(found: Trace, folder: Path, figures: Figures) -> None:
    """Random expressions and all rules, over canonical names."""
    asked = probes(np.random.default_rng(found.seed), PROBES)
    evaluator = watch(found, RULES, "kvoncall")
    window = Window(dict.fromkeys({key[0] for scrape in found.scrapes for key in scrape.values} | {"up"}, 7200.0))
    conditions = {condition_name(rule): text_of(rule.condition) for rule in evaluator.rules if rule.condition}
    recorded = {f"o:{i}": text for i, (_, _, text) in enumerate(asked)} | conditions
    alerts = [alerting(rule, conditions[condition_name(rule)]) for rule in evaluator.rules]
    answers = ask(found, recorded, alerts, folder)
    for minute in moments(found, [window, evaluator]):
        said, at = answers[minute], Moment(window, 60.0 * minute, LOOKBACK_S)
        for i, (kind, expr, text) in enumerate(asked):
            where = f"trace {found.seed}, minute {minute}, {text}"
            compare_values(where, kind, evaluate(expr, at), as_told(expr, said.get(f"o:{i}", {})), figures)
        judge(found, minute, evaluator.rules, evaluator.evaluate(60.0 * minute), said, figures)


def against_exported(found: Trace, spec: str, folder: Path, figures: Figures) -> None:
    """The alerts exported for an engine's version, over the names it exposes."""
    chosen = select(Options(dialect=spec, jobs=("j",), scrape_interval_s=float(found.interval_s)))
    exported = [alert for alert in chosen.alerts if alert.told_by_rule and RULE_BREACH not in alert.rule.metrics]
    if found.interval_s == 75:  # not scraped for long is down to us; to Prometheus nothing
        exported = [alert for alert in exported if alert.rule_id != "target-missing"]
    evaluator = watch(found, [alert.rule for alert in exported], chosen.names.dialect.engine)
    recorded = {condition_name(alert.rule): alert.expr for alert in exported}
    alerts = [Alerting(alert.rule_id, alert.expr, alert.hold_s, alert.keep_firing_s) for alert in exported]
    answers = ask(found, recorded, alerts, folder, lambda key: exposed(key, chosen.names))
    for minute in moments(found, [evaluator]):
        judge(found, minute, evaluator.rules, evaluator.evaluate(60.0 * minute), answers[minute], figures)


def exposed(key: Key, names: Names) -> str | None:
    """A canonical series in the names of a dialect's version; None for one that it lacks."""
    metric, labels = key
    renamed = {"engine": names.dialect.engine_label, "model_name": names.dialect.model_label}
    target = (("job", "j"), ("instance", "h:8000"))
    own = tuple((renamed.get(name, name) or name, value) for name, value in labels)
    if metric == "up":
        return spelled((metric, target))
    try:
        source, suffix = names.source(metric)
    except NotExposedError:
        return None
    assert source.factor == 1.0
    assert source.over is None
    return spelled((source.name + suffix, (*target, *own, *source.match.items())))


def test_values_conditions_and_states_are_those_of_prometheus(tmp_path: Path) -> None:
    figures = Figures()
    for seed in range(TRACES):
        found = trace(seed, DAY_MINUTES, most_engines=1) if seed % 8 == 7 else trace(seed, MINUTES)
        against_canonical(found, tmp_path, figures)
    figures.tell()
    assert not figures.wrong, "\n".join(figures.wrong[:20])
    both = {rule.id for rule in RULES if figures.conditions[rule.id, True] and figures.conditions[rule.id, False]}
    assert both == {rule.id for rule in RULES}  # each was seen to hold and not to
    assert {"inactive", "pending", "firing"} == figures.states.keys()


@pytest.mark.parametrize(("spec", "first"), [("vllm@0.33.0", 100), ("sglang", 200), ("kvoncall", 300)])
def test_exported_alerts_do_what_ours_do(spec: str, first: int, tmp_path: Path) -> None:
    figures = Figures()
    for seed in range(first, first + max(1, TRACES // 4)):
        against_exported(trace(seed, MINUTES), spec, tmp_path, figures)
    figures.tell()
    assert not figures.wrong, "\n".join(figures.wrong[:20])
    assert figures.states.keys() == {"inactive", "pending", "firing"}
