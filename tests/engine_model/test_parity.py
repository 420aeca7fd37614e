"""Our Llama on the paged cache against `transformers`, whichever way the tokens reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.engine import LLMEngine
from engine.models import decoder
from engine.models.rope import RotaryTable
from engine.request import SamplingParams
from kernels.attention import AttentionMetadata, AttentionOptions
from kernels.kv_cache import LayerKVCache

TOLERANCE = 1e-3
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@pytest.fixture(scope="module", params=HEADS)
def family(request: pytest.FixtureRequest, lab: Any, tmp_path_factory: Any) -> tuple[Path, LlamaForCausalLM]:
    q_heads, kv_heads = HEADS[request.param]
    directory = lab.make_llama(tmp_path_factory.mktemp(request.param), q_heads=q_heads, kv_heads=kv_heads, seed=7)
    return directory, lab.load_reference(directory)


def largest_error(lab: Any, engine: LLMEngine, reference: LlamaForCausalLM, prompts: list[list[int]]) -> float:
    """Runs the prompts greedily; the largest difference of any logit at any position that was computed."""
    traced = lab.trace_logits(engine)
    generated = lab.generate(engine, prompts, GREEDY)
    worst = 0.0
    for i, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        expected = lab.reference_logits(reference, (prompt + tokens)[:-1])
        positions = sorted(traced[str(i)])
        got = torch.stack([traced[str(i)][position] for position in positions])
        worst = max(worst, (got - expected[positions]).abs().max().item())
        assert tokens == expected[len(prompt) - 1 :].argmax(-1).tolist()
    return worst


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 50, 2048])
def test_logits_agree_for_every_chunk_size(family: tuple[Path, LlamaForCausalLM], budget: int, lab: Any) -> None:
    directory, reference = family
    engine = lab.make_engine(directory, max_num_batched_tokens=budget, max_num_seqs=1)
    traced = lab.trace_logits(engine)
    prompt = lab.prompts(61)[0]
    (tokens,) = lab.generate(engine, [prompt], GREEDY)
    assert sorted(traced["0"]) == list(range(61 + 24 - 1))
    expected = lab.reference_logits(reference, (prompt + tokens)[:-1])
    got = torch.stack([traced["0"][position] for position in range(len(expected))])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_logits_agree_for_ragged_batches_that_mix_chunks_and_decodes(
    family: tuple[Path, LlamaForCausalLM], block_size: int, lab: Any
) -> None:
    directory, reference = family
    engine = lab.make_engine(directory, max_num_batched_tokens=20, block_size=block_size)
    prompts = lab.prompts(1, 15, 16, 17, 64, 33, 5, 48, 2, 31)
    assert largest_error(lab, engine, reference, prompts) < TOLERANCE


def test_logits_agree_after_a_prefix_hit(family: tuple[Path, LlamaForCausalLM], lab: Any) -> None:
    directory, reference = family
    engine = lab.make_engine(directory)
    prefix = lab.prompts(40)[0]
    lab.generate(engine, [prefix], GREEDY)
    prompts = [prefix + tail for tail in lab.prompts(1, 9, 20, seed=3)] + [prefix]
    assert largest_error(lab, engine, reference, prompts) < TOLERANCE
    assert engine.stats().prefix_hits_total == 40 * 3 + 36  # a full hit recomputes its last block


def test_logits_agree_after_preemption(family: tuple[Path, LlamaForCausalLM], lab: Any) -> None:
    directory, reference = family
    engine = lab.make_engine(directory, num_gpu_blocks_override=26, max_model_len=96, enable_prefix_caching=False)
    prompts = lab.prompts(20, 25, 30, 22, 18)
    assert largest_error(lab, engine, reference, prompts) < TOLERANCE
    assert engine.stats().preemptions_total > 0
    assert engine.stats().kv_usage == 0


def test_greedy_generation_is_that_of_transformers_for_a_ragged_batch(
    model_dir: Path, reference: LlamaForCausalLM, lab: Any
) -> None:
    prompts = lab.prompts(3, 17, 40, 64, 9, 28)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    expected = reference.generate(
        padded, attention_mask=mask, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0
    )
    params = SamplingParams(max_tokens=32, min_tokens=32, temperature=0)
    assert lab.generate(lab.make_engine(model_dir), prompts, params) == expected[:, width:].tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_close(model_dir: Path, reference: LlamaForCausalLM, dtype: str, lab: Any) -> None:
    engine = lab.make_engine(model_dir, dtype=dtype)
    assert engine.runner.kv_caches[0].key.codes.dtype is getattr(torch, dtype)
    traced = lab.trace_logits(engine)
    prompt = lab.prompts(50)[0]
    lab.generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
    expected = lab.reference_logits(reference, prompt)
    got = torch.stack([traced["0"][position] for position in range(50)]).float()
    correlation = torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1].item()
    assert correlation > 0.99


def test_a_half_precision_cache_below_a_float32_model(model_dir: Path, reference: LlamaForCausalLM, lab: Any) -> None:
    engine = lab.make_engine(model_dir, kv_cache_dtype="float16")
    assert engine.runner.kv_caches[0].key.codes.dtype is torch.float16
    assert engine.plan.kv_bytes_per_token == lab.make_engine(model_dir).plan.kv_bytes_per_token // 2
    traced = lab.trace_logits(engine)
    prompt = lab.prompts(50)[0]
    lab.generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
    error = (torch.stack([traced["0"][i] for i in range(50)]) - lab.reference_logits(reference, prompt)).abs().max()
    assert 0 < error < 0.2


# Faults the comparison above must see: a test that cannot fail proves nothing.


def drop_rope(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryTable, "rotate", lambda self, heads, cos, signed_sin: heads)


def interleaved_pairs(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RotaryTable,
        "rotate",
        lambda self, heads, cos, sin: heads * cos + heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin,
    )


def positions_from_zero(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    true_positions = RotaryTable.at
    monkeypatch.setattr(RotaryTable, "at", lambda self, positions: true_positions(self, torch.arange(len(positions))))


def wrong_scale(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in engine.runner.model.layers:
        layer.spec = replace(layer.spec, attention=AttentionOptions(scale=1.0))


def interleaved_kv_heads(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.paged_attention
    order = [0, 2, 1, 3]  # with 2 KV heads: query head h reads KV head h % 2 instead of h // 2

    def wrong(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return right(query[:, order].contiguous(), *args, **kwargs)[:, order].contiguous()

    monkeypatch.setattr(decoder, "paged_attention", wrong)


def one_slot_off(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoder.reshape_and_cache

    def wrong(key: Tensor, value: Tensor, cache: LayerKVCache, metadata: AttentionMetadata) -> None:
        right(key, value, cache, replace(metadata, slot_mapping=metadata.slot_mapping + 1))

    monkeypatch.setattr(decoder, "reshape_and_cache", wrong)


@pytest.mark.parametrize(
    "fault",
    [drop_rope, interleaved_pairs, positions_from_zero, wrong_scale, interleaved_kv_heads, one_slot_off],
    ids=lambda fault: fault.__name__,
)
def test_the_comparison_sees_faults(
    model_dir: Path,
    reference: LlamaForCausalLM,
    fault: Callable[[LLMEngine, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    lab: Any,
) -> None:
    engine = lab.make_engine(model_dir, max_num_batched_tokens=16)
    fault(engine, monkeypatch)
    traced = lab.trace_logits(engine)
    prompt = lab.prompts(48)[0]
    lab.generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
    got = torch.stack([traced["0"][position] for position in range(48)])
    assert (got - lab.reference_logits(reference, prompt)).abs().max() > 100 * TOLERANCE
