"""Give a Llama-like model outlier key channels without changing its function: `python -m engine.testbed.outliers`.

In every layer and KV head, the rows of k_proj that make a rotary pair of channels are multiplied by a power of two, and
the same rows of q_proj, in every query head that reads this KV head, are divided by it. RoPE turns the two channels of
a pair into each other only, so it passes the factor on, and each product of a query and a key channel is what it was.
Because the factor is a power of two, this holds bit for bit in floating point as long as nothing overflows or becomes
subnormal. What changes is the shape of the keys, and with it what a quantizer that shares one scale among all channels
of a key keeps of the small ones.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.testbed import MODEL_DIR

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Decoders in which nothing but RoPE stands between the projections and the scores: a norm of q and k would undo it."""
FACTOR = 16.0
PAIRS = (14, 15)
"""The slowest two pairs of a head of 32: with the testbed's RoPE theta they hardly turn over its whole context."""
CONFIG_KEY = "key_outliers"
"""Where config.json of the written model says what was done to it."""


class OutlierError(Exception):
    """This model cannot be given outlier channels; the message is one sentence for the user."""


@dataclass(frozen=True)
class Outliers:
    """Which rotary pairs of every head are scaled: pair i is channels i and i + head_dim / 2."""

    factor: float
    pairs: tuple[int, ...]

    def channel_factors(self, head_dim: int) -> Tensor:
        """[head_dim] float32: `factor` at the channels of the pairs, 1 elsewhere. Raises OutlierError."""
        if not (math.isfinite(self.factor) and self.factor > 0 and math.frexp(self.factor)[0] == 0.5):
            raise OutlierError(f"the factor must be a power of two, so that products stay exact, not {self.factor:g}")
        half = head_dim // 2
        if not self.pairs or any(not 0 <= pair < half for pair in self.pairs):
            raise OutlierError(f"a head of {head_dim} channels has rotary pairs 0 to {half - 1}, not {self.pairs}")
        factors = torch.ones(head_dim)
        for pair in self.pairs:
            factors[[pair, pair + half]] = self.factor
        return factors


def scale_key_channels(tensors: dict[str, Tensor], head_dim: int, outliers: Outliers) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, rows of every k_proj multiplied and of every q_proj divided (biases too).

    Raises OutlierError when nothing fits that description or when a division was not exact.
    """
    factors = outliers.channel_factors(head_dim)
    if not any(".k_proj." in name for name in tensors):
        raise OutlierError("the checkpoint has no k_proj tensors")
    scaled = dict(tensors)
    for name, tensor in tensors.items():
        is_key, is_query = ".k_proj." in name, ".q_proj." in name
        if is_key or is_query:
            if tensor.shape[0] % head_dim:
                raise OutlierError(f"{name} has {tensor.shape[0]} rows, which are not whole heads of {head_dim}")
            column = factors.repeat(tensor.shape[0] // head_dim).to(tensor.dtype)
            rows = column.reshape(-1, *[1] * (tensor.dim() - 1))
            scaled[name] = tensor * rows if is_key else tensor / rows
            back = scaled[name] / rows if is_key else scaled[name] * rows
            if not torch.equal(back, tensor):
                raise OutlierError(f"{name} does not survive a factor of {outliers.factor:g} in {tensor.dtype}")
    return scaled


def transform(source: Path, target: Path, outliers: Outliers) -> None:
    """Write the model of `source` with outlier key channels to `target`; every other file is copied, its card is not.

    Raises OutlierError when the directory holds no such model.
    """
    config = _config(source)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    with safe_open(source / "model.safetensors", "pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    scaled = scale_key_channels(tensors, head_dim, outliers)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in ("README.md", "config.json", "model.safetensors"):
            shutil.copyfile(path, target / path.name)
    save_file(scaled, target / "model.safetensors", metadata)
    config[CONFIG_KEY] = {"factor": outliers.factor, "pairs": list(outliers.pairs)}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(source: Path) -> dict[str, Any]:
    """config.json of a model that the transform fits."""
    try:
        config: dict[str, Any] = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise OutlierError(f"{source} holds no readable config.json ({error})") from error
    architectures = config.get("architectures") or [None]
    if architectures[0] not in ARCHITECTURES:
        raise OutlierError(f"{architectures[0]} is not one of {', '.join(ARCHITECTURES)}")
    if CONFIG_KEY in config:
        raise OutlierError(f"{source} has outlier channels already ({config[CONFIG_KEY]})")
    if not (source / "model.safetensors").is_file():
        raise OutlierError(f"{source} must hold its weights in one file model.safetensors")
    return config


def add_options(parser: argparse.ArgumentParser, pairs: tuple[int, ...]) -> None:
    """The options of a command that scales key channels; `pairs` is its default."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, metavar="DIR", help="default: the testbed model")
    parser.add_argument("--factor", type=float, default=FACTOR, help="a power of two (default %(default)g)")
    default = ",".join(map(str, pairs))
    parser.add_argument(
        "--pairs", type=_pairs, default=pairs, metavar="I,J,…", help=f"rotary pairs of each head (default {default})"
    )


def _pairs(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(args: Sequence[str] | None = None) -> int:
    """Command line; 2 when the model cannot be transformed."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.testbed.outliers",
        description="Give a Llama-like model outlier key channels without changing what it computes.",
    )
    add_options(parser, PAIRS)
    options = parser.parse_args(args)
    try:
        transform(options.model, options.out, Outliers(options.factor, options.pairs))
    except OutlierError as error:
        print(f"outliers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
