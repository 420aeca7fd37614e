"""Other weights for a running engine, of a model that is the same in all but the numbers.

The new model is loaded beside the old one and takes its place at once, so for a moment both are held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.config import ConfigError, EngineConfig, ModelDims
from engine.device import is_out_of_memory
from engine.models.interface import CausalLM
from engine.models.loader import load_model


@contextlib.contextmanager
def refusing_without_memory(what: str) -> Iterator[None]:
    """Turns memory that runs out while something is loaded beside the model into a `ConfigError`: nothing is lost."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"there is no memory left to load {what}; restart the engine with it, or raise --device-memory or lower "
            f"--gpu-memory-utilization"
        ) from None


def load_like(model: CausalLM, path: Path, dims: ModelDims, config: EngineConfig) -> CausalLM:
    """The model at `path`, which must fit the KV cache, vocabulary and dtype of `model`; raises `ConfigError`."""
    found = ModelDims.from_model_dir(path)
    if found != dims:
        differing = [name for name in ModelDims.__dataclass_fields__ if getattr(found, name) != getattr(dims, name)]
        old, new = (", ".join(f"{name} {getattr(d, name)}" for name in differing) for d in (dims, found))
        raise ConfigError(f"{str(path)!r} is another model: it has {new}, this engine runs {old}; restart the engine")
    with refusing_without_memory(f"the weights in {str(path)!r} beside those in use"):
        loaded = load_model(path, dims, model.dtype, model.device, max_model_len=config.resolved_max_model_len(dims))
    if loaded.kv_scales != model.kv_scales and any(f.scaled for f in config.layer_kv_formats(dims)):
        raise ConfigError(f"{str(path)!r} has other scales for the fp8 KV cache, which is in use; restart the engine")
    return loaded
