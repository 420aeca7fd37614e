"""Stop strings and streamed text: what a client has read is always a prefix of the final text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.engine import LLMEngine
from engine.output import RequestOutput, StopStringBuffer
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer


def feed(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What comes out piece by piece, and the stop string that ended it."""
    buffer = StopStringBuffer(stop)
    out = []
    for piece in pieces:
        text, found = buffer.push(piece)
        out.append(text)
        if found is not None:
            return out, found
    return [*out, buffer.flush()], None


def test_a_stop_string_within_a_piece_and_across_pieces() -> None:
    assert feed(["END"], ["abENDcd"]) == (["ab"], "END")
    assert feed(["END"], ["abE", "N", "Dcd"]) == (["ab", "", ""], "END")
    assert feed(["END"], ["abE", "Nd", "E"]) == (["ab", "ENd", "", "E"], None)


def test_the_one_that_begins_first_wins_then_the_longer() -> None:
    assert feed(["cd", "bcde"], ["abcdef"]) == (["a"], "bcde")
    assert feed(["bc", "bcd"], ["abcdef"]) == (["a"], "bcd")


def test_a_false_start_that_holds_a_true_one() -> None:
    assert feed(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_any_cutting_of_the_text_gives_the_same_prefix(text: str, stop: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    out, found = feed(stop, pieces)
    got = "".join(out)
    if found is None:
        assert got == text
        assert not any(s in text for s in stop)
    else:
        assert text.startswith(got + found)
        assert not any(s in got for s in stop)


# Through the engine. The greedy text of a random model is arbitrary but fixed.

Plain = tuple[list[int], list[str], str]  # prompt, pieces of its greedy continuation, the whole text


@pytest.fixture(scope="module")
def readable(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    """An engine whose greedy text is ASCII: the output rows of all other tokens are zero, so others beat them."""
    directory = lab.make_llama(tmp_path_factory.mktemp("readable"), seed=4)
    weights = load_file(directory / "model.safetensors")
    tokenizer = Tokenizer(directory)
    head = weights["lm_head.weight"]
    for token in range(len(head)):
        if not (tokenizer.decode([token]).isascii() and tokenizer.decode([token]).isprintable() and 2 <= token < 314):
            head[token] = 0
    save_file(weights, directory / "model.safetensors")
    engine: LLMEngine = lab.make_engine(directory)
    return engine


@pytest.fixture(scope="module")
def plain(readable: LLMEngine, lab: Any) -> Plain:
    prompt = lab.prompts(8, seed=17)[0]
    outputs = stream(lab, readable, prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    pieces = [output.new_text for output in outputs]
    text = "".join(pieces)
    assert text.isascii()
    assert len(text) >= 40
    assert len(set(text[:12])) > 4
    return prompt, pieces, text


def stream(lab: Any, engine: LLMEngine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("r", prompt, params)
    outputs: list[RequestOutput] = lab.run_all(engine)["r"]
    assert not engine.scheduler.requests
    assert engine.stats().kv_usage == 0
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.new_text for output in outputs)


def test_streamed_pieces_are_the_text_of_the_tokens(model_dir: Path, lab: Any) -> None:
    engine = lab.make_engine(model_dir)
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=3, ignore_eos=True)
    for i, prompt in enumerate(lab.prompts(5, 9, 21)):
        engine.add_request(str(i), prompt, params)
    for outputs in lab.run_all(engine).values():
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert text_of(outputs) == engine.tokenizer.decode(tokens)
        assert [output.num_output_tokens for output in outputs] == list(range(1, 61))
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].stop_reason is None


def test_a_stop_string_that_straddles_tokens(readable: LLMEngine, plain: Plain, lab: Any) -> None:
    prompt, pieces, text = plain
    begin = len("".join(pieces[:5])) - 1
    stop = text[begin : begin + 3]
    outputs = stream(lab, readable, prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=[stop]))
    assert text_of(outputs) == text[: text.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == stop
    assert len(outputs) < 40
    read = ""
    for output in outputs:
        read += output.new_text
        assert text.startswith(read)
        assert stop not in read


def test_min_tokens_defers_stop_strings(readable: LLMEngine, plain: Plain, lab: Any) -> None:
    prompt, pieces, _ = plain
    stop = next(piece for piece in pieces[:6] if piece)
    at_once = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
    later = SamplingParams(max_tokens=40, min_tokens=10, temperature=0, ignore_eos=True, stop=[stop])
    assert len(stream(lab, readable, prompt, at_once)) <= 6
    outputs = stream(lab, readable, prompt, later)
    assert len(outputs) >= 10
    assert text_of(outputs).startswith("".join(pieces[:9]))


def test_a_stop_string_in_the_last_token_is_a_stop(readable: LLMEngine, plain: Plain, lab: Any) -> None:
    prompt, pieces, _ = plain
    last = max(i for i in range(12) if pieces[i] and pieces[i] not in "".join(pieces[:i]))
    params = SamplingParams(max_tokens=last + 1, temperature=0, ignore_eos=True, stop=[pieces[last]])
    outputs = stream(lab, readable, prompt, params)
    assert len(outputs) == last + 1
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == pieces[last]


def test_text_held_for_a_stop_string_comes_out_at_the_limit(readable: LLMEngine, plain: Plain, lab: Any) -> None:
    prompt, pieces, _ = plain
    tail = next(piece for piece in reversed(pieces[:10]) if piece)
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, stop=[tail[-1] + "\x00never"])
    assert text_of(stream(lab, readable, prompt, params)) == "".join(pieces[:10])


def test_the_stop_token_counts_but_is_not_text(readable: LLMEngine, plain: Plain, lab: Any) -> None:
    prompt, _, text = plain
    free = stream(lab, readable, prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    tokens = [token for output in free for token in output.new_token_ids]
    stop = next(token for token in tokens[5:] if tokens.index(token) >= 5)
    outputs = stream(lab, readable, prompt, SamplingParams(max_tokens=40, temperature=0, stop_token_ids=[stop]))
    assert [token for output in outputs for token in output.new_token_ids] == tokens[: tokens.index(stop) + 1]
    assert outputs[-1].num_output_tokens == tokens.index(stop) + 1
    assert outputs[-1].stop_reason == stop
    assert outputs[-1].finish_reason == "stop"
    assert text.startswith(text_of(outputs))
