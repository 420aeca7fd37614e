"""Gathers blocks of a paged cache and turns their codes into float32 numbers, for decodes and prefill chunks alike.

A number times the parameters of its group is the vector's element. Decodes apply per-token parameters to scores and
weights instead, which are far fewer; per-channel parameters and open blocks are dealt with here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import Grouping, VectorFormat
from kernels.kv_cache import PagedVectors
from kernels.torch_plan import OpenBlocks

Scratch = dict[tuple[str, torch.dtype], Tensor]

_E4M3_BIAS = 256.0  # an e4m3 code moved into fp16's fields reads 2**8 too small, their exponents' biases being 7 and 15


@dataclass(frozen=True)
class TokenParams:
    """element = factor * (scale * number + low), scale and low float32 [rows, block_size] or absent."""

    factor: float
    scale: Tensor | None
    low: Tensor | None


def token_params(part: PagedVectors, block_rows: Tensor, open_blocks: OpenBlocks | None) -> TokenParams:
    """Parameters of the tokens of these rows of blocks; open blocks hold the elements themselves."""
    fmt = part.fmt
    if fmt.name.startswith("fp8"):
        return TokenParams(part.scale * (_E4M3_BIAS if fmt.name == "fp8_e4m3" else 1.0), None, None)
    if fmt.grouping is not Grouping.TOKEN or part.params is None:
        return TokenParams(1.0, None, None)
    gathered = part.params.flatten(0, 1).index_select(0, block_rows.flatten()).float()
    scale = gathered[:, 0]
    low = gathered[:, 1] if fmt.num_params == 2 else scale * -fmt.code_offset if fmt.code_offset else None
    if open_blocks is not None:
        scale.index_fill_(0, open_blocks.target, 1.0)
        if low is not None:
            low.index_fill_(0, open_blocks.target, 0.0)
    return TokenParams(1.0, scale, low)


def paired(vectors: Tensor, fmt: VectorFormat) -> Tensor:
    """vectors [..., head_dim] with channels j and j + head_dim / 2 next to each other where a byte holds both."""
    if fmt.elements_per_code == 1:
        return vectors
    width = vectors.shape[-1] // fmt.elements_per_code
    return vectors.view(*vectors.shape[:-1], fmt.elements_per_code, width).transpose(-1, -2).flatten(-2)


def unpaired(vectors: Tensor, fmt: VectorFormat) -> Tensor:
    """The inverse of paired."""
    if fmt.elements_per_code == 1:
        return vectors
    width = vectors.shape[-1] // fmt.elements_per_code
    return vectors.view(*vectors.shape[:-1], width, fmt.elements_per_code).transpose(-1, -2).flatten(-2)


def gather_numbers(
    part: PagedVectors, block_rows: Tensor, open_blocks: OpenBlocks | None, scratch: Scratch | None = None
) -> Tensor:
    """Numbers [len(block_rows), block_size, head_dim] of blocks, channels `paired`, in a buffer of scratch if given.

    block_rows: int64 [n], of the codes viewed as [num_blocks * num_kv_heads, ...].
    """
    codes, fmt = part.codes, part.fmt
    rows, block_size, width = block_rows.shape[0], codes.shape[2], codes.shape[3]
    scratch = {} if scratch is None else scratch
    shape = (rows, block_size, width * fmt.elements_per_code)
    numbers = _buffer(scratch, "numbers", torch.float32, shape)
    flat = codes.view(torch.int8 if codes.dtype.itemsize == 1 else codes.dtype).view(-1, block_size * width)
    if codes.dtype == torch.float32:
        torch.index_select(flat, 0, block_rows, out=numbers.view(rows, -1))
    else:
        raw = _buffer(scratch, "codes", flat.dtype, (rows, block_size * width))
        torch.index_select(flat, 0, block_rows, out=raw)
        _decode(raw.view(rows, block_size, width), fmt.name, numbers, scratch)
    if fmt.grouping is Grouping.CHANNEL and part.params is not None:
        params = part.params.flatten(0, 1).index_select(0, block_rows).float()
        params = paired(params, fmt)
        torch.addcmul(params[:, 1:], numbers, params[:, :1], out=numbers)
    if open_blocks is not None and part.open_blocks is not None and open_blocks.target.numel():
        vectors = part.open_blocks.flatten(0, 1).index_select(0, open_blocks.source).float()
        numbers.index_copy_(0, open_blocks.target, paired(vectors, fmt))
    return numbers


def gather_vectors(part: PagedVectors, block_rows: Tensor, open_blocks: OpenBlocks | None) -> Tensor:
    """float32 vectors [len(block_rows), block_size, head_dim] of blocks, still rotated."""
    numbers = gather_numbers(part, block_rows, open_blocks)
    params = token_params(part, block_rows, open_blocks)
    if params.factor != 1.0:
        numbers.mul_(params.factor)
    if params.scale is not None:
        numbers.mul_(params.scale[:, :, None])
    if params.low is not None:
        numbers.add_(params.low[:, :, None])
    return unpaired(numbers, part.fmt)


def _decode(raw: Tensor, name: str, numbers: Tensor, scratch: Scratch) -> None:
    """Turn gathered codes into float32 numbers of the same shape, twice as wide where a byte holds two.

    Two nibbles become the two bytes of a (little-endian) 16-bit word: passes over contiguous memory, several times as
    fast as filling each half of the numbers.
    """
    if numbers.shape[2] != raw.shape[2]:
        words = _buffer(scratch, "nibbles", torch.int16, raw.shape)
        words.copy_(raw.view(torch.uint8))
        moved = torch.mul(words, 16, out=_buffer(scratch, "moved", torch.int16, raw.shape))
        numbers.copy_(words.bitwise_or_(moved).bitwise_and_(0x0F0F).view(torch.int8))
    elif name.startswith("fp8"):
        numbers.copy_(_fp8_to_half(raw, name, scratch))
    else:
        numbers.copy_(raw)


def _fp8_to_half(raw: Tensor, name: str, scratch: Scratch) -> Tensor:
    """fp16 with the value of e5m2 codes, or 2**-8 times that of e4m3 codes; several times torch's own conversion.

    e5m2 is the upper half of fp16. e4m3's exponent and mantissa move by 7 bits to the same place; its only NaN, all
    ones, would be a number there, so it gets fp16's top exponent bit as well.
    """
    half = _buffer(scratch, "halves", torch.int16, raw.shape)
    half.copy_(raw)
    if name == "fp8_e5m2":
        return half.mul_(256).view(torch.float16)
    half.bitwise_and_(-0x81)  # bit 7, a copy of the sign, makes room
    top = torch.add(half, 1, out=_buffer(scratch, "nan", torch.int16, raw.shape)).bitwise_and_(0x80)
    half.bitwise_or_(top)  # NaN carried into bit 7, which becomes fp16's top exponent bit
    return half.mul_(128).view(torch.float16)


def _buffer(scratch: Scratch, use: str, dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Memory of this shape, content undefined; kept for the next piece, so that it stays in the CPU's cache."""
    size = torch.Size(shape).numel()
    buffer = scratch.get((use, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = scratch[use, dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)
