"""The tensors of a Hugging Face model directory, by name.

Owns what can be wrong with weight files: none there, an index that names a missing shard, corrupt safetensors,
tensors that are missing or have another shape than `config.json` says. Each is a `ModelLoadError` with one
sentence. Tensors are copied out, so no file stays mapped once the checkpoint is closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ModelLoadError(ConfigError):
    """A model directory that cannot be loaded; the message is one sentence for the user."""


class Checkpoint:
    """Open weight files; `take` copies tensors out in the dtype and onto the device of the model."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.model_dir = model_dir
        self.dtype = dtype
        self.device = device
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}  # tensor name -> open safetensors file

    def __enter__(self) -> Checkpoint:
        with self._files as files:  # closes what is open should a later file fail
            for path in _weight_files(self.model_dir):
                self._add_file(files, path)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def take(self, name: str, *shape: int) -> Tensor:
        """A copy of the named tensor; `ModelLoadError` when it is missing or has another shape."""
        return self._get(name, shape).to(self.device, self.dtype, copy=True)

    def take_transposed(self, rows: Mapping[str, int], columns: int) -> Tensor:
        """The named matrices [rows, columns] one below the other, transposed: contiguous [columns, sum of rows]."""
        fused = torch.empty((columns, sum(rows.values())), dtype=self.dtype, device=self.device)
        parts = torch.split(fused, list(rows.values()), dim=1)
        for (name, num_rows), part in zip(rows.items(), parts, strict=True):
            part.copy_(self._get(name, (num_rows, columns)).t())
        return fused

    def _get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._handles:
            raise ModelLoadError(
                f"tensor {name} is missing from the weights in {str(self.model_dir)!r}; the checkpoint is incomplete"
            )
        tensor: Tensor = self._handles[name].get_tensor(name)
        if tensor.shape != shape:
            raise ModelLoadError(
                f"tensor {name} in {str(self.model_dir)!r} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}; weights and config.json do not belong together"
            )
        return tensor

    def _add_file(self, files: ExitStack, path: Path) -> None:
        try:
            handle = files.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except FileNotFoundError:
            raise ModelLoadError(f"{str(path)!r} does not exist; the checkpoint is incomplete") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{str(path)!r} is not readable as safetensors ({error}); it is corrupt or cut short, fetch it again"
            ) from None
        self._handles.update(dict.fromkeys(handle.keys(), handle))


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.exists():
        if not (model_dir / SINGLE_FILE).exists():
            raise ModelLoadError(f"{str(model_dir)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to load")
        return [model_dir / SINGLE_FILE]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [model_dir / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelLoadError(f"{str(index)!r} is not a safetensors index; it is corrupt, fetch it again") from None
