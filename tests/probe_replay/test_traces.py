"""Trace slices: what is shipped, how it is fitted, that prompts are deterministic and really share prefixes."""

from __future__ import annotations

import pytest

from probe.load.prompts import token_ids, words
from probe.load.traces import (
    MIN_PROMPT,
    Trace,
    TraceError,
    TraceRow,
    available,
    cut,
    fit,
    load_trace,
    request_at,
    requests_from,
    synthetic,
)


@pytest.mark.parametrize("name", available())
def test_shipped_slices_carry_origin_and_are_in_time_order(name: str) -> None:
    trace = load_trace(name)
    assert len(trace.rows) > 200
    assert trace.licence in ("CC-BY 4.0", "Apache-2.0")
    assert trace.source
    arrivals = [row.arrival_s for row in trace.rows]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)


def test_first_rows_are_those_of_the_published_files() -> None:
    azure, mooncake = load_trace("azure_llm_conv_2023"), load_trace("mooncake_conversation")
    assert [(r.prompt_tokens, r.output_tokens) for r in azure.rows[:3]] == [(374, 44), (396, 109), (879, 55)]
    assert azure.rows[1].arrival_s == pytest.approx(4.314579)
    assert mooncake.rows[0].prompt_tokens == 6758
    assert mooncake.rows[0].hash_ids == tuple(range(14))
    for row in mooncake.rows:
        assert len(row.hash_ids) == -(-row.prompt_tokens // 512)


def test_unknown_trace_is_one_sentence() -> None:
    with pytest.raises(TraceError, match="azure_llm_conv_2023, mooncake_conversation"):
        load_trace("nope")


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("max_model_len", [128, 2048, 32768])
def test_fitted_rows_fit_and_only_the_longest_are_cut(name: str, max_model_len: int) -> None:
    before, after = load_trace(name), fit(load_trace(name), max_model_len)
    assert 0 < after.factor <= 1
    cut_rows = 0
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.prompt_tokens >= MIN_PROMPT
        assert new.output_tokens >= 1
        assert new.prompt_tokens + new.output_tokens <= max_model_len
        cut_rows += new.prompt_tokens < max(MIN_PROMPT, round(old.prompt_tokens * after.factor))
    assert cut_rows <= 0.06 * len(before.rows)


def test_the_fitting_rule_by_hand() -> None:
    rows = (*(TraceRow(float(n), 900, 100) for n in range(99)), TraceRow(99.0, 9000, 100))
    fitted = fit(Trace("t", "s", "l", rows), 500)
    assert fitted.factor == 0.5  # the 95th percentile of 1,000 becomes 500
    assert (fitted.rows[0].prompt_tokens, fitted.rows[0].output_tokens) == (450, 50)
    assert (fitted.rows[99].prompt_tokens, fitted.rows[99].output_tokens) == (450, 50)  # cut from 4,500
    assert fit(Trace("t", "s", "l", rows), 100_000).factor == 1.0  # never stretched


def test_a_cut_keeps_bursts_and_meets_the_rate() -> None:
    trace = load_trace("azure_llm_conv_2023")
    slow = cut(trace, start=10, count=50, rate=5.0)
    assert len(slow.rows) == 50
    assert slow.rows[0].arrival_s == 0
    assert slow.duration_s == pytest.approx(49 / 5)
    original = cut(trace, start=10, count=50)
    ratio = slow.duration_s / original.duration_s
    for a, b in zip(slow.rows, original.rows, strict=True):
        assert a.arrival_s == pytest.approx(b.arrival_s * ratio)
    with pytest.raises(TraceError, match="none from row 400"):
        cut(trace, start=400)


def test_prompts_are_deterministic_and_differ_by_seed_and_row() -> None:
    trace = cut(fit(load_trace("azure_llm_conv_2023"), 2048), count=5)
    one, two = (requests_from(trace, vocab_size=900) for _ in range(2))
    assert one == two
    assert requests_from(trace, vocab_size=900, seed=1)[0].prompt != one[0].prompt
    assert one[0].prompt[:8] != one[1].prompt[:8]
    for request in one:
        assert isinstance(request.prompt, tuple)
        assert len(request.prompt) == request.prompt_tokens
        assert all(4 <= t < 900 for t in request.prompt if isinstance(t, int))
    assert request_at(trace, 3, vocab_size=900) == one[3]


def test_the_token_stream_is_stable_over_versions() -> None:
    assert token_ids([("x", 4)], 4, 4, 1000) == token_ids([("x", 9)], 4, 4, 1000)
    assert token_ids([("mooncake/0/block7", 3)], 3, 4, 936) == (666, 659, 559)


def test_mooncake_rows_share_exactly_the_prefix_their_ids_share() -> None:
    trace = fit(load_trace("mooncake_conversation"), 2048)
    requests = requests_from(trace, vocab_size=900)
    pairs = 0
    for i, a in enumerate(trace.rows[:60]):
        for j in range(i + 1, 60):
            b = trace.rows[j]
            same = 0
            while same < min(len(a.hash_ids), len(b.hash_ids)) and a.hash_ids[same] == b.hash_ids[same]:
                same += 1
            shared = min(same * trace.block_tokens, a.prompt_tokens, b.prompt_tokens)
            left, right = requests[i].prompt, requests[j].prompt
            assert left[:shared] == right[:shared]
            end = shared + 8
            if end <= min(len(left), len(right)):
                assert left[:end] != right[:end]
            pairs += same > 1
    assert pairs > 5  # the slice really holds conversations of several turns


def test_text_prompts_for_an_unknown_vocabulary() -> None:
    request = synthetic(1, prompt_tokens=130, max_tokens=5, vocab_size=None, name="n")[0]
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 100
    assert words([("a", 13), ("b", 13)], 26).split()[:10] == words([("a", 13), ("c", 13)], 26).split()[:10]


def test_synthetic_requests_do_not_share_prompts() -> None:
    requests = synthetic(4, prompt_tokens=64, max_tokens=2, vocab_size=500, name="n")
    assert len({r.prompt for r in requests}) == 4
    assert {r.arrival_s for r in requests} == {0.0}
