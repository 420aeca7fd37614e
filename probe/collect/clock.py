"""The time of samples and evaluations: wall time that never goes back, whatever is done to the machine's clock.

Backward steps are not followed: this clock goes on from where it was, 1% slower, until the wall clock has caught up.
Forward steps (also what a suspended machine wakes up with) are followed at once. Steps above 5 s are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable

JUMP_S = 5.0
CATCH_UP = 0.01


class SteadyClock:
    """`now` in Unix seconds. `jumped` gives the seconds of a step once: above 0 forward, below 0 back."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._read_at = monotonic()
        self._now = self._wall_was = wall()
        self._jump: float | None = None

    def now(self) -> float:
        """The time, never before a time it gave earlier."""
        wall, read_at = self._wall(), self._monotonic()
        elapsed = read_at - self._read_at
        step = wall - self._wall_was - elapsed
        if abs(step) > JUMP_S:
            self._jump = (self._jump or 0.0) + step
        self._read_at, self._wall_was = read_at, wall
        self._now = max(wall, self._now + elapsed * (1 - CATCH_UP))
        return self._now

    def not_before(self, ts: float) -> float:
        """Go on from `ts` if this is later than now (the newest stored sample, say); returns by how much it was."""
        ahead = ts - self.now()
        if ahead > 0:
            self._now = ts
        return max(0.0, ahead)

    @property
    def ahead_s(self) -> float:
        """How far this clock is ahead of the wall clock."""
        return max(0.0, self.now() - self._wall())

    def jumped(self) -> float | None:
        """The step since this was last asked, if there was one."""
        self.now()
        jump, self._jump = self._jump, None
        return jump
