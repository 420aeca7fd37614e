"""Excerpts of scrapes of a real vLLM 0.32.0 under known loads: what was going on is what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe.doctor.observed import Observed, of_pages
from probe.doctor.report import ABSTAINED, FOUND, diagnose

DATA = Path(__file__).parent / "data"


def seen(*names: str, seconds: float = 15.0) -> Observed:
    pages = [(1000.0 + seconds * turn, (DATA / f"{name}.prom").read_text()) for turn, name in enumerate(names)]
    return of_pages("vllm", pages, {"version": "0.32.0"})


@pytest.mark.parametrize(
    ("names", "preempted", "in_service"),
    [
        (("tiny-idle", "tiny-under-load"), 7, 16),
        (("tiny-under-load", "tiny-after-preemptions"), 35, 28),
    ],
)
def test_the_storm_is_the_first_finding(names: tuple[str, ...], preempted: int, in_service: int) -> None:
    diagnosis = diagnose(seen(*names))
    first = diagnosis.examination.findings[0]
    assert (first.id, first.confidence, diagnosis.code) == ("eviction-storm", "high", FOUND)
    value = first.evidence[0]
    assert (value.numerator, value.denominator, value.window_s) == (preempted, in_service, 15.0)
    assert all(one.excluded for one in first.look_alikes)


def test_late_tokens_come_after_what_they_may_follow_from() -> None:
    diagnosis = diagnose(seen("tiny-under-load", "tiny-after-preemptions"))
    late = [one for one in diagnosis.examination.findings if one.id != "eviction-storm"]
    assert late
    assert {one.explained_by for one in late} == {"eviction-storm"}


def test_a_storm_that_is_over_is_an_old_event() -> None:
    diagnosis = diagnose(seen("tiny-after-preemptions", "tiny-after-prefix-hits"))
    assert diagnosis.examination.serious == ()
    assert any("42 preemptions since the start and none" in remark for remark in diagnosis.examination.remarks)
    assert any("1,760 of 2,984" in remark for remark in diagnosis.examination.remarks)
    assert diagnosis.code == ABSTAINED
    assert "8 of 20 requests" in diagnosis.verdict


@pytest.mark.parametrize("name", ["tiny-idle", "tiny-after-preemptions", "tiny-noprefix"])
def test_an_idle_server_abstains(name: str) -> None:
    diagnosis = diagnose(seen(name, name))
    assert (diagnosis.examination.serious, diagnosis.code) == ((), ABSTAINED)


def test_an_overload_of_minutes() -> None:
    names = [f"overload-{second}s" for second in (180, 195, 210, 225, 240)]
    diagnosis = diagnose(seen(*names))
    found = {one.id for one in diagnosis.examination.findings}
    assert found & {"eviction-storm", "kv-saturated"}
    assert diagnosis.code == FOUND


def test_the_override_of_blocks_is_read_off_the_page() -> None:
    diagnosis = diagnose(seen("tiny-idle", "tiny-idle"))
    assert [one.code for one in diagnosis.lint] == ["blocks-overridden"]
    assert diagnosis.flags_from == "what the target tells"
