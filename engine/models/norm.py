"""RMSNorm in as few operators as the device allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in float32.

    weight: [size], or [num_heads, size] where the heads of x have weights of their own. offset: 1 for Gemma, which
    stores the distance of its weights from 1 and must not round the sum to the model's dtype.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight.float() + offset if offset else weight
        self.eps = eps
        size = weight.shape[-1]
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(eps * size)) / sqrt(size): no squares, no separate mean.
        self._floor = torch.tensor(math.sqrt(eps * size), dtype=torch.float32, device=weight.device)
        self._scaled_weight = self.weight.float() * math.sqrt(size)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # one fused kernel there; on the CPU it is a chain of six operators
            if self.weight.dim() == 1 and self.weight.dtype == x.dtype:
                return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
            return functional.rms_norm(x.float(), x.shape[-1:], None, self.eps).mul_(self.weight).to(x.dtype)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        torch.hypot(norm, self._floor, out=norm)
        return torch.div(x, norm).mul_(self._scaled_weight).to(x.dtype)
