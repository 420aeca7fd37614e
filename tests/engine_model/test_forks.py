"""Choices and beams that start from their leader's blocks answer as if each had been computed alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config

from engine.cache_identity import CacheIdentity
from engine.config import EngineConfig
from engine.engine import LLMEngine, RequestOutput
from engine.request import SamplingParams
from engine.testbed.tasks import conversation
from kernels.formats import KV_FORMATS

BLOCK = 16
LENGTHS = (BLOCK + 5, 2 * BLOCK, BLOCK + 1)  # of prompts: within a block, at the end of one, and one token over
FORMATS = [*((name, "") for name in KV_FORMATS), ("int4_kivi", "1:int8_per_token_head,2:auto")]
CHOICES = 3
TOLERANCE = 0.05


def make_engine(lab: Any, kv_cache_dtype: str = "auto", layers: str = "", **flags: Any) -> LLMEngine:
    """The testbed model; without the prefix cache, so that only forks share."""
    settings = {
        "block_size": BLOCK,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_dtype_layers": layers,
        "enable_prefix_caching": False,
    }
    engine: LLMEngine = lab.make_engine(EngineConfig().model_dir, **(settings | flags))
    return engine


def prompt_of(engine: LLMEngine, length: int) -> list[int]:
    return engine.tokenizer.encode(conversation(3, 4, 216).prompt(4))[:length]


def choice(seed: int, max_tokens: int = 12) -> SamplingParams:
    """Hot enough that choices part at once; they cross the end of a block. What the KV says is in the logprobs."""
    return SamplingParams(max_tokens=max_tokens, temperature=8.0, seed=seed, ignore_eos=True, logprobs=0)


def add_choices(engine: LLMEngine, prompt: list[int], num_choices: int = CHOICES, **params: Any) -> None:
    for number in range(num_choices):
        engine.add_request(str(number), prompt, choice(number, **params), fork_of="0" if number else None)


Answer = list[tuple[int, float]]  # tokens and their logprobs


def run(engine: LLMEngine) -> tuple[list[Answer], int]:
    """What each request got, in the order of their ids, and the most blocks that were in use after a step."""
    answers: dict[str, Answer] = {}
    peak = 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(steps_of(output))
        peak = max(peak, pool.num_usable_blocks - pool.num_free_blocks)
    assert pool.num_free_blocks == pool.num_usable_blocks
    return [answers[name] for name in sorted(answers)], peak


def steps_of(output: RequestOutput) -> Answer:
    assert output.logprobs is not None
    return [(token_id, found.logprob) for token_id, found in zip(output.new_token_ids, output.logprobs, strict=True)]


def run_alone(engine: LLMEngine, prompt: list[int]) -> list[Answer]:
    """The choices as requests that know nothing of each other."""
    for number in range(CHOICES):
        engine.add_request(str(number), prompt, choice(number))
    answers, _ = run(engine)
    assert len({answer[0][0] for answer in answers}) == CHOICES
    return answers


def difference(left: list[Answer], right: list[Answer]) -> float:
    """The largest difference of two logprobs; infinite when some token differs.

    Sums in another order differ in their last bits, and quantized values may then round the other way.
    """
    worst = 0.0
    for one, other in zip(left, right, strict=True):
        for (token, logprob), (other_token, other_logprob) in zip(one, other, strict=True):
            worst = max(worst, abs(logprob - other_logprob)) if token == other_token else math.inf
    return worst


@pytest.mark.parametrize(("kv_cache_dtype", "layers"), FORMATS)
def test_choices_that_share_are_the_choices_alone(kv_cache_dtype: str, layers: str, lab: Any) -> None:
    engine = make_engine(lab, kv_cache_dtype, layers)
    for length in LENGTHS:
        prompt = prompt_of(engine, length)
        before = engine.stats()
        add_choices(engine, prompt)
        assert difference(run(engine)[0], run_alone(engine, prompt)) < TOLERANCE
        after = engine.stats()
        assert after.forks_total - before.forks_total == CHOICES - 1
        # A block that ends with the prompt is closed by now where formats keep open ones: it is computed again. And
        # a prompt's last token that begins a block is computed into a new one.
        copied = length % BLOCK > 1 or (length % BLOCK == 0 and not engine.runner.keeps_open_blocks)
        assert after.fork_copies_total - before.fork_copies_total == (CHOICES - 1) * copied


def test_latents_are_copied_too(tmp_path: Path, lab: Any) -> None:
    config = DeepseekV2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2,
        topk_method="greedy", max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
        pad_token_id=None,
    )  # fmt: skip
    engine = lab.make_engine(lab.save_random_model(config, tmp_path), block_size=BLOCK, enable_prefix_caching=False)
    (prompt,) = lab.prompts(BLOCK + 5)
    add_choices(engine, prompt)
    assert difference(run(engine)[0], run_alone(engine, prompt)) < TOLERANCE
    assert engine.stats().fork_copies_total == CHOICES - 1


def test_choices_share_the_blocks_of_their_prompt(lab: Any) -> None:
    length, max_tokens = 5 * BLOCK + 5, 8
    peaks = {}
    for sharing in (True, False):
        engine = make_engine(lab, enable_fork_sharing=sharing)
        add_choices(engine, prompt_of(engine, length), 4, max_tokens=max_tokens)
        answers, peaks[sharing] = run(engine)
        assert engine.stats().forks_total == (3 if sharing else 0)
        assert len(answers) == 4
    assert peaks == {True: 5 + 4, False: 4 * 6}  # shared whole blocks, and one block each


def test_a_beam_starts_from_the_prompt_and_output_of_its_leader(lab: Any) -> None:
    engine = make_engine(lab, "int8_per_token_head", enable_prefix_caching=True)
    prompt = prompt_of(engine, BLOCK + 5)
    engine.add_request("leader", prompt, choice(1, max_tokens=40))
    said: list[int] = []
    while len(said) < 15:
        said += [token for output in engine.step() for token in output.new_token_ids]
    beam = [*prompt, *said[:14], 5]  # parts with its leader at its last token
    engine.add_request("beam", beam, choice(2), fork_of="leader")
    forked, _ = run(engine)[0]
    assert engine.stats().forks_total == engine.stats().fork_copies_total == 1
    alone = make_engine(lab, "int8_per_token_head")
    alone.add_request("alone", beam, choice(2))
    assert difference(run(alone)[0], [forked]) < TOLERANCE


def test_who_is_somebody_else_to_the_cache_starts_from_nobody(lab: Any) -> None:
    engine = make_engine(lab)
    prompt = prompt_of(engine, BLOCK + 5)
    engine.add_request("0", prompt, choice(0))
    engine.add_request("1", prompt, choice(1), fork_of="0", identity=CacheIdentity((("tenant", "b"),), "b"))
    assert len(run(engine)[0]) == 2
    assert engine.stats().forks_total == 0


def test_without_copy_on_write_choices_write_into_each_other(lab: Any) -> None:
    engine = make_engine(lab, prefix_cache_fault="copy_on_write", allow_unsafe_replay=True)
    prompt = prompt_of(engine, BLOCK + 5)
    alone = run_alone(engine, prompt)
    add_choices(engine, prompt)
    assert difference(run(engine)[0], alone) > 10 * TOLERANCE
    assert engine.stats().fork_copies_total == 0
