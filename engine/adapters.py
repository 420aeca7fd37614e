"""The LoRA adapters an engine serves, by name.

A name loaded again is another version, and versions are never used twice, so the KV of one never passes for another's.
Requests keep the weights they were admitted with. Written by the engine thread only; `find` and `served` may be
called from any thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.cache_identity import Adapter
from engine.config import ConfigError, EngineConfig, ModelDims
from engine.models.decoder import DenseDecoder
from engine.models.interface import CausalLM
from engine.models.lora import LoRAWeights, read_adapter

log = logging.getLogger("engine")


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter in service."""

    adapter: Adapter
    weights: LoRAWeights
    path: str


class AdapterStore:
    """Loads and names adapters; loads those of `--lora-modules` at once. Raises `ConfigError`."""

    def __init__(self, config: EngineConfig, model: CausalLM, dims: ModelDims) -> None:
        self._config, self._dims = config, dims
        self._dtype, self._device = model.dtype, model.device
        self._served: dict[str, ServedAdapter] = {}
        self._num_versions = 0
        if config.enable_lora and not isinstance(model, DenseDecoder):
            raise ConfigError(f"--enable-lora: architecture {dims.architecture} takes no adapters in this engine")
        for module in config.lora_modules:
            name, _, path = module.partition("=")
            self.load(name, path)

    @property
    def num_bytes(self) -> int:
        """Of all adapters in service."""
        return sum(served.weights.num_bytes for served in self.served())

    def served(self) -> list[ServedAdapter]:
        return list(self._served.values())

    def find(self, name: str) -> Adapter | None:
        """The version of an adapter in service."""
        served = self._served.get(name)
        return None if served is None else served.adapter

    def weights(self, adapter: Adapter) -> LoRAWeights:
        """The weights of an adapter for a new request; `ValueError` when it went out of service meanwhile."""
        served = self._served.get(adapter.name)
        if served is None or served.adapter != adapter:
            raise ValueError(f"the adapter {adapter.name!r} was unloaded or replaced meanwhile; send the request again")
        return served.weights

    def load(self, name: str, path: str, *, replace: bool = False) -> ServedAdapter:
        """Takes the adapter in a PEFT directory into service; a name in use only with `replace`."""
        if not self._config.enable_lora:
            raise ConfigError("this engine serves no adapters; start it with --enable-lora")
        if name == self._config.served_model_name:
            raise ConfigError(f"{name!r} is the name of the model itself; give the adapter another one")
        if name in self._served and not replace:
            raise ConfigError(f"an adapter {name!r} is loaded already; unload it first, or ask for load_inplace")
        weights = read_adapter(Path(path), self._dims, self._dtype, self._device, self._config.max_lora_rank)
        self._num_versions += 1
        served = ServedAdapter(Adapter(name, self._num_versions), weights, path)
        self._served[name] = served
        log.info(
            "adapter %s version %d loaded from %r: rank %d, %d bytes",
            name, served.adapter.version, path, weights.rank, weights.num_bytes,
        )  # fmt: skip
        return served

    def unload(self, name: str) -> None:
        """Takes an adapter out of service; requests that have it go on. `KeyError` when there is none."""
        del self._served[name]
        log.info("adapter %s unloaded", name)
