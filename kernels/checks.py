"""Checks of tensors and indices, each a ValueError that names what is wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.attention import AttentionMetadata

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Shape = tuple[int | None, ...]  # None: any size


def expect_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape) -> None:
    """ValueError unless the tensor has this dtype and shape."""
    if tensor.dtype != dtype or not _fits(tensor, shape):
        raise ValueError(f"{name} must be {dtype} {_show(shape)}, got {tensor.dtype} {list(tensor.shape)}.")


def expect_index(name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape, device: torch.device) -> None:
    """ValueError unless it is an index tensor that kernels can walk: rows may lie apart, their entries may not."""
    expect_tensor(name, tensor, dtype, shape)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}.")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but seq_lens is on {device}.")


def expect_float(name: str, tensor: Tensor, shape: Shape) -> None:
    """ValueError unless the tensor is floating point (fp8 aside) and has this shape."""
    if tensor.dtype not in FLOAT_DTYPES or not _fits(tensor, shape):
        raise ValueError(f"{name} must be floating point {_show(shape)}, got {tensor.dtype} {list(tensor.shape)}.")


def expect_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """ValueError unless the tensor is where the KV cache is."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but the KV cache is on {device}.")


def _fits(tensor: Tensor, shape: Shape) -> bool:
    return tensor.dim() == len(shape) and all(
        want is None or got == want for got, want in zip(tensor.shape, shape, strict=True)
    )


def _show(shape: Shape) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def check_indices(
    metadata: AttentionMetadata, block_size: int, num_blocks: int, num_tokens: int, num_open_rows: int
) -> None:
    """ValueError when the metadata contradicts itself or names a block, slot or row outside its tensor.

    num_open_rows: rows of open blocks, 0 where the format keeps none (what open_rows says is then not looked at).
    """
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or min(query_lens, default=0) < 0 or starts[-1] > num_tokens:
        raise ValueError(f"query_start_loc must rise from 0 to at most num_tokens = {num_tokens}, got {starts}.")
    if any(length != 1 for length in query_lens[: metadata.num_decodes]):
        raise ValueError(f"The first num_decodes = {metadata.num_decodes} sequences must have one query token each.")
    if max(query_lens, default=0) > metadata.max_query_len:
        raise ValueError(f"A sequence has {max(query_lens)} query tokens, more than max_query_len.")
    if min(lens, default=0) < 0 or max(lens, default=0) > metadata.max_seq_len:
        raise ValueError(f"seq_lens must lie between 0 and max_seq_len = {metadata.max_seq_len}.")
    if metadata.block_table.numel():
        positions = torch.arange(metadata.block_table.shape[1], device=metadata.block_table.device) * block_size
        used = metadata.block_table[positions < metadata.seq_lens[:, None]]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= num_blocks):
            raise ValueError(f"block_table names a block outside the pool of {num_blocks} blocks.")
    if metadata.slot_mapping.numel() and int(metadata.slot_mapping.max()) >= num_blocks * block_size:
        raise ValueError(f"slot_mapping names a slot outside the pool of {num_blocks * block_size} slots.")
    if num_open_rows and metadata.open_rows is not None:
        rows = metadata.open_rows.tolist()
        if min(rows, default=0) < 0 or len(set(rows)) != len(rows):
            raise ValueError("open_rows must be distinct and not negative.")
        if max(rows, default=0) >= num_open_rows:
            raise ValueError(f"open_rows names a row outside the {num_open_rows} rows of open blocks.")
