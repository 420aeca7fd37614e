"""What `--engine-fault` makes of an engine: incidents that have no cause but a fault, for replays of their alerts.

Locked by --allow-unsafe-replay. `stall`: a step that never returns, as a rank that waits for another. `memory_creep`:
every step keeps a little memory. `block_leak` is the scheduler's: each request that ends keeps its first KV block.
"""

from __future__ import annotations

import time

STALL_AFTER_STEPS = 40
CREEP_BYTES = 16 * 1024


class StepFaults:
    """Faults of the engine's step; call `before_step` in its thread."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._steps = 0
        self._kept: list[bytearray] = []

    def before_step(self) -> None:
        """Hangs, keeps memory, or does nothing."""
        self._steps += 1
        if self._fault == "memory_creep":
            self._kept.append(bytearray(CREEP_BYTES))
        while self._fault == "stall" and self._steps > STALL_AFTER_STEPS:
            time.sleep(1.0)
