"""Flash decoding's second stage: merge the partial results of a context that was split between programs.

A split leaves a normalized output and the base-2 log-sum-exp of its scores. A split that saw no key leaves lse = -inf
and its output is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_TOKENS_PER_SPLIT = 256
MAX_SPLITS = 32


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits_kernel(
    partial_out_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    lse = tl.load(partial_lse_ptr + splits)
    highest = tl.max(lse, 0)
    weights = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(highest > float("-inf"), highest, 0.0)), 0.0)
    mask = (lse > float("-inf"))[:, None] & (dims < DIM)[None, :]
    partial = tl.load(partial_out_ptr + splits[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < DIM)
    tl.store(lse_ptr + row, highest + tl.log2(tl.where(total > 0.0, total, 1.0)))


class Partials:
    """Where the first stage writes: the final tensors when there is one split, scratch otherwise."""

    def __init__(self, out: Tensor, num_splits: int) -> None:
        """out: [num_tokens, num_heads, dim], contiguous."""
        num_tokens, num_heads, dim = out.shape
        self.final_out, self.num_splits = out, num_splits
        self.lse = out.new_full((num_tokens, num_heads, num_splits), float("-inf"), dtype=torch.float32)
        shape = (num_tokens, num_heads, num_splits, dim)
        self.out = out if num_splits == 1 else out.new_empty(shape, dtype=torch.float32)

    def merge(self) -> Tensor:
        """Complete the output; returns the base-2 log-sum-exp [num_tokens, num_heads], -inf where no key was seen."""
        num_tokens, num_heads, dim = self.final_out.shape
        if self.num_splits == 1:
            return self.lse.view(num_tokens, num_heads)
        lse = self.lse.new_empty((num_tokens, num_heads))
        merge_splits_kernel[(num_tokens, num_heads)](
            self.out,
            self.lse,
            self.final_out,
            lse,
            NUM_HEADS=num_heads,
            DIM=dim,
            NUM_SPLITS=self.num_splits,
            PADDED_DIM=triton.next_power_of_2(dim),
            num_warps=4,
        )
        return lse


def choose_num_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Smallest power of two that gives every processor two programs, without splits under MIN_TOKENS_PER_SPLIT.

    It follows the batch, so results are not bitwise the same in every batch.
    """
    wanted = -(-2 * num_processors // max(num_programs, 1))
    most = min(max(max_seq_len // MIN_TOKENS_PER_SPLIT, 1), MAX_SPLITS)
    splits = 1
    while splits < wanted and splits * 2 <= most:
        splits *= 2
    return splits


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
