"""Sampling: distributions, filters, seeds, logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.request import SamplingParams
from engine.sampler import Sampler, SamplingState, token_logprobs

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


def state(seed: int | None = None, suppressed: tuple[int, ...] = (), **params: Any) -> SamplingState:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return SamplingState(SamplingParams(**params), generator, [], list(suppressed))


def frequencies(num: int = 20_000, **params: Any) -> Tensor:
    """Share of each token among `num` rows of LOGITS."""
    tokens, _ = Sampler(CPU, seed=5).sample(LOGITS.repeat(num, 1), [state(**params)] * num)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / num


def kept_set(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    """By the definition: the k most likely, then of those, renormalized, the fewest that reach top_p."""
    order = logits.argsort(descending=True).tolist()
    order = order[:top_k] if top_k else order
    probabilities = logits[order].double().softmax(-1).tolist()
    mass, kept = 0.0, set()
    for token, probability in zip(order, probabilities, strict=True):
        if kept and mass >= top_p:
            break
        kept.add(token)
        mass += probability
    return kept


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    observed = frequencies(temperature=temperature)
    chi_square = (20_000 * (observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 18.5  # 4 degrees of freedom, 0.1 % level


def test_temperature_zero_is_argmax_also_next_to_sampled_rows() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    greedy, hot = state(temperature=0, logprobs=0), state(temperature=50.0)
    tokens, _ = Sampler(CPU, seed=0).sample(logits, [greedy, hot] * 32)
    assert tokens[::2] == logits[::2].argmax(-1).tolist()
    assert tokens[1::2] != logits[1::2].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (2, 1.0), (0, 0.3), (0, 0.6), (0, 0.9), (3, 0.7), (99, 1.0), (0, 1e-9)]
)
def test_filters_keep_exactly_what_they_say(top_k: int, top_p: float) -> None:
    observed = frequencies(top_k=top_k, top_p=top_p)
    kept = sorted(kept_set(LOGITS, top_k, top_p))
    assert observed.nonzero().flatten().tolist() == kept
    expected = LOGITS[kept].softmax(-1)
    assert (observed[kept] - expected).abs().max() < 0.015


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-60, 60), min_size=2, max_size=12, unique=True),
    st.integers(0, 14),
    st.floats(0.01, 0.99),
)
def test_nothing_outside_the_filters_is_ever_drawn(values: list[int], top_k: int, top_p: float) -> None:
    logits = torch.tensor(values) / 10
    tokens, _ = Sampler(CPU, seed=1).sample(logits.repeat(200, 1), [state(top_k=top_k, top_p=top_p)] * 200)
    assert set(tokens) <= kept_set(logits, top_k, top_p + 1e-5)


def test_rows_keep_their_own_parameters() -> None:
    states = [state(top_k=1), state(top_p=0.01), state(temperature=0), state(temperature=0.01)] * 50
    tokens, _ = Sampler(CPU, seed=1).sample(LOGITS.repeat(200, 1), states)
    assert set(tokens) == {0}


def test_a_tiny_temperature_gives_the_argmax_and_no_overflow() -> None:
    tokens, _ = Sampler(CPU, seed=1).sample(100 * LOGITS.repeat(50, 1), [state(temperature=1e-8)] * 50)
    assert set(tokens) == {0}


def test_a_seed_fixes_the_tokens_whoever_shares_the_batch() -> None:
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(2))

    def draw(others: int) -> list[int]:
        sampler, seeded = Sampler(CPU, seed=others), state(seed=11)
        tokens = []
        for row in logits:
            batch = torch.cat((torch.randn(others, 100), row.unsqueeze(0)))
            tokens.append(sampler.sample(batch, [*[state() for _ in range(others)], seeded])[0][-1])
        return tokens

    assert draw(0) == draw(1) == draw(7)
    assert draw(0) != [Sampler(CPU, 0).sample(row.unsqueeze(0), [state(seed=12)])[0][0] for row in logits]


def test_min_tokens_forbids_the_end_and_leaves_the_given_logits_alone() -> None:
    logits = LOGITS.repeat(2, 1)
    before = logits.clone()
    owes = state(temperature=0, min_tokens=3, max_tokens=9, suppressed=(0, 4))
    assert Sampler(CPU, 0).sample(logits, [owes, None])[0] == [1, 0]
    owes.output_token_ids += [1, 1, 1]
    assert Sampler(CPU, 0).sample(logits, [owes, None])[0] == [0, 0]
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model() -> None:
    expected = LOGITS.log_softmax(-1)
    entry, none, only_own = token_logprobs(LOGITS.repeat(3, 1), [1, 0, 3], [2, None, 0])
    assert none is None
    assert entry is not None
    assert only_own is not None
    assert entry.token_id == 1
    assert entry.rank == 3
    assert entry.logprob == pytest.approx(expected[1].item())
    assert entry.top == ((0, pytest.approx(expected[0].item())), (4, pytest.approx(expected[4].item())))
    assert only_own.top == ()
    assert only_own.rank == 5


def test_more_logprobs_than_vocabulary_gives_the_vocabulary() -> None:
    (entry,) = token_logprobs(LOGITS.unsqueeze(0), [0], [50])
    assert entry is not None
    assert [token for token, _ in entry.top] == [0, 4, 1, 2, 3]


# Through the engine.


def test_seeded_requests_do_not_depend_on_company_chunking_or_preemption(model_dir: Path, lab: Any) -> None:
    prompt, *others = lab.prompts(20, 9, 30, 25, 14)
    seeded = SamplingParams(max_tokens=30, temperature=1.0, seed=99, ignore_eos=True)

    def tokens(alone: bool, **flags: object) -> list[int]:
        engine = lab.make_engine(model_dir, **flags)
        if not alone:
            for i, other in enumerate(others):
                engine.add_request(f"other-{i}", other, SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
        engine.add_request("seeded", prompt, seeded)
        outputs = lab.run_all(engine)["seeded"]
        assert bool(outputs[-1].metrics.num_preemptions) == ("num_gpu_blocks_override" in flags)
        return [token for output in outputs for token in output.new_token_ids]

    alone = tokens(True)
    assert len(set(alone)) > 5
    assert tokens(False) == alone
    assert tokens(False, max_num_batched_tokens=16) == alone
    assert tokens(False, num_gpu_blocks_override=34, max_model_len=128) == alone


def test_the_engine_seed_makes_unseeded_runs_repeatable(model_dir: Path, lab: Any) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    runs = [lab.generate(lab.make_engine(model_dir, seed=seed), lab.prompts(5, 9), params) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("budget", [8, 13, 256])
def test_prompt_and_output_logprobs_agree_with_transformers(
    model_dir: Path, reference: LlamaForCausalLM, budget: int, lab: Any
) -> None:
    engine = lab.make_engine(model_dir, max_num_batched_tokens=budget)
    prompts = lab.prompts(30, 21, 12)
    for repeat in range(2):  # the second time the prefix cache could answer, and must not
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
            engine.add_request(f"{repeat}-{i}", prompt, params)
        outputs = lab.run_all(engine)
        for i, prompt in enumerate(prompts):
            first, *rest = outputs[f"{repeat}-{i}"]
            tokens = prompt + [token for output in (first, *rest) for token in output.new_token_ids]
            expected = lab.reference_logits(reference, tokens[:-1]).log_softmax(-1)
            entries = first.prompt_logprobs + [entry for output in (first, *rest) for entry in output.logprobs]
            assert entries[0] is None
            assert all(output.prompt_logprobs is None for output in rest)
            assert [entry.token_id for entry in entries[1:]] == tokens[1:]
            for position, entry in enumerate(entries[1:]):
                assert len(entry.top) == (2 if position + 1 < len(prompt) else 3)
                assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=1e-3)
                best = expected[position].topk(len(entry.top)).values.tolist()
                assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)


def test_min_tokens_outlasts_an_end_token_that_greedy_decoding_wants(model_dir: Path, lab: Any) -> None:
    prompt = lab.prompts(12)[0]
    free = lab.generate(lab.make_engine(model_dir), [prompt], SamplingParams(max_tokens=20, temperature=0))[0]
    stop = free[4]
    ended = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[stop])
    at = free.index(stop)
    assert lab.generate(lab.make_engine(model_dir), [prompt], ended)[0] == free[: at + 1]
    forced = SamplingParams(max_tokens=20, min_tokens=12, temperature=0, stop_token_ids=[stop])
    tokens = lab.generate(lab.make_engine(model_dir), [prompt], forced)[0]
    assert tokens[:at] == free[:at]
    assert stop not in tokens[:12]
    assert len(tokens) >= 12
