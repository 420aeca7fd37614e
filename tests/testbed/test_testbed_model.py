"""The shipped directory: tokenizer, chat template, loading, and answers by task, early and late in a conversation."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.testbed import MODEL_DIR
from engine.testbed.evaluate import accuracy, evaluate, judge, wilson
from engine.testbed.tasks import KINDS, conversation, split_tokens

REQUIRED = 0.95


@cache
def _shipped_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return _shipped_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, engine.testbed, engine.testbed.tasks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_directory_is_complete_and_small() -> None:
    names = {p.name for p in MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert sum(p.stat().st_size for p in MODEL_DIR.iterdir()) < 8e6
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "old and new readers must agree"
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_tokenizer_cuts_conversations_as_tasks_says(tokenizer: PreTrainedTokenizerBase) -> None:
    text = conversation(11).text()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == split_tokens(text)
    assert tokenizer.decode(ids[1:]) == text


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = _shipped_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids or "<unk>" in text


def test_chat_template_gives_the_plain_prompts_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = conversation(12, 6, 400)
    for turn in range(1, 7):
        rendered = tokenizer.apply_chat_template(talk.messages(turn), tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(rendered, add_special_tokens=False) == tokenizer.encode(talk.prompt(turn))


def test_chat_template_takes_a_system_text_and_adds_a_missing_mark(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "ax=37;"}, {"role": "user", "content": "?ax"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos>ax=37;?ax>"


def test_generates_answers_and_stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Real greedy decoding agrees with the one-pass judgement, answer by answer."""
    talk = conversation(13, 8, 300)
    judged = judge(model, tokenizer, talk)
    assert any(item.right for item in judged)
    for number, (turn, item) in enumerate(zip(talk.turns, judged, strict=True), start=1):
        ids = tokenizer(talk.prompt(number), return_tensors="pt")
        out = model.generate(**ids, do_sample=False, max_new_tokens=10)[0, ids["input_ids"].shape[1] :]
        stopped = bool(out[-1] == tokenizer.eos_token_id)
        assert (stopped and tokenizer.decode(out, skip_special_tokens=True) == turn.answer) == item.right


def test_answers_each_task_early_and_late(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A small sample must not contradict the requirement: its 95 % interval has to reach 0.95."""
    items = evaluate(model, tokenizer, range(500_000, 500_020), turns=20, max_tokens=2048)
    for kind in KINDS:
        for first, last in ((1, 7), (8, 14), (15, 20)):
            found = accuracy([i for i in items if first <= i.turn <= last], kind)
            assert found is not None
            assert found.count >= 20
            assert found.high >= REQUIRED, f"{kind}, turns {first}-{last}: {found}"
            assert found.accuracy >= 0.85, f"{kind}, turns {first}-{last}: {found}"


def test_seeds_of_training_are_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="not held out"):
        evaluate(model, tokenizer, [1_000_000], turns=1, max_tokens=64)


def test_wilson_interval() -> None:
    """Reference: Wilson (1927) by the closed form, 95 of 100."""
    found = wilson(95, 100)
    assert (round(found.low, 4), round(found.high, 4)) == (0.8882, 0.9785)
    assert wilson(10, 10).high == pytest.approx(1.0)
