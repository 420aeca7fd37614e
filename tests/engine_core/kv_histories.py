"""Plays histories of `kv_machine`, long ones too, always the same for one start."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.constants_ast import Constants
from hypothesis.stateful import run_state_machine_as_test

from engine.cache_identity import CacheIdentity
from tests.engine_core.kv_machine import KVCacheMachine


@contextlib.contextmanager
def long_and_always_the_same() -> Iterator[None]:
    """Lifts two habits of Hypothesis for the histories played inside.

    It ends a history when its choices fill 8 KiB, long before 2,000 steps; and it draws numbers that it finds in the
    source of whatever modules are loaded, so that a history would depend on the tests that ran before.
    """
    providers = "hypothesis.internal.conjecture.providers"
    with (
        mock.patch("hypothesis.internal.conjecture.engine.BUFFER_SIZE", 2**20),
        mock.patch("hypothesis.stateful.BUFFER_SIZE", 2**20),
        mock.patch(f"{providers}._get_local_constants", Constants),
        mock.patch(f"{providers}.CONSTANTS_CACHE", {}),
    ):
        yield


def machine_with(
    caching: bool = True, crowd: Sequence[CacheIdentity] = (), block_size: int | None = None, **options: Any
) -> type[KVCacheMachine]:
    """A machine of its own, with these clients and options of the manager, whatever a history draws."""
    own: dict[str, Any] = {"caching": caching, "options": options, "steps_of_histories": [], "seen": Counter()}
    if "ttl" in options:
        own["ttls"] = [options["ttl"]]
    if crowd:
        own["crowds"] = [list(crowd)]
    if block_size is not None:
        own["block_sizes"] = [block_size]
    return type("KVCacheMachine", (KVCacheMachine,), own)


def run_histories(
    machine: type[KVCacheMachine], *, examples: int, steps: int, start: int, shrink: bool = False
) -> None:
    """Plays `examples` histories of `steps` steps, always the same for one `start`; raises what the machine raises.

    `machine.steps_of_histories` says how long they were, `machine.seen` what happened. Shrinking a failure can take
    minutes; with `shrink` false the history that failed is shown as it was.
    """
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with long_and_always_the_same():
        run_state_machine_as_test(seed(start)(machine), settings=chosen, _min_steps=steps)
