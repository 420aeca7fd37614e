"""Random histories of the KV cache against a model of plain dicts and a shadow of what every slot must hold.

Fifty histories of 2,000 steps with the prefix cache, in parts that can run side by side. To see the shortest history
that fails, set KV_MACHINE_SHRINK=1 (minutes).
"""

from __future__ import annotations

import os

import pytest

from tests.engine_core.kv_histories import machine_with, run_histories

SHRINK = os.environ.get("KV_MACHINE_SHRINK") == "1"


@pytest.mark.parametrize("part", range(5))
def test_histories_with_prefix_caching(part: int) -> None:
    machine = machine_with()
    run_histories(machine, examples=10, steps=2000, start=part, shrink=SHRINK)
    assert sum(steps >= 2000 for steps in machine.steps_of_histories) >= 10, "fewer or shorter than they claim"
    assert min(machine.seen.values()) > 0, f"something never happened: {machine.seen}"


@pytest.mark.parametrize("fork_sharing", [True, False])
def test_histories_without_prefix_caching(fork_sharing: bool) -> None:
    machine = machine_with(caching=False, fork_sharing=fork_sharing)
    run_histories(machine, examples=5, steps=400, start=0, shrink=SHRINK)
    assert sum(steps >= 400 for steps in machine.steps_of_histories) >= 5
