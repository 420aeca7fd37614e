"""The conversation generator: determinism, right answers, room, spread of distances."""

from __future__ import annotations

import pytest

from engine.testbed.tasks import EOS, KEYS, KINDS, Conversation, conversation, count_tokens, split_tokens

CLOSES = {"(": ")", "[": "]", "{": "}"}
KNOWN = "ca=75;ga=36;?ca>75<eos>qy=36;yd=92;dx=92;cb=34;fy=93;wk=86;87+46>133<eos>nn=78;bf=69;zv=78;71+36>107<eos>"


def test_same_seed_same_text_other_seed_other_text() -> None:
    assert conversation(7).text() == conversation(7).text()
    assert conversation(7).text() != conversation(8).text()


def test_known_text() -> None:
    """Pins the text of one seed: figures of a shipped model stay comparable only while this holds."""
    assert conversation(1, 3, 60).text() == KNOWN


def _check_answers(talk: Conversation) -> None:
    told: dict[str, tuple[int, str]] = {}
    for number, turn in enumerate(talk.turns):
        *facts, question = turn.prompt.split(";")
        assert [tuple(f.split("=")) for f in facts] == list(turn.facts)
        for key, value in turn.facts:
            assert key not in told, "a key is told once"
            told[key] = (number, value)
        assert question.endswith(">")
        asked = question[:-1]
        if turn.kind == "recall":
            when, value = told[asked.removeprefix("?")]
            assert (turn.answer, turn.distance) == (value, number - when)
        elif turn.kind == "add":
            left, right = asked.split("+")
            assert int(turn.answer) == int(left) + int(right)
        else:
            stack = list(asked)
            for closing in turn.answer:
                assert CLOSES[stack.pop()] == closing
            assert stack == []


@pytest.mark.parametrize(("turns", "max_tokens"), [(1, 20), (5, 128), (20, 400), (20, 2048), (120, 2048), (1, 8192)])
def test_answers_are_right_and_text_fits(turns: int, max_tokens: int) -> None:
    for seed in range(15):
        talk = conversation(seed, turns, max_tokens)
        _check_answers(talk)
        assert len(talk.turns) == turns
        length = 1 + count_tokens(talk.text())
        assert length <= max_tokens
        told = sum(len(t.facts) for t in talk.turns)
        assert told == len(KEYS) or length > max_tokens - 12, "facts fill the room there is"


def test_twenty_turns_recall_over_every_distance() -> None:
    distances = {t.distance for seed in range(120) for t in conversation(seed).turns if t.kind == "recall"}
    assert distances == set(range(20))


def test_every_kind_at_every_turn() -> None:
    seen = {(t.kind, n) for seed in range(40) for n, t in enumerate(conversation(seed).turns)}
    assert seen == {(kind, n) for kind in KINDS for n in range(20)}


def test_prompt_holds_earlier_turns_with_answers() -> None:
    talk = conversation(3, 4, 200)
    first, second = talk.turns[:2]
    assert talk.prompt(1) == first.prompt
    assert talk.prompt(2) == first.prompt + first.answer + EOS + second.prompt
    assert talk.prompt(4) + talk.turns[3].answer + EOS == talk.text()
    assert [m["role"] for m in talk.messages(2)] == ["user", "assistant", "user"]


def test_weights_choose_kinds() -> None:
    talk = conversation(0, 20, 2048, {"recall": 0, "add": 1, "brackets": 0})
    assert {t.kind for t in talk.turns} == {"add"}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        conversation(0, 50, 128)
    with pytest.raises(ValueError, match=r"turn must be 1\.\.4"):
        conversation(3, 4, 200).prompt(5)


def test_split_tokens_loses_nothing() -> None:
    text = conversation(5).text()
    assert "".join(split_tokens(text)) == text
