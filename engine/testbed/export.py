"""The testbed's architecture and its Hugging Face directory, readable by transformers 4 and 5 and by vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from engine.testbed.tokenizer import CHAT_TEMPLATE, SPECIAL, build_tokenizer

MAX_LENGTH = 2048
ROPE_THETA = 1e7
"""Large, so that half of each head's rotary pairs hardly turn over the context and can match keys far back."""


def llama_config() -> LlamaConfig:
    """4 layers, width 128, 4 query heads over 2 KV heads of 32, tied embeddings, no biases."""
    return LlamaConfig(
        vocab_size=len(build_tokenizer(MAX_LENGTH)),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
        dtype="float32",
        attn_implementation="sdpa",
    )


def export(model: LlamaForCausalLM, directory: Path) -> None:
    """Write weights (fp32 safetensors), configs and tokenizer; each JSON carries both spellings of moved keys."""
    model.save_pretrained(directory)
    build_tokenizer(MAX_LENGTH).save_pretrained(directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    _update(directory / "config.json", {"rope_theta": ROPE_THETA, "rope_scaling": None, "torch_dtype": "float32"})
    _update(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE},
    )


def _update(path: Path, changes: dict[str, object]) -> None:
    """Change keys of a JSON file (transformers 5 renamed some that transformers 4 and vLLM still read)."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}, indent=2) + "\n")
