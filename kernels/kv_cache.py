"""The paged KV cache of one layer: its tensors, their allocation, and copying blocks.

Layout of `kernels.formats`. Block 0 is the null block: it pads block tables and its content is never used. Slot s of
the pool is offset s % block_size of block s // block_size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import KVFormat, VectorFormat
from kernels.quantize import dequantize, unrotate


@dataclass
class PagedVectors:
    """The keys, or the values, of one layer.

    codes: [num_blocks, num_kv_heads, block_size, fmt.row_width(head_dim)] of fmt.storage_dtype.
    params: [num_blocks, num_kv_heads, *fmt.params_shape(head_dim, block_size)] of fmt.param_dtype; scale, then minimum.
    scale: what a stored fp8 value is multiplied with; 1 for other formats. It changes at most once, before anything is
        stored, see `LayerKVCache.take_scales`.
    open_blocks: [num_open_rows, num_kv_heads, block_size, head_dim], full precision: row metadata.open_rows[i] holds
        the tokens of sequence i that do not fill a block yet. Only for formats that keep open blocks.
    """

    fmt: VectorFormat
    codes: Tensor
    params: Tensor | None = None
    scale: float = 1.0
    open_blocks: Tensor | None = None
    awaits_scale: bool = False

    def take_scale(self, vectors: Tensor) -> None:
        """Sets the scale with which the largest of these vectors' values becomes the largest the format has."""
        largest = vectors.abs().amax().item()
        if 0 < largest < math.inf:  # of zeros alone, or of what is not finite, nothing can be learnt
            self.scale = largest / torch.finfo(self.codes.dtype).max
        self.awaits_scale = False


class PoolShape(NamedTuple):
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int


def _codes_of(fmt: VectorFormat, pool: PoolShape) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the codes."""
    return (*pool[:3], fmt.row_width(pool.head_dim)), getattr(torch, fmt.storage_dtype)


def _params_of(fmt: VectorFormat, pool: PoolShape) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the parameters; some dimension is 0 when there are none."""
    return (*pool[:2], *fmt.params_shape(pool.head_dim, pool.block_size)), getattr(torch, fmt.param_dtype)


