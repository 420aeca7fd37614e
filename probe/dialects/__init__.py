"""The one place that knows an engine's metric names: data files that map them to canonical names.

A dialect is also the list of what is stored: what it does not name is dropped, so that an engine's next
release cannot flood the store. Canonical histograms become `NAME_sum`, `NAME_count` and, where `buckets` is
set, `NAME_bucket` with the label `le`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# The embedded engine speaks vLLM's names.
_DIALECT_OF_ENGINE = {"kvoncall": "vllm", "vllm": "vllm"}


class DialectError(ValueError):
    """There is no dialect for an engine; the message is one sentence for the user."""


@dataclass(frozen=True)
class CanonicalMetric:
    """One metric we keep: `sources` are its exposed names, the preferred one first."""

    name: str
    type: str  # gauge, counter or histogram
    sources: tuple[str, ...]
    buckets: bool = False


@dataclass(frozen=True)
class Dialect:
    """What an engine exposes, in canonical names. `info` is the metric whose labels are its configuration."""

    engine: str
    metrics: tuple[CanonicalMetric, ...]
    required: tuple[str, ...]
    info: str | None

    @property
    def counters(self) -> frozenset[str]:
        """Canonical series names that only grow within one process."""
        names: set[str] = set()
        for metric in self.metrics:
            if metric.type == "counter":
                names.add(metric.name)
            if metric.type == "histogram":
                names |= {f"{metric.name}_sum", f"{metric.name}_count", f"{metric.name}_bucket"}
        return frozenset(names)


@cache
def load_dialect(engine: str) -> Dialect:
    """The dialect of an engine ("vllm", "kvoncall"); raises `DialectError` for one we do not know."""
    name = _DIALECT_OF_ENGINE.get(engine)
    if name is None:
        known = ", ".join(sorted(_DIALECT_OF_ENGINE))
        raise DialectError(f"The metrics of engine {engine!r} are not known: use one of {known}.")
    data = json.loads(files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    metrics = tuple(
        CanonicalMetric(key, spec["type"], tuple(spec["sources"]), bool(spec.get("buckets", False)))
        for key, spec in data["metrics"].items()
    )
    return Dialect(data["engine"], metrics, tuple(data["required"]), data.get("info"))
