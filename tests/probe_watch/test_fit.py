"""Rules fitted to engines: bounds that are buckets there, labels that are carried, reasons where a rule would lie."""

from __future__ import annotations

import pytest

from probe.alerts.backtest import BacktestError, History
from probe.alerts.evaluator import TargetEvaluator
from probe.alerts.expr import Aggregate, Expr, Increase, leaves, rebuilt
from probe.alerts.fit import UnfitError, fitted
from probe.alerts.rule import Rule, ValueSignal
from probe.alerts.rules import DEFAULT_RULES, ENGINE_STALL, ITL_SLO_BURN, KV_SATURATED, OOM, TTFT_SLO_BURN
from probe.dialects import load_dialect
from probe.store import Sample, Target

T0 = 1_800_000_000.0


def bounds(rule: Rule) -> set[str]:
    assert isinstance(rule.signal, ValueSignal)
    found = (leaf for part in rule.signal.parts for leaf in leaves(part) if isinstance(leaf, Increase))
    return {value for leaf in found for name, value in leaf.match if name == "le"}


@pytest.mark.parametrize(("engine", "bound"), [("vllm", "2.5"), ("kvoncall", "2.5"), ("sglang", "2"), ("triton", "2")])
def test_latency_bounds_are_buckets_of_the_engine(engine: str, bound: str) -> None:
    rule = fitted(TTFT_SLO_BURN, load_dialect(engine))
    assert bounds(rule) == {bound}
    assert isinstance(rule.signal, ValueSignal)
    assert f"within {bound} s" in rule.signal.sentence


@pytest.mark.parametrize(
    ("rule", "engine", "why"),
    [
        (TTFT_SLO_BURN, "tgi", "no bucket bound"),
        (ITL_SLO_BURN, "triton", "no bucket bound"),
        (ENGINE_STALL, "tgi", "a long answer would look like a stall"),
        (ENGINE_STALL, "tensorrt-llm", "a long answer would look like a stall"),
    ],
)
def test_a_rule_that_would_mislead_does_not_fit(rule: Rule, engine: str, why: str) -> None:
    with pytest.raises(UnfitError, match=why):
        fitted(rule, load_dialect(engine))
    target = Target(1, "t", "http://h:1", "external", engine, [], {}, 10.0, 1.0, True, T0)
    evaluator = TargetEvaluator(target, [rule])
    evaluator.add_samples([Sample("t", "up", {}, T0, 1.0)])
    (update,) = evaluator.evaluate(T0)
    assert (update.reading.verdict, update.reading.state) == ("no_data", "inactive")
    assert update.reading.coverage.startswith(f"not judged on {engine}: ")
    with pytest.raises(BacktestError, match="not judged on"):
        History(rule, target, [], [], T0, T0 + 60)


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.id)
def test_vllm_takes_every_rule_as_it_is(rule: Rule) -> None:
    assert fitted(rule, load_dialect("vllm", "0.33.0")) == rule


def test_a_label_that_not_all_metrics_carry_is_left_out() -> None:
    """SGLang counts some metrics by replica and some not: one of each would never meet."""
    rule = fitted(ENGINE_STALL, load_dialect("sglang", "0.5.23"))
    assert isinstance(rule.signal, ValueSignal)
    assert rule.signal.per == ()
    assert not any(part.by for part in parts(rule.signal.value))
    assert fitted(KV_SATURATED, load_dialect("sglang", "0.5.23")) == KV_SATURATED
    assert fitted(OOM, load_dialect("tgi")) == OOM


def parts(expr: Expr) -> list[Aggregate]:
    """The aggregations of an expression."""
    found: list[Aggregate] = []

    def keep(part: Expr) -> Expr:
        if isinstance(part, Aggregate):
            found.append(part)
        return part

    rebuilt(expr, keep)
    assert found
    return found
