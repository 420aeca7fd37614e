"""Suites: the same questions anywhere, answers judged exactly, prompts that fit the context."""

from __future__ import annotations

import re

import pytest

from engine.testbed.tasks import EOS, count_tokens, split_tokens
from probe.quality.suite import DEFAULT_CONTEXT, QualityError, Suite, SuiteSpec, build_suite

TESTBED = SuiteSpec(conversations=2).fitted("testbed", 512)
PLAIN = SuiteSpec(conversations=3).fitted("plain", None)


def test_the_same_spec_gives_the_same_suite() -> None:
    assert build_suite(TESTBED) == build_suite(SuiteSpec.from_dict(TESTBED.to_dict()))
    keys = build_suite(TESTBED).keys()
    assert len(keys) == len(set(keys)) == 42


def test_keys_of_specs_that_can_be_compared() -> None:
    more = SuiteSpec(conversations=9, first_seed=1, tasks=("add",), text_windows=0).fitted("testbed", 512)
    assert more.key == TESTBED.key
    others = [SuiteSpec(turns=3), SuiteSpec(context=300), SuiteSpec(chat=True), SuiteSpec(kind="plain")]
    assert len({TESTBED.key, *(spec.fitted("testbed", 512).key for spec in others)}) == 5


def test_context_follows_the_server() -> None:
    assert TESTBED.context == 512
    assert PLAIN.context == DEFAULT_CONTEXT
    assert SuiteSpec().fitted("testbed", 100_000).context == DEFAULT_CONTEXT
    with pytest.raises(QualityError, match="context of 512"):
        SuiteSpec(context=600).fitted("testbed", 512)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tasks": ("sing",)}, "no task 'sing'"),
        ({"turns": 0}, "at least 1"),
        ({"kind": "x"}, "not 'x'"),
        ({"first_seed": 999_999}, "seeds"),
    ],
)
def test_nonsense_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(QualityError, match=words):
        SuiteSpec(**values)  # type: ignore[arg-type]


def test_turns_that_do_not_fit_and_nothing_to_ask_are_refused() -> None:
    for kind in ("testbed", "plain"):
        with pytest.raises(QualityError, match="do not fit"):
            build_suite(SuiteSpec(turns=50).fitted(kind, 128))
        with pytest.raises(QualityError, match="nothing is left"):
            build_suite(SuiteSpec(tasks=(), text_windows=0).fitted(kind, 512))


def test_testbed_prompts_fit_and_the_last_turn_too() -> None:
    for questions in build_suite(TESTBED).conversations:
        for question in questions:
            assert 1 + count_tokens(question.prompt) + question.max_tokens <= 512
            assert question.max_tokens > count_tokens(question.expected)
            assert question.judge(question.expected) == (True, True)
            assert question.judge(question.expected + question.expected[0])[0] is False
            assert question.judge("zz") == (False, False)


def test_testbed_windows_judge_exactly_the_answers() -> None:
    suite = build_suite(TESTBED)
    for window, questions in zip(suite.windows, suite.conversations, strict=True):
        tokens = ["<bos>", *split_tokens(window.text)]
        assert len(tokens) < 512
        assert window.spans is not None
        for (turn, first, end), question in zip(window.spans, questions, strict=True):
            judged = "".join(tokens[first:end])
            assert turn == question.turn
            assert judged == question.expected + (EOS if turn < 20 else "")


def told_codes(prompt: str) -> dict[str, str]:
    return dict(re.findall(r"the code of the (.+?) is (\d{4})\.", prompt))


def solve(question: str, prompt: str) -> str:
    if found := re.fullmatch(r"What is the code of the (.+)\?", question):
        return told_codes(prompt)[found[1]]
    if found := re.fullmatch(r"What is (\d+) \+ (\d+)\?", question):
        return str(int(found[1]) + int(found[2]))
    found = re.fullmatch(r"Which brackets close (.+)\?", question)
    assert found is not None
    closing: list[str] = []
    for mark in found[1]:
        if mark in "([{":
            closing.append({"(": ")", "[": "]", "{": "}"}[mark])
        elif mark in ")]}":
            assert closing.pop() == mark
    return "".join(reversed(closing))


def plain_suite() -> Suite:
    return build_suite(PLAIN, "some words")


def test_plain_answers_follow_from_the_prompt() -> None:
    for questions in plain_suite().conversations:
        assert len(questions) == 20
        for question in questions:
            *_, last, cue = question.prompt.split("\n")
            assert cue == "A:"
            assert solve(last.removeprefix("Q: "), question.prompt) == question.expected
            assert question.judge(f" {question.expected}\n") == (True, True)
            assert question.judge("I do not know") == (False, False)
            assert len(question.prompt) < 2048 * 2.2


def test_plain_recall_reaches_far_back() -> None:
    recalls = [q for questions in plain_suite().conversations for q in questions if q.task == "recall"]
    distances = [q.prompt.count("\nQ: ", q.prompt.rindex(f"is {q.expected}.")) for q in recalls]
    assert max(distances) > 10
    assert {q.task for questions in plain_suite().conversations for q in questions} == {"recall", "add", "brackets"}


def test_chat_messages_carry_the_same_turns() -> None:
    chat = SuiteSpec(conversations=1, chat=True).fitted("plain", None)
    last = build_suite(chat, "some words").conversations[0][-1]
    assert last.messages is not None
    assert [m["role"] for m in last.messages] == ["user", "assistant"] * 22 + ["user"]
    assert all(m["content"].split("\n")[-1] in last.prompt for m in last.messages)
