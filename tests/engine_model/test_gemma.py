"""Gemma 3 270M from its PyPI packages: the answers and logits that `transformers` gives with the same file.

Collected only where the extra `gemma` is installed (see conftest), as it is in CI.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.gguf_file import GGUFHeader, read_gguf_header
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("gemma")  # one worker loads it, once

TOLERANCE = 1e-3  # of the standard deviation of a row of logits
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    return"]
TEXT = "The ship left the harbour at dawn, and nobody on the quay knew where it was bound. "


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        first = EngineConfig(model="gemma").model_dir
        written = first.stat().st_mtime_ns
        assert EngineConfig(model="gemma").model_dir == first
        assert first.stat().st_mtime_ns == written, "the file is put together once"
    return first


@pytest.fixture(scope="session")
def engine(file: Path, lab: Any) -> LLMEngine:
    flags = {"max_model_len": 640, "max_num_batched_tokens": 128, "max_num_seqs": 2, "block_size": 16}
    made: LLMEngine = lab.make_engine(file, **flags, num_gpu_blocks_override=100)
    return made


@pytest.fixture(scope="session")
def reference(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Gemma3ForCausalLM:
    """`transformers` with the same tensors, from a copy without the vocabulary, which takes it a minute to read."""
    header = read_gguf_header(file)
    copy = without_vocabulary(header, tmp_path_factory.mktemp("reference") / "gemma.gguf")
    settings = load_gguf_checkpoint(copy)["config"]
    config = Gemma3TextConfig(**settings, vocab_size=header.tensors["token_embd.weight"].shape[0])
    model = Gemma3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    tensors = load_gguf_checkpoint(copy, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    model.tie_weights()
    return model.eval()


def without_vocabulary(header: GGUFHeader, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, header.metadata["general.architecture"])
    for key, value in header.metadata.items():
        if key.startswith("gemma3."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for info in header.tensors.values():
        kind = gguf.GGMLQuantizationType(info.type_id)
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*info.shape[:-1], info.shape[-1] // elements * size)
        raw = np.memmap(header.path, np.uint8, mode="r", offset=info.offset, shape=shape)
        writer.add_tensor(info.name, np.array(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(lab: Any, engine: LLMEngine, prompt: list[int], length: int) -> tuple[list[int], Tensor]:
    """The tokens that follow, and the logits [length, vocab] they were taken from."""
    rows: list[Tensor] = []
    model = engine.runner.model
    with pytest.MonkeyPatch.context() as patch:
        right = model.compute_logits
        patch.setattr(model, "compute_logits", lambda hidden: rows.append(right(hidden)) or rows[-1])
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        (tokens,) = lab.generate(engine, [prompt], params)
    return tokens, torch.cat(rows)


def relative_error(reference: Gemma3ForCausalLM, prompt: list[int], tokens: list[int], got: Tensor) -> float:
    with torch.no_grad():
        expected = reference(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
    assert tokens == expected.argmax(-1).tolist()
    return ((got - expected).abs().amax(-1) / expected.std(-1)).max().item()


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_answers_and_logits(text: str, engine: LLMEngine, reference: Gemma3ForCausalLM, lab: Any) -> None:
    prompt = engine.tokenizer.encode(text)
    tokens, got = greedy(lab, engine, prompt, 8)
    assert relative_error(reference, prompt, tokens, got) < TOLERANCE


def test_it_can_count(engine: LLMEngine, lab: Any) -> None:
    tokens, _ = greedy(lab, engine, engine.tokenizer.encode(PROMPTS[1]), 9)
    assert engine.tokenizer.decode(tokens) == " 5, 6, 7,"


def test_beyond_the_sliding_window(engine: LLMEngine, reference: Gemma3ForCausalLM, lab: Any) -> None:
    """In chunks of 128 tokens, past the 512 that local layers see."""
    prompt = engine.tokenizer.encode(TEXT * 30)[:560]
    tokens, got = greedy(lab, engine, prompt, 3)
    assert relative_error(reference, prompt, tokens, got) < TOLERANCE


def test_tokens_are_those_of_transformers(file: Path, engine: LLMEngine) -> None:
    architecture, parts, _ = get_gguf_tokenizer(str(file))
    theirs, _ = convert_gguf_tokenizer(architecture, parts)
    for text in (
        TEXT,
        "  two  spaces\n\n\nand lines\ttabs",
        "é☃ 日本語 🙂 <html> <table><tr>",
        "<start_of_turn>user\nhi<end_of_turn>\n",
        "x       y        z 12345 + 678 = ?",
        "\x00\x07 ünï <unused5> ",
    ):
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert engine.tokenizer.encode(text) == [2, *ids]
    assert engine.tokenizer.eos_token_ids == [1]


def test_streamed_pieces_are_the_text(engine: LLMEngine) -> None:
    tokenizer: Tokenizer = engine.tokenizer
    text = "Größe  日本語 🙂\n\nend"
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, tokenizer.encode(text)), stream.flush()]) == text
