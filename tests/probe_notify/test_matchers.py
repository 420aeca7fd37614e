"""Matchers and muting: what they accept, and what they hit."""

from __future__ import annotations

import dataclasses

import pytest

from probe.notify.matchers import Matcher, MatcherError, matches, narrowing, parse_matchers
from probe.notify.muting import muted_by
from probe.store import Acknowledgement, Silence

from .conftest import ALERT, RULES

NOW = 1_000.0
OOM = dataclasses.replace(ALERT, id=2, rule="oom", summary="died")


def silence(text: str, starts_at: float = 0.0, ends_at: float = 2_000.0) -> Silence:
    return Silence(7, parse_matchers(text), starts_at, ends_at, "ann", "upgrade", 0.0)


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ('rule="kv-saturated"', True),
        ("rule=kv-saturated, target = prod-1", True),
        ('{rule="kv-saturated", severity!="critical"}', True),
        ('target=~"prod-.*"', True),
        ('target=~"prod"', False),  # the whole value, as in Alertmanager
        ('target!~"prod-.*"', False),
        ('target=~"(prod|test)-[0-9]+"', True),
        ('target=~"(prod-)?[*+]*1"', True),
        ('target=~"prod\\\\-1"', True),
        ('model=~"llama-(2|3)",engine="vllm"', True),
        ('model="llama-3",engine="sglang"', False),
        ('rule!=""', True),
    ],
)
def test_matchers_hit_as_in_alertmanager(text: str, hits: bool) -> None:
    assert matches(parse_matchers(text), ALERT.labels) is hits


def test_a_matcher_reads_back_what_it_writes() -> None:
    for value in ('a"b', "a\\b", "a, b", "", "x\ny"):
        written = Matcher("target", "=", value)
        assert parse_matchers(f"{written}, {written}") == (written, written)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rule", "is not a matcher"),
        ('pod="x"', "have no label 'pod'"),
        ('target=~"("', "not a regular expression"),
        ('target=~"(a+)+b"', "could take too long"),
        ('target=~"((a+)?)+b"', "could take too long"),
        ('target=~"(a|ab)*c"', "could take too long"),
        ('target=~"(a|ab){2,}c"', "could take too long"),
        ('target=~".*a.*a.*a.*b"', "could take too long"),
        ('target=~"(a)\\\\1"', "looks back"),
        ('target=~"(?=a).*"', "looks back"),
        ('rule="a" target="b"', "separate matchers by commas"),
        ("rule=" + "x" * 501, "longer than 500"),
        (", ".join(["rule=a"] * 21), "more than 20"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, words: str) -> None:
    with pytest.raises(MatcherError, match=words):
        parse_matchers(text)


def test_narrowing_needs_a_label() -> None:
    assert narrowing(parse_matchers("rule=oom, target=~.*"))
    assert not narrowing(parse_matchers('target=~".*", rule!=oom'))
    assert not narrowing(())


def test_silences_mute_while_they_last() -> None:
    assert muted_by(ALERT, [], [ALERT], RULES, NOW) is None
    found = muted_by(ALERT, [silence("rule=kv-saturated")], [ALERT], RULES, NOW)
    assert found is not None
    assert (found.kind, found.by, found.until, found.silence_id) == ("silence", "ann", 2_000.0, 7)
    assert found.text == "silenced by ann: upgrade"
    later, over = silence("rule=kv-saturated", starts_at=NOW + 1), silence("rule=kv-saturated", ends_at=NOW)
    assert muted_by(ALERT, [later, over, silence("rule=oom")], [ALERT], RULES, NOW) is None


def test_inhibition_needs_a_firing_cause_on_the_same_target() -> None:
    found = muted_by(ALERT, [], [ALERT, OOM], RULES, NOW)
    assert found is not None
    assert (found.kind, found.by, found.text) == ("inhibition", "oom", "explained by oom")
    for other in (
        dataclasses.replace(OOM, state="pending"),
        dataclasses.replace(OOM, target="prod-2"),
        dataclasses.replace(OOM, rule="ttft-slo-burn"),
    ):
        assert muted_by(ALERT, [], [ALERT, other], RULES, NOW) is None
    assert muted_by(OOM, [], [ALERT, OOM], RULES, NOW) is None
    # a cause that is silenced itself explains no less
    assert muted_by(ALERT, [silence("rule=oom")], [ALERT, OOM], RULES, NOW) is not None


def test_an_acknowledgement_mutes() -> None:
    taken = dataclasses.replace(ALERT, acknowledgement=Acknowledgement("bob", "known", "adding a replica", NOW))
    found = muted_by(taken, [], [taken], RULES, NOW)
    assert found is not None
    assert found.text == "acknowledged by bob: adding a replica"
