"""A device-to-device copy in Triton: what the benchmark holds the attention kernels' bandwidth against."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(source: tl.tensor, target: tl.tensor, num_elements: tl.tensor, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def triton_copy(source: Tensor, target: Tensor) -> None:
    """Copy a contiguous tensor onto another of the same size."""
    grid = (triton.cdiv(source.numel(), BLOCK),)
    copy_kernel[grid](source, target, source.numel(), BLOCK=BLOCK, num_warps=8)
