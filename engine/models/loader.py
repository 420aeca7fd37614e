"""Turns a model directory or a GGUF file into one of our models, chosen by its architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.config import ModelDims, read_hf_config
from engine.errors import ModelLoadError
from engine.gguf_file import is_gguf
from engine.models.architectures import FAMILIES
from engine.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from engine.models.decoder import DenseDecoder
from engine.models.deepseek_v2 import DeepseekV2
from engine.models.gguf_weights import GGUFCheckpoint
from engine.models.interface import CausalLM
from engine.models.kv_scales import OTHER_SCALES

__all__ = ["MODELS", "ModelLoadError", "load_model"]

# Tables that old checkpoints carry, and a head written out although it is the embedding.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$")

Builder = Callable[[ModelDims, Mapping[str, Any], Checkpoint, int], CausalLM]

MODELS: dict[str, Builder] = {**dict.fromkeys(FAMILIES, DenseDecoder), "DeepseekV2ForCausalLM": DeepseekV2}


def load_model(
    model: str | Path,
    dims: ModelDims,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> CausalLM:
    """Loads the weights of a model directory or GGUF file for `dims`, as `dtype` on `device`.

    max_model_len: how many positions will be used; default: as many as the model allows.
    Raises `ModelLoadError` when they cannot be loaded. An allocation failure passes through unchanged.
    """
    path = Path(model)
    hf_config = read_hf_config(path)
    build = MODELS.get(dims.architecture)
    if build is None:
        raise ModelLoadError(
            f"architecture {dims.architecture} is not supported; the engine runs: {', '.join(sorted(MODELS))}"
        )
    kind: type[Checkpoint] = GGUFCheckpoint if is_gguf(path) else SafetensorsCheckpoint
    with kind(path, dtype, torch.device(device)) as checkpoint:
        loaded = build(dims, hf_config, checkpoint, max_model_len or dims.max_position_embeddings)
        _refuse_unused(checkpoint, dims)
    return loaded


def _refuse_unused(checkpoint: Checkpoint, dims: ModelDims) -> None:
    """A weight that is left over means another model than the one we computed, however alike."""
    for name in checkpoint.unused():
        if not IGNORED.search(name) and not OTHER_SCALES.search(name):
            raise ModelLoadError(
                f"tensor {name} in {str(checkpoint.source)!r} is none that this engine's {dims.architecture} has; "
                "leaving it out would give other answers than the model's"
            )
