"""Wilson's score interval, where the testbed's measures and the probes above find it."""

from __future__ import annotations

from kernels.bench.interval import Accuracy, wilson

__all__ = ["Accuracy", "wilson"]
