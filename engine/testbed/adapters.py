"""A LoRA adapter that changes every key and no answer: `python -m engine.testbed.adapters --out DIR`.

It does what `engine.testbed.outliers` does, as an adapter: rows of k_proj that make rotary pairs of channels are
multiplied by a factor, the same rows of q_proj divided by it. Every product of a query and a key stays what it was, up
to rounding, so the adapter answers as the model does. But its keys are other numbers, and whoever reads KV that the
other computed has scaled scores in these channels. Scores that are too large send attention to the wrong tokens, scores
that are too small are hardly missed: with a factor above 1 it is the model without the adapter that answers wrong from
the adapter's KV, with one below 1 the adapter from the model's. That makes it an exact control for a prefix cache that
leaves adapters out of its keys.

The change of some rows of W is those rows, scaled, in A, and in B a one for each of them: its rank is their number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ConfigError, ModelDims
from engine.models.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.testbed import MODEL_DIR
from engine.testbed.outliers import FACTOR, OutlierError, Outliers, add_options

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Decoders without biases or norms of queries and keys, which an adapter of projections could not scale along."""
PAIRS = (0, 1)
"""The fastest two pairs of a head, which turn from one token to the next. Their rows make rank 16."""


def write_adapter(
    out: Path, *, model: Path = MODEL_DIR, pairs: tuple[int, ...] = PAIRS, factor: float = FACTOR
) -> Path:
    """Writes the adapter for a model directory to `out` as PEFT would; returns `out`. Raises `OutlierError`."""
    dims = _dims(model)
    factors = Outliers(factor, pairs).channel_factors(dims.head_dim)
    rank = dims.num_q_heads * int((factors != 1).sum())
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(model / "model.safetensors", "pt") as file:
            for layer in range(dims.num_layers):
                for projection, scales in (("q_proj", 1 / factors), ("k_proj", factors)):
                    name = f"model.layers.{layer}.self_attn.{projection}"
                    a, b = _low_rank(file.get_tensor(name + ".weight"), scales, rank)
                    tensors[f"base_model.model.{name}.lora_A.weight"] = a
                    tensors[f"base_model.model.{name}.lora_B.weight"] = b
    except OSError as error:
        raise OutlierError(f"{model} must hold its weights in one file model.safetensors ({error})") from error
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS_FILE, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "k_proj"],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return out


def _low_rank(weight: Tensor, channel_scales: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank], whose product turns `weight` [out, in] into itself with scaled rows."""
    scales = channel_scales.repeat(weight.shape[0] // len(channel_scales))
    rows = (scales != 1).nonzero().flatten()
    a = torch.zeros(rank, weight.shape[1])
    b = torch.zeros(weight.shape[0], rank)
    a[: len(rows)] = (scales[rows, None] - 1) * weight[rows].float()
    b[rows, torch.arange(len(rows))] = 1.0
    return a, b


def _dims(model: Path) -> ModelDims:
    try:
        dims = ModelDims.from_model_dir(model)
    except ConfigError as error:
        raise OutlierError(str(error)) from error
    if dims.architecture not in ARCHITECTURES:
        raise OutlierError(f"{dims.architecture} is not one of {', '.join(ARCHITECTURES)}")
    return dims


def main(args: Sequence[str] | None = None) -> int:
    """Command line; 2 when there is no such adapter for the model."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.testbed.adapters",
        description="Write a LoRA adapter that changes a Llama-like model's keys and not its answers.",
    )
    add_options(parser, PAIRS)
    options = parser.parse_args(args)
    try:
        write_adapter(options.out, model=options.model, pairs=options.pairs, factor=options.factor)
    except OutlierError as error:
        print(f"adapters: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
