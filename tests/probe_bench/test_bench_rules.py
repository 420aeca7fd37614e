"""The benchmark of rules evaluates all of them on full windows; its speed is not for a test to judge."""

from __future__ import annotations

from probe.alerts.rules import DEFAULT_RULES
from probe.bench import rules


def test_windows_are_full_and_every_rule_but_the_canarys_has_data() -> None:
    lines: list[str] = []
    found = rules.bench_rules(report=lines.append, targets=2, rounds=2)
    assert lines == ["all rules on 2 targets with full windows"]
    assert (found["rules"], found["rules_with_data"]) == (len(DEFAULT_RULES), len(DEFAULT_RULES) - 1)
    assert found["ms_by_rule"].keys() == {rule.id for rule in DEFAULT_RULES}
    day, six_hours, hour = (seconds / rules.INTERVAL_S for seconds in (86_400, 21_600, 3_600))
    least = 2 * day + 4 * six_hours + hour  # hits and prompts; buckets and counts of two latencies; a GPU
    assert least < found["points_per_target"] < 1.4 * least
    assert found["kib_per_target"] == round(found["points_per_target"] * 16 / 1024)
    low, high = found["evaluation_ms_min_max"]
    assert 0 < low <= found["evaluation_ms"] <= high
