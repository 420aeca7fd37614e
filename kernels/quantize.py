"""Packing and unpacking of every KV format in torch: the arithmetic that all backends must reproduce.

Each vector is quantized once, when it is written, with parameters of its own group, so nothing written later changes
what was stored. Codes are taken relative to the parameters as stored (rounded to fp16 where that is their dtype).
Non-finite input, or a minimum or range beyond fp16, gives a non-finite vector back, not a plausible one; fp8 saturates.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from kernels.formats import Grouping, VectorFormat

MIN_SCALE = 2.0**-24  # the smallest positive fp16, so that a constant group divides by something


def quantize(vectors: Tensor, fmt: VectorFormat, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Codes [..., tokens, row width] and parameters [..., 1 or 2, groups] of vectors [..., tokens, head_dim].

    The tokens of a per-channel format must be one whole block. scale: of fp8, stored value = vector / scale.
    Rotation is the caller's (see `rotate`).
    """
    dtype = getattr(torch, fmt.storage_dtype)
    if fmt.grouping is Grouping.NONE:
        if not fmt.name.startswith("fp8"):
            return vectors.to(dtype), None
        limit = torch.finfo(dtype).max
        return (vectors.float() / scale).clamp(-limit, limit).to(dtype), None
    x = vectors.float()
    dim = -1 if fmt.grouping is Grouping.TOKEN else -2
    if fmt.num_params == 1:
        levels = 127 if fmt.elements_per_code == 1 else 7
        step = (x.abs().amax(dim, keepdim=True) / levels).clamp(min=MIN_SCALE)
        codes = (x / step).round().clamp(-levels, levels) + fmt.code_offset
        params = [step]
    else:
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        low = low.half().float()  # as stored
        step = ((high - low) / 15).clamp(min=MIN_SCALE).half().float()
        codes = ((x - low) / step).round().clamp(0, 15)
        params = [step, low]
    packed = codes.to(dtype) if fmt.elements_per_code == 1 else pack_nibbles(codes.to(dtype))
    stored = torch.stack([p.squeeze(dim) for p in params], dim=-2).to(getattr(torch, fmt.param_dtype))
    return packed, stored


def dequantize(
    codes: Tensor, params: Tensor | None, fmt: VectorFormat, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """The vectors [..., tokens, head_dim] that codes and parameters stand for, in dtype; still rotated."""
    if params is None:
        return codes.to(dtype) if not fmt.name.startswith("fp8") else codes.to(dtype) * scale
    values = (codes if fmt.elements_per_code == 1 else unpack_nibbles(codes)).to(dtype) - fmt.code_offset
    per_group = params.to(dtype).unsqueeze(-1 if fmt.grouping is Grouping.TOKEN else -2)
    step = per_group.select(-3, 0)
    return values * step if fmt.num_params == 1 else values * step + per_group.select(-3, 1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., head_dim] with values 0..15 -> uint8 [..., head_dim / 2]; channel j low, j + head_dim / 2 high."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of pack_nibbles."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def rotate(vectors: Tensor) -> Tensor:
    """vectors [..., head_dim] times the fixed rotation, in their dtype; scores of rotated q and k are unchanged."""
    return vectors @ rotation_matrix(vectors.shape[-1], vectors.dtype, vectors.device)


def unrotate(vectors: Tensor) -> Tensor:
    """The inverse of rotate."""
    return vectors @ rotation_matrix(vectors.shape[-1], vectors.dtype, vectors.device).t()


@lru_cache(maxsize=32)
def rotation_matrix(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[head_dim, head_dim], orthogonal: a Hadamard matrix whose input channels have fixed random signs.

    Where head_dim is no power of two, Hadamard blocks of the powers of two that add up to it, largest first. The signs
    are bits of a hash, so that every process and version agrees on what stored codes mean.
    """
    blocks = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    matrix = torch.zeros((head_dim, head_dim), dtype=torch.float64)
    start = 0
    for size in blocks:
        matrix[start : start + size, start : start + size] = _hadamard(size) / size**0.5
        start += size
    bits = b"".join(hashlib.sha256(b"kv rotation %d" % i).digest() for i in range(-(-head_dim // 256)))
    signs = [1.0 if bits[i // 8] >> (i % 8) & 1 else -1.0 for i in range(head_dim)]
    return (torch.tensor(signs, dtype=torch.float64)[:, None] * matrix).to(device, dtype)


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
