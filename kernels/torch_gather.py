"""Gathers blocks of a paged cache and turns their codes into float32 numbers, for decodes and prefill chunks alike.

A number times the parameters of its group is the vector's element. Decodes apply per-token parameters to scores and
weights instead, which are far fewer, and attend to open blocks apart; per-channel parameters are dealt with here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import Grouping, VectorFormat
from kernels.kv_cache import PagedVectors
from kernels.torch_plan import OpenBlocks

Scratch = dict[tuple[str, torch.dtype], Tensor]

LOWER = 16.0  # what a byte's lower half is read times too large
_E4M3_BIAS = 256.0  # an e4m3 code moved into fp16's fields reads 2**8 too small, their exponents' biases being 7 and 15


@dataclass(frozen=True)
class TokenParams:
    """element = factor * (scale * number + low), scale and low float32 [rows, block_size] or absent."""

    factor: float
    scale: Tensor | None
    low: Tensor | None


def token_params(part: PagedVectors, block_rows: Tensor) -> TokenParams:
    """Parameters of the tokens of these rows of blocks."""
    fmt = part.fmt
    if fmt.name.startswith("fp8"):
        return TokenParams(part.scale * (_E4M3_BIAS if fmt.name == "fp8_e4m3" else 1.0), None, None)
    if fmt.grouping is not Grouping.TOKEN or part.params is None:
        return TokenParams(1.0, None, None)
    gathered = part.params.flatten(0, 1).index_select(0, block_rows.flatten()).float()
    scale = gathered[:, 0]
    low = gathered[:, 1] if fmt.num_params == 2 else scale * -fmt.code_offset if fmt.code_offset else None
    return TokenParams(1.0, scale, low)


def paired(vectors: Tensor, fmt: VectorFormat, lower: float = 1.0) -> Tensor:
    """vectors [..., head_dim] with channels j and j + head_dim / 2 next to each other where a byte holds both.

    lower: what the channel in a byte's lower half is multiplied with.
    """
    if fmt.elements_per_code == 1:
        return vectors
    low, high = vectors.chunk(2, -1)
    return torch.stack((low * lower, high), -1).flatten(-2)


def unpaired(numbers: Tensor, fmt: VectorFormat) -> Tensor:
    """Numbers, or sums of them, [..., head_dim] in the order of a vector's channels, all as large as they should be."""
    if fmt.elements_per_code == 1:
        return numbers
    low, high = numbers.view(*numbers.shape[:-1], -1, 2).unbind(-1)
    return torch.cat((low / LOWER, high), -1)


def gather_numbers(part: PagedVectors, block_rows: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Numbers [len(block_rows), block_size, head_dim] of blocks, channels `paired`, in a buffer of scratch if given.

    block_rows: int64 [n], of the codes viewed as [num_blocks * num_kv_heads, ...]. Of the two numbers in a byte, that
    of the lower half comes LOWER times too large.
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
        scale, low = paired(part.params.flatten(0, 1).index_select(0, block_rows), fmt).float().chunk(2, 1)
        if fmt.elements_per_code == 2:
            low[..., ::2].mul_(LOWER)
        torch.addcmul(low, numbers, scale, out=numbers)
    return numbers


def gather_open(part: PagedVectors, open_blocks: OpenBlocks) -> Tensor:
    """float32 vectors [len(source), block_size, head_dim] of open blocks."""
    assert part.open_blocks is not None
    return part.open_blocks.flatten(0, 1).index_select(0, open_blocks.source).float()


def gather_vectors(part: PagedVectors, block_rows: Tensor, open_blocks: OpenBlocks | None) -> Tensor:
    """float32 vectors [len(block_rows), block_size, head_dim] of blocks, still rotated."""
    vectors = unpaired(gather_numbers(part, block_rows), part.fmt)
    params = token_params(part, block_rows)
    if params.factor != 1.0:
        vectors.mul_(params.factor)
    if params.scale is not None:
        vectors.mul_(params.scale[:, :, None])
    if params.low is not None:
        vectors.add_(params.low[:, :, None])
    if open_blocks is not None:
        vectors.index_copy_(0, open_blocks.target, gather_open(part, open_blocks))
    return vectors


def _decode(raw: Tensor, name: str, numbers: Tensor, scratch: Scratch) -> None:
    """Turn gathered codes into float32 numbers of the same shape, twice as wide where a byte holds two.

    Moved up by four bits, a byte's nibbles lie in the two bytes of a (little-endian) 16-bit word, the lower nibble in
    the upper half of its byte: passes over contiguous memory, several times as fast as filling each half of the
    numbers.
    """
    if numbers.shape[2] != raw.shape[2]:
        words = _buffer(scratch, "nibbles", torch.int16, raw.shape)
        words.copy_(raw.view(torch.uint8)).mul_(16)
        numbers.copy_(words.view(torch.uint8))
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
    if raw.amax() == 0x7F or raw.view(torch.uint8).amax() == 0xFF:  # NaN of either sign; rare, and this is cheap
        half.bitwise_or_((half + 1).bitwise_and_(0x80))  # carried into bit 7, which becomes fp16's top exponent bit
    return half.mul_(128).view(torch.float16)


def _buffer(scratch: Scratch, use: str, dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Memory of this shape, content undefined; kept for the next piece, so that it stays in the CPU's cache."""
    size = torch.Size(shape).numel()
    buffer = scratch.get((use, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = scratch[use, dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)
