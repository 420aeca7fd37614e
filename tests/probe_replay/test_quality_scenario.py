"""The verdicts of int4-degradation from given figures: what counts as reproduced and as verified, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from probe.replay.observation import Check, Observation
from probe.replay.quality import fall
from probe.replay.scenarios.int4_degradation import Int4Degradation

SCENARIO = Int4Degradation()
FIRED = {"state": "firing", "summary": "fell"}
RESOLVED = {"state": "resolved", "summary": "fell"}


def seen(
    *,
    drop: float = 0.5,
    low: float = 0.4,
    verdict: str = "worse",
    full: float = 1.0,
    turns: tuple[int, ...] = (9, 5),
    invalid: int = 0,
    bytes_: int = 320,
    alert: dict[str, Any] | None = None,
) -> Observation:
    """A phase of 2 turns with 10 questions each."""
    cells = [{"turn": n, "task": "all", "items": 10, "right": right} for n, right in enumerate(turns, start=1)]
    cells += [{"turn": n, "task": "recall", "items": 10, "right": 0} for n in (1, 2)]
    quality = {
        "overall": {"items": 20, "right": sum(turns), "invalid": invalid, "accuracy": sum(turns) / 20},
        "turns": cells,
        "against": {"drop": drop, "low": low, "high": drop + 0.1, "verdict": verdict},
        "kv_bytes_per_token": bytes_,
        "full_precision": {"overall": {"accuracy": full}, "kv_bytes_per_token": 1024},
    }
    return Observation(0.0, 1.0, quality=quality, alert=alert)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_a_fall_that_grows_with_the_turns_and_alerts_is_the_incident() -> None:
    assert failed(SCENARIO.reproduced(seen(alert=FIRED))) == []


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        ({"alert": None}, "alert kv-quality-drop fired"),
        ({"alert": FIRED, "full": 0.9}, "full precision answers right"),
        ({"alert": FIRED, "verdict": "inconclusive"}, "int4_symmetric answers worse"),
        ({"alert": FIRED, "turns": (5, 5)}, "later turns suffer more"),
    ],
)
def test_each_condition_of_the_incident_counts(phase: dict[str, Any], what: str) -> None:
    assert failed(SCENARIO.reproduced(seen(**phase))) == [what]


def test_a_remedy_holds_within_a_point_at_a_fraction_of_the_bytes() -> None:
    assert failed(SCENARIO.verified(seen(drop=0.01, low=-0.01, alert=RESOLVED))) == []


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        ({"drop": 0.011}, "within a point of full precision"),
        ({"bytes_": 640}, "fewer bytes a token"),
        ({"invalid": 2}, "answers are valid"),
        ({"alert": FIRED}, "alert kv-quality-drop resolved"),
    ],
)
def test_each_condition_of_the_remedy_counts(phase: dict[str, Any], what: str) -> None:
    held = {"drop": 0.0, "low": -0.01, "alert": RESOLVED}
    assert failed(SCENARIO.verified(seen(**{**held, **phase}))) == [what]


def test_falls_are_told_in_points() -> None:
    assert fall({"drop": 0.153, "low": 0.101, "high": 0.2}) == "15.3 points [10.1, 20.0]"