@dataclass(frozen=True)
class LayerKVCache:
    """Keys and values of one layer in one format. ValueError when a tensor is not what the format says."""

    kv_format: KVFormat
    head_dim: int
    key: PagedVectors
    value: PagedVectors

    def __post_init__(self) -> None:
        if self.key.codes.dim() != 4:
            raise ValueError(f"Codes must be [blocks, KV heads, block_size, width], got {list(self.key.codes.shape)}.")
        for name, part in (("key", self.key), ("value", self.value)):
            self._check(f"{name} codes", part.codes, *_codes_of(part.fmt, self.shape))
            params_shape, params_dtype = _params_of(part.fmt, self.shape)
            if all(params_shape):
                self._check(f"{name} parameters", part.params, params_shape, params_dtype)
            if self.kv_format.keeps_open_blocks and part.open_blocks is None:
                raise ValueError(f"{self.kv_format.name} keeps open blocks: {name}.open_blocks is missing.")

    def _check(self, what: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            got = None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{what} of {self.kv_format.name} must be {dtype} {list(shape)}, got {got}.")
        if not tensor.is_contiguous() or tensor.device != self.device:
            raise ValueError(f"{what} must be contiguous and on {self.device}.")

    @property
    def shape(self) -> PoolShape:
        return PoolShape(self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def num_blocks(self) -> int:
        return self.key.codes.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.key.codes.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.codes.shape[2]

    @property
    def device(self) -> torch.device:
        return self.key.codes.device

    def tensors(self) -> list[Tensor]:
        """Every tensor whose first dimension is the block id."""
        return [t for part in (self.key, self.value) for t in (part.codes, part.params) if t is not None]

    @property
    def awaits_scales(self) -> bool:
        """Whether the scales are to be taken from the first tokens that are stored."""
        return self.key.awaits_scale

    def take_scales(self, key: Tensor, value: Tensor) -> None:
        """Sets the scales from the first keys and values to be stored, [num_tokens, num_kv_heads, head_dim]."""
        self.key.take_scale(key)
        self.value.take_scale(value)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, parameters included; open blocks are extra."""
        return sum(tensor.nbytes for tensor in self.tensors())


def allocate_kv_cache(
    kv_format: KVFormat,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    device: torch.device | str = "cpu",
    open_dtype: torch.dtype = torch.float32,
    num_open_rows: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    calculate_scales: bool = False,
) -> LayerKVCache:
    """A zeroed pool; every page of it is really there, since memory is only promised until it is touched.

    open_dtype, num_open_rows: of the open blocks, for formats that keep them; one row a running sequence.
    k_scale, v_scale: of fp8; with calculate_scales they are taken from the first tokens that are written.
    Raises ValueError when the format cannot pack the head_dim or lacks rows for its open blocks.
    """
    if min(num_blocks, num_kv_heads, block_size) <= 0:
        raise ValueError(f"A KV cache of {num_blocks} blocks x {num_kv_heads} heads x {block_size} slots is empty.")
    if kv_format.keeps_open_blocks and num_open_rows <= 0:
        raise ValueError(f"{kv_format.name} keeps open blocks: num_open_rows must be at least 1.")

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).zero_()

    pool = PoolShape(num_blocks, num_kv_heads, block_size, head_dim)

    def part(fmt: VectorFormat, scale: float) -> PagedVectors:
        params = _params_of(fmt, pool)
        return PagedVectors(
            fmt,
            zeros(*_codes_of(fmt, pool)),
            zeros(*params) if all(params[0]) else None,
            scale,
            zeros((num_open_rows, *pool[1:]), open_dtype) if kv_format.keeps_open_blocks else None,
            calculate_scales and kv_format.scaled,
        )

    return LayerKVCache(kv_format, head_dim, part(kv_format.key, k_scale), part(kv_format.value, v_scale))


def read_blocks(part: PagedVectors, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Full-precision vectors [len(blocks), num_kv_heads, block_size, head_dim] of closed blocks, rotation undone."""
    params = None if part.params is None else part.params[blocks]
    vectors = dequantize(part.codes[blocks], params, part.fmt, dtype, part.scale)
    return unrotate(vectors) if part.fmt.rotated else vectors


def copy_blocks(caches: Iterable[LayerKVCache], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy block src[i] to block dst[i] in every layer (copy on write), parameters included; reads precede writes.

    Open blocks belong to sequences, not to block ids: a fork also takes `copy_open_rows`.
    """
    for cache in caches:
        _copy("Block ids", cache.tensors(), src, dst)


def copy_open_rows(caches: Iterable[LayerKVCache], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy what row src[i] holds of its sequence's open block to row dst[i], in the layers that keep open blocks."""
    for cache in caches:
        rows = [part.open_blocks for part in (cache.key, cache.value) if part.open_blocks is not None]
        _copy("Open rows", rows, src, dst)


def _copy(what: str, tensors: Sequence[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """tensor[dst[i]] = tensor[src[i]]; ValueError when the indices are not of the tensors or dst repeats one."""
    if len(src) != len(dst):
        raise ValueError(f"src and dst must have the same length, got {len(src)} and {len(dst)}.")
    if len(set(dst)) != len(dst):
        raise ValueError("dst names an index twice.")
    if not src:
        return
    for tensor in tensors:
        if min(*src, *dst) < 0 or max(*src, *dst) >= len(tensor):
            raise ValueError(f"{what} must lie between 0 and {len(tensor) - 1}.")
        source, target = torch.tensor(src, device=tensor.device), torch.tensor(dst, device=tensor.device)
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # torch copies no fp8 rows
        raw.index_copy_(0, target, raw.index_select(0, source))
