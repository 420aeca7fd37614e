"""Every KV format serves the testbed model: what is stored is what attention sees, however the tokens got there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import SamplingParams
from engine.testbed.tasks import conversation
from kernels.formats import KV_CACHE_DTYPES, KV_FORMATS, VectorFormat, resolve_kv_format
from kernels.quantize import dequantize, quantize, rotate, unrotate

BLOCK = 16
CONTEXT = 256
TURNS = 4
ANSWER = SamplingParams(max_tokens=8, temperature=0)
PER_TOKEN = [name for name, kv_format in KV_FORMATS.items() if not kv_format.keeps_open_blocks]
MIXES = {  # by the name used here: what all layers have, and the layers that have something else
    "mixed": ("int4_kivi", "1:int8_per_token_head,2:auto"),
    "mixed per token": ("int8k_int4v", "0:auto,3:fp8"),
}


def make_engine(lab: Any, kv_cache_dtype: str, **flags: Any) -> LLMEngine:
    kv_cache_dtype, layers = MIXES.get(kv_cache_dtype, (kv_cache_dtype, ""))
    flags["kv_cache_dtype_layers"] = layers
    settings = {"block_size": BLOCK, "max_model_len": CONTEXT, "max_num_batched_tokens": CONTEXT, "max_num_seqs": 4}
    engine: LLMEngine = lab.make_engine(EngineConfig().model_dir, kv_cache_dtype=kv_cache_dtype, **(settings | flags))
    return engine


def make_tight_engine(lab: Any, kv_cache_dtype: str, prompts: list[list[int]]) -> LLMEngine:
    """Four prompts, scheduled in one step, fill the pool, and answering them takes more. The blocks hold 4 tokens."""
    num_blocks = 1 + sum(-(-len(prompt) // 4) for prompt in prompts[:4])
    settings = {"block_size": 4, "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 4 * CONTEXT}
    return make_engine(lab, kv_cache_dtype, **settings)


def prompts_of(engine: LLMEngine, turn: int = TURNS) -> list[list[int]]:
    """The same turn of five conversations; its prompt starts with the prompt of the turn before it."""
    return [engine.tokenizer.encode(conversation(seed, TURNS, 216).prompt(turn)) for seed in range(5)]


def logits_of(lab: Any, engine: LLMEngine, prompts: list[list[int]]) -> Tensor:
    """Logits of all prompts' tokens, one after another, each prompt in a step of its own."""
    traced = lab.trace_logits(engine)
    rows = []
    for prompt in prompts:
        lab.generate(engine, [prompt], SamplingParams(max_tokens=1, temperature=0))
        rows += [traced["0"][position] for position in range(len(prompt))]
    return torch.stack(rows)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def read_back(vectors: Tensor, fmt: VectorFormat, num_closed: int) -> Tensor:
    """vectors [1, heads, tokens, head_dim] as the pool gives them back; those from num_closed on are in open blocks."""
    blocks = vectors[:, :, :num_closed].split(BLOCK, dim=2)
    stored = []
    for block in blocks:
        codes, params = quantize(rotate(block) if fmt.rotated else block, fmt)
        values = dequantize(codes, params, fmt, vectors.dtype)
        stored.append(unrotate(values) if fmt.rotated else values)
    return torch.cat([*stored, vectors[:, :, num_closed:]], dim=2)


