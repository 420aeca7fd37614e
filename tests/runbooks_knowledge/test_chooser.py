"""The chooser counts sourced facts and nothing else, and an answer never moves an engine the wrong way."""

from __future__ import annotations

import itertools

import pytest

from engine.errors import ConfigError
from runbooks.knowledge.chooser import ENGINES, Ranking, choose, fact_holds, questions
from runbooks.knowledge.text import data

QUESTIONS = data("chooser")["questions"]
OPTIONS = [(question["id"], option) for question in QUESTIONS for option in question["options"]]


def by_engine(ranking: list[Ranking]) -> dict[str, Ranking]:
    return {one.engine: one for one in ranking}


def test_nothing_answered_nothing_counts() -> None:
    ranking = choose({})
    assert [one.points for one in ranking] == [0] * len(ENGINES)
    assert choose({question.id: None for question in questions()}) == ranking


@pytest.mark.parametrize(("question", "option"), OPTIONS, ids=lambda one: one if isinstance(one, str) else one["id"])
def test_an_answer_moves_only_the_engines_it_speaks_of_and_the_right_way(question: str, option: dict) -> None:
    says = {fact["engine"]: fact["points"] for fact in option["facts"]}
    assert len(says) == len(option["facts"]), "two facts of one answer about one engine"
    others = [{}, {"lifetime": "yes"}, {"metrics": "yes", "prefix": "much"}]
    for before in others:
        if question in before:
            continue
        then, now = by_engine(choose(before)), by_engine(choose({**before, question: option["id"]}))
        for engine in ENGINES:
            moved = now[engine].points - then[engine].points
            assert moved == says.get(engine, 0), engine


def test_every_fact_has_a_source_with_its_version_or_date() -> None:
    for question, option in OPTIONS:
        for one in choose({question: option["id"]}):
            for reason in (*one.reasons_for, *one.reasons_against):
                assert any(sign.isdigit() for sign in reason.source.en) or "://" in reason.source.en
                assert reason.source.zh
                assert reason.text.en != reason.text.zh


def test_what_facts_say_of_flags_is_so_in_the_newest_version() -> None:
    wrong = [fact for _, option in OPTIONS for fact in option["facts"] if not fact_holds(fact)]
    assert wrong == []
    assert not fact_holds({"engine": "vllm", "flag": "--swap-space"})
    assert not fact_holds({"engine": "vllm", "flag": "--kv-cache-dtype", "value": "int3"})


def test_points_are_the_sum_of_the_reasons_and_order_follows() -> None:
    answers = {"hardware": "nvidia-new", "prefix": "much", "lora": "yes", "lifetime": "yes", "metrics": "yes"}
    ranking = choose(answers)
    for one in ranking:
        assert one.points == sum(reason.points for reason in (*one.reasons_for, *one.reasons_against))
        assert all(reason.points > 0 for reason in one.reasons_for)
        assert all(reason.points < 0 for reason in one.reasons_against)
    free = [one.points for one in ranking if not one.blocked]
    assert free == sorted(free, reverse=True)


def test_an_engine_that_cannot_run_there_comes_last() -> None:
    ranking = choose({"hardware": "amd", "offload": ["host", "disk"]})
    assert ranking[-1].engine == "tensorrt-llm"
    assert ranking[-1].blocked
    assert not any(one.blocked for one in ranking[:-1])


def test_tgi_says_that_it_is_in_maintenance_mode_whatever_is_asked() -> None:
    for answers in ({}, {"structured": "yes"}):
        notice = by_engine(choose(answers))["tgi"].notice
        assert notice is not None
        assert "2025-12-11" in notice.en
        assert "维护模式" in notice.zh


def test_several_answers_to_one_question_count_each_once() -> None:
    both = by_engine(choose({"offload": ["host", "disk", "host"]}))
    single = [by_engine(choose({"offload": one})) for one in ("host", "disk")]
    for engine in ENGINES:
        assert both[engine].points == sum(one[engine].points for one in single)


def test_order_of_answers_does_not_matter() -> None:
    answers = [("prefix", "much"), ("tenants", "yes"), ("model", "moe-mla")]
    rankings = [[one.engine for one in choose(dict(order))] for order in itertools.permutations(answers)]
    assert all(one == rankings[0] for one in rankings)


def test_unknown_questions_and_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no question 'colour'"):
        choose({"colour": "blue"})
    with pytest.raises(ConfigError, match="no answer 'blue'"):
        choose({"hardware": "blue"})
