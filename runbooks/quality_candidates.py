"""KV cache formats with the quality and the bytes measured for them on a target's own model.

A candidate is a set of flags. Its fall is paired against full precision on the same questions, in shares. It holds
quality when the fall is at most one point and not beyond doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HOLDS_DROP = 0.01
LAYER_FLAGS = ("--kv-cache-dtype-skip-layers", "--kv-cache-dtype-layers")


@dataclass(frozen=True)
class QualityCandidate:
    """One measured format. `flags` as `engine.config.apply_changes` takes them: None is a flag's default, and so is a
    flag on single layers that is not named.

    `drop` is the fall of accuracy (negative: a rise), `low` and `high` its 95% interval; `mean_kl` in nats a token.
    """

    name: str
    flags: Mapping[str, Any]
    kv_bytes_per_token: int
    items: int
    accuracy: float
    drop: float
    low: float
    high: float
    mean_kl: float | None = None
    full_precision: bool = False

    @property
    def holds(self) -> bool:
        """Whether its quality is that of full precision, as far as was measured."""
        return self.full_precision or (self.drop <= HOLDS_DROP and self.low <= 0)

    @property
    def settings(self) -> dict[str, Any]:
        """`flags`, with the flags on single layers that they leave at their default."""
        return {**self.flags, **{flag: None for flag in LAYER_FLAGS if flag not in self.flags}}

    @property
    def fall(self) -> str:
        """Its fall in words."""
        if self.full_precision:
            return f"full precision answers {self.accuracy:.1%} right ({self.items} questions)"
        moved, sign = ("falls", 100) if self.drop >= 0 else ("rises", -100)
        low, high = sorted((sign * self.low, sign * self.high))
        interval = f"95% interval {_points(low)} to {_points(high)}, {self.items} questions"
        return f"{moved} {_points(sign * self.drop)} points to {self.accuracy:.1%} ({interval})"

    @property
    def key_flag(self) -> tuple[str, Any]:
        """The flag that tells it from others, with its value: the last one that is set."""
        given = [(flag, value) for flag, value in self.flags.items() if is_set(value)]
        return given[-1] if given else next(iter(self.flags.items()), ("--kv-cache-dtype", None))


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # no "-0.0"


def is_set(value: Any) -> bool:
    """Whether a flag has a value of its own: an empty list of layers is none."""
    return value is not None and value not in ("", "[]", (), [])


def read_candidates(entries: Iterable[Mapping[str, Any]]) -> tuple[QualityCandidate, ...]:
    """Candidates from dicts with the names of the fields; more keys may be there.

    Full precision needs no fall. An entry that lacks another figure was not measured to its end and is left out.
    """
    return tuple(candidate for entry in entries if (candidate := _read(entry)) is not None)


def _read(entry: Mapping[str, Any]) -> QualityCandidate | None:
    full = bool(entry.get("full_precision"))
    unmeasured = 0.0 if full else None
    figures: dict[str, Any] = {key: entry.get(key) for key in ("kv_bytes_per_token", "items", "accuracy")}
    for key in ("drop", "low", "high"):
        figures[key] = unmeasured if entry.get(key) is None else entry[key]
    if None in figures.values():
        return None
    return QualityCandidate(
        name=str(entry["name"]),
        flags=dict(entry.get("flags") or {}),
        mean_kl=entry.get("mean_kl"),
        full_precision=full,
        **figures,
    )
