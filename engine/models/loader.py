"""Turns a Hugging Face model directory into one of our models, chosen by the architecture in `config.json`."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import ModelDims, read_hf_config
from engine.models.checkpoint import Checkpoint, ModelLoadError
from engine.models.llama import LlamaModel

MODELS = {"LlamaForCausalLM": LlamaModel}

__all__ = ["MODELS", "ModelLoadError", "load_model"]


def load_model(model_dir: str | Path, dims: ModelDims, dtype: torch.dtype, device: torch.device | str) -> LlamaModel:
    """Loads the weights of `model_dir` for `dims`, as `dtype` on `device`.

    Raises `ModelLoadError` when they cannot be loaded. An allocation failure passes through unchanged.
    """
    directory = Path(model_dir)
    hf_config = read_hf_config(directory)
    build = MODELS.get(dims.architecture)
    if build is None:
        raise ModelLoadError(
            f"architecture {dims.architecture} is not supported; the engine runs: {', '.join(sorted(MODELS))}"
        )
    with Checkpoint(directory, dtype, torch.device(device)) as checkpoint:
        return build(dims, hf_config, checkpoint)
