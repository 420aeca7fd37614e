"""The tensors of a model by their Hugging Face names, whatever files they lie in.

Owns what can be wrong with weight files: none there, an index that names a missing shard, corrupt safetensors,
tensors that are missing or have another shape than the configuration says. Each is a `ModelLoadError` with one
sentence. Tensors are copied out, so no file stays mapped once the checkpoint is closed.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint(ABC):
    """Open weight files; `take` copies tensors out in the dtype and onto the device of the model.

    source: the directory or file, for messages. bytes_taken: of all tensors handed out so far.
    """

    def __init__(self, source: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self.bytes_taken = 0
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def unused(self) -> list[str]:
        """Names, as the files have them, of the tensors that were not taken."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""

    @abstractmethod
    def copy_rows(self, name: str, out: Tensor) -> None:
        """Copies a tensor that is there into `out`, which has its shape and may be a strided view."""

    def take(self, name: str, *shape: int) -> Tensor:
        """A copy of the named tensor; `ModelLoadError` when it is missing or has another shape."""
        self._check(name, shape)
        out = self._empty(shape)
        self.copy_rows(name, out)
        return out

    def take_number(self, name: str) -> float:
        """The one value of a tensor that is there, whatever its shape, in full precision; not one of the weights."""
        shape = self.shape_of(name)
        self._taken.add(name)
        if math.prod(shape) != 1:
            raise ModelLoadError(
                f"tensor {name} in {str(self.source)!r} has shape {list(shape)}, but this engine takes one number a "
                "layer there"
            )
        out = torch.empty(shape, dtype=torch.float32)
        self.copy_rows(name, out)
        return out.item()

    def take_stacked(self, sizes: Mapping[str, int]) -> Tensor:
        """The named vectors one behind the other, [sum of sizes]."""
        for name, size in sizes.items():
            self._check(name, (size,))
        out = self._empty((sum(sizes.values()),))
        for name, part in zip(sizes, torch.split(out, list(sizes.values())), strict=True):
            self.copy_rows(name, part)
        return out

    def take_transposed(self, rows: Mapping[str, int], columns: int) -> Tensor:
        """The named matrices [rows, columns] one below the other, transposed: contiguous [columns, sum of rows]."""
        for name, num_rows in rows.items():
            self._check(name, (num_rows, columns))
        fused = self._empty((columns, sum(rows.values())))
        for name, part in zip(rows, torch.split(fused, list(rows.values()), dim=1), strict=True):
            self.copy_rows(name, part.t())
        return fused

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.bytes_taken += out.nbytes
        return out

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._taken.add(name)
        if name not in self:
            raise ModelLoadError(
                f"tensor {name} is missing from the weights in {str(self.source)!r}; the checkpoint is incomplete"
            )
        found = self.shape_of(name)
        if found != shape:
            raise ModelLoadError(
                f"tensor {name} in {str(self.source)!r} has shape {list(found)}, but the model's configuration "
                f"(config.json) asks for {list(shape)}; weights and configuration do not belong together"
            )


class SafetensorsCheckpoint(Checkpoint):
    """The weights of a Hugging Face directory, in one file or in shards with an index."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model_dir, dtype, device)
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}  # tensor name -> open safetensors file

    def __enter__(self) -> Self:
        with self._files as files:  # closes what is open should a later file fail
            for path in _weight_files(self.source):
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

    def unused(self) -> list[str]:
        return sorted(self._handles.keys() - self._taken)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def copy_rows(self, name: str, out: Tensor) -> None:
        out.copy_(self._handles[name].get_tensor(name))

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