@pytest.mark.parametrize("kv_cache_dtype", [*KV_FORMATS, "mixed"])
def test_logits_are_those_of_transformers_with_keys_and_values_as_stored(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch, lab: Any
) -> None:
    engine = make_engine(lab, kv_cache_dtype, enable_prefix_caching=False)
    formats = engine.config.layer_kv_formats(engine.dims)
    prompts = prompts_of(engine)[:3]
    got = logits_of(lab, engine, prompts)
    reference = lab.load_reference(EngineConfig().model_dir)
    exact = torch.cat([lab.reference_logits(reference, prompt) for prompt in prompts])
    eager = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        kv_format, num_tokens = formats[module.layer_idx], key.shape[2]
        num_closed = num_tokens - num_tokens % BLOCK * kv_format.keeps_open_blocks
        key, value = read_back(key, kv_format.key, num_closed), read_back(value, kv_format.value, num_closed)
        return eager(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    expected = torch.cat([lab.reference_logits(reference, prompt) for prompt in prompts])
    # A last bit may round a code the other way; a wrong scale, a missing rotation or a misplaced nibble costs far more.
    assert relative_error(got, expected) < max(1e-5, 0.25 * relative_error(exact, expected))


def test_formats_with_bits_to_spare_keep_every_answer_and_plain_int4_moves_the_logits(lab: Any) -> None:
    talks = [conversation(seed, TURNS, 216) for seed in range(5)]
    questions = [(talk.prompt(turn), talk.turns[turn - 1].answer) for talk in talks for turn in range(1, TURNS + 1)]
    logits = {}
    for name in ("float32", "float16", "bfloat16", "int8_per_token_head", "fp8_e4m3", "int4_kivi", "int4_symmetric"):
        engine = make_engine(lab, name)
        if "int4" not in name:
            tokens = lab.generate(engine, [engine.tokenizer.encode(prompt) for prompt, _ in questions], ANSWER)
            answers = [engine.tokenizer.decode(ids[:-1]) for ids in tokens]  # without the EOS
            assert answers == [answer for _, answer in questions], name
        engine.reset_prefix_cache()
        logits[name] = logits_of(lab, engine, prompts_of(engine))
    errors = {name: relative_error(got, logits["float32"]) for name, got in logits.items()}
    assert 0 < errors["float16"] < errors["bfloat16"] < errors["int8_per_token_head"] < errors["fp8_e4m3"]
    assert 10 * errors["int8_per_token_head"] < errors["int4_symmetric"] < 1
    assert errors["int4_kivi"] < errors["int4_symmetric"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8k_int4v", "int4_kivi"])
def test_a_half_precision_model_on_every_kind_of_cache(kv_cache_dtype: str, dtype: str, lab: Any) -> None:
    engine = make_engine(lab, kv_cache_dtype, dtype=dtype)
    prompts = prompts_of(engine)[:2]
    got = logits_of(lab, engine, prompts).float()
    assert 0 < relative_error(got, logits_of(lab, make_engine(lab, "float32"), prompts)) < 0.08
    assert engine.plan.open_blocks_bytes in (0, 4 * 4 * 2 * 2 * BLOCK * 32 * 2)  # 4 rows, 4 layers, 2 heads, K and V


@pytest.mark.parametrize("kv_cache_dtype", [*KV_CACHE_DTYPES, *MIXES])
def test_the_pool_takes_the_bytes_that_the_plan_reports(kv_cache_dtype: str, lab: Any) -> None:
    engine = make_engine(lab, kv_cache_dtype, max_num_batched_tokens=64)
    plan, caches = engine.plan, engine.runner.kv_caches
    assert plan.kv_cache_bytes == sum(cache.nbytes for cache in caches)
    kept = [part.open_blocks for cache in caches for part in (cache.key, cache.value) if part.open_blocks is not None]
    assert plan.open_blocks_bytes == sum(tensor.nbytes for tensor in kept)
    assert plan.kv_layer_dtypes == tuple(cache.kv_format.name for cache in caches)
    if kv_cache_dtype in MIXES:
        assert plan.kv_cache_dtype == "mixed"
    else:
        assert {cache.kv_format for cache in caches} == {resolve_kv_format(kv_cache_dtype, "float32")}
        assert plan.kv_cache_dtype == caches[0].kv_format.name


@pytest.mark.parametrize("kv_cache_dtype", [*PER_TOKEN, "mixed per token"])
def test_chunks_prefix_hits_and_preemption_change_nothing(kv_cache_dtype: str, lab: Any) -> None:
    whole = make_engine(lab, kv_cache_dtype, enable_prefix_caching=False, enable_chunked_prefill=False)
    prompts = prompts_of(whole)
    expected = lab.generate(whole, prompts, ANSWER)

    chunked = make_engine(lab, kv_cache_dtype, max_num_batched_tokens=37, enable_prefix_caching=False)
    assert lab.generate(chunked, prompts, ANSWER) == expected

    cached = make_engine(lab, kv_cache_dtype)
    lab.generate(cached, prompts_of(cached, TURNS - 1), ANSWER)
    assert lab.generate(cached, prompts, ANSWER) == expected
    assert cached.stats().prefix_hits_total > 0.5 * sum(map(len, prompts_of(cached, TURNS - 1)))

    tight = make_tight_engine(lab, kv_cache_dtype, prompts)
    assert lab.generate(tight, prompts, ANSWER) == expected
    assert tight.stats().preemptions_total > 0


@pytest.mark.parametrize("kv_cache_dtype", ["int4_kivi", "mixed"])
def test_kivi_is_the_same_for_chunks_of_whole_blocks_and_prefix_hits(kv_cache_dtype: str, lab: Any) -> None:
    """A query sees its own block quantized if its step filled it: only where steps end matters."""
    whole = make_engine(lab, kv_cache_dtype, enable_prefix_caching=False)
    prompts = prompts_of(whole)[:3]
    expected = logits_of(lab, whole, prompts)
    chunked = make_engine(lab, kv_cache_dtype, enable_prefix_caching=False, max_num_batched_tokens=2 * BLOCK)
    close = 0.1 * relative_error(logits_of(lab, make_engine(lab, "float32"), prompts), expected)
    assert relative_error(logits_of(lab, chunked, prompts), expected) < close
    ragged = make_engine(lab, kv_cache_dtype, enable_prefix_caching=False, max_num_batched_tokens=2 * BLOCK + 5)
    assert relative_error(logits_of(lab, ragged, prompts), expected) > close

    cached = make_engine(lab, kv_cache_dtype, max_num_seqs=1)
    first, traced = lab.generate(cached, prompts, ANSWER), lab.trace_logits(cached)
    assert lab.generate(cached, prompts, ANSWER) == first
    assert cached.stats().prefix_hits_total == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    start = 0
    for i, prompt in enumerate(prompts):
        tail = range((len(prompt) - 1) // BLOCK * BLOCK, len(prompt))
        got = torch.stack([traced[str(i)][position] for position in tail])
        assert relative_error(got, expected[[start + position for position in tail]]) < close
        start += len(prompt)


@pytest.mark.parametrize("kv_cache_dtype", ["int4_kivi", "mixed"])
def test_a_request_keeps_its_open_block_until_it_is_preempted(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch, lab: Any
) -> None:
    exact = make_engine(lab, "float32")
    prompts = prompts_of(exact)
    engine = make_tight_engine(lab, kv_cache_dtype, prompts)
    runner = engine.runner
    build_batch, preempt = runner._build_batch, runner.preempt
    rows: dict[str, int] = {}  # of requests that hold blocks

    def spied_build_batch(scheduled: Any, states: Any) -> Any:
        batch = build_batch(scheduled, states)
        for entry, row in zip(scheduled, batch[2].open_rows.tolist(), strict=True):
            assert rows.setdefault(entry.request.request_id, row) == row
        assert len({*rows.values()}) == len(rows)
        return batch

    def spied_preempt(request_id: str) -> None:
        rows.pop(request_id, None)
        preempt(request_id)

    monkeypatch.setattr(runner, "_build_batch", spied_build_batch)
    monkeypatch.setattr(runner, "preempt", spied_preempt)
    assert lab.generate(engine, prompts, ANSWER) == lab.generate(exact, prompts, ANSWER)
    assert engine.stats().preemptions_total > 0
    assert not rows
