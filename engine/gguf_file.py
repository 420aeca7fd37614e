"""The header of a GGUF file (version 2 or 3, little-endian): metadata and where its tensors lie. No torch.

The `gguf` package has a reader too, but it makes arrays of every string: on a vocabulary of 262,144 tokens it took
22 s and 690 MB where this takes 0.3 s. Dequantization is left to that package, see `engine.models.gguf_weights`.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SUFFIX = ".gguf"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape: as torch has it, rows first. type_id: ggml's number of its quantization."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself. metadata: lists for arrays of strings, `array.array` for those of numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def is_gguf(path: str | Path) -> bool:
    """Whether `path` names a GGUF file rather than a model directory."""
    return Path(path).suffix.lower() == SUFFIX


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Reads a file's header; raises `ConfigError` with one sentence when it is not there, cut short or corrupt."""
    file = Path(path)
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header(file)
    except FileNotFoundError:
        raise ConfigError(f"{str(file)!r} does not exist; give --model a GGUF file or a model directory") from None
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error) as error:  # an empty file cannot be mapped: ValueError
        raise ConfigError(
            f"{str(file)!r} is not readable as GGUF ({error}); it is corrupt or cut short, fetch it again"
        ) from None


class _Reader:
    """A cursor over the file. Raises ValueError or struct.error where the content makes no sense."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def header(self, path: Path) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, not one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_entries = self._count("Q", 8), self._count("Q", 8)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors = {name: TensorInfo(name, shape, kind, start + at) for name, shape, kind, at in infos}
        return GGUFHeader(path, metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"))
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int) -> Any:
        if kind == _STRING:
            read: Callable[[], Any] = self._string
            return [read() for _ in range(self._count("Q", 8))]
        if kind == _ARRAY:
            return [self._array(self._number("I")) for _ in range(self._count("Q", 12))]
        if kind not in _SCALARS:
            raise ValueError(f"an array of unknown type {kind}")
        code = _SCALARS[kind].replace("?", "B")
        values = array(code)
        values.frombytes(self._bytes(self._count("Q", values.itemsize) * values.itemsize))
        return values

    def _count(self, code: str, bytes_each: int) -> int:
        """A number of things of at least so many bytes each, which the rest of the file must be able to hold."""
        count: int = self._number(code)
        if count * bytes_each > len(self.data) - self.position:
            raise ValueError(f"it announces {count} entries at byte {self.position}, more than it can hold")
        return count

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.position)
        start = self.position + 8
        if length > len(self.data) - start:
            raise ValueError(f"it ends inside a text at byte {start}")
        self.position = start + length
        return self.data[start : self.position].decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}")
        content = self.data[self.position : end]
        self.position = end
        return content
