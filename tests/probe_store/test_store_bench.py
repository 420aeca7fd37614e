"""`kvoncall bench store` in small: it reads what it wrote, and its figures follow from it."""

from __future__ import annotations

import pytest

from probe.bench import store as bench


def test_figures_of_a_small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DAYS", 1)
    said: list[str] = []
    found = bench.bench_store(report=said.append, targets=2, series=30, minutes=2, rounds=1)
    assert found["samples"] == 2 * 30 * 2 * 12
    assert found["view_30d_points"] == 30 * (24 + 1)  # every series of the target, an hour a point, the last one open
    assert all(value > 0 for value in found.values())
    assert len(said) == 3
