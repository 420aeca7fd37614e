"""The testbed model in our engine and in `transformers`: the same directory, the same logits, the same text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer

TEXT = "ax=37; bq=12; 12+34=46 ([{}]) ?ax>" * 20


def test_logits_agree_over_a_long_prompt_and_its_continuation(lab: Any) -> None:
    directory = EngineConfig().model_dir
    engine = lab.make_engine(directory, max_num_batched_tokens=100, block_size=16)
    traced = lab.trace_logits(engine)
    prompt = engine.tokenizer.encode(TEXT)
    assert len(prompt) > 300
    (tokens,) = lab.generate(engine, [prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    expected = lab.reference_logits(lab.load_reference(directory), (prompt + tokens)[:-1])
    got = torch.stack([traced["0"][position] for position in range(len(expected))])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


def test_tokens_and_chat_prompts_agree_with_transformers() -> None:
    directory = EngineConfig().model_dir
    ours = Tokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ours.encode(TEXT + "é☃\n") == theirs.encode(TEXT + "é☃\n")
    assert ours.eos_token_id == theirs.eos_token_id
    messages = [
        {"role": "user", "content": "ax=37; ?ax"},
        {"role": "assistant", "content": "37"},
        {"role": "user", "content": "12+34="},
    ]
    text = ours.apply_chat_template(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
