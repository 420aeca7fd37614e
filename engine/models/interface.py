"""What the runner needs of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.models.lora import LoRABatch
from kernels.attention import AttentionMetadata


class CausalLM(Protocol):
    """A decoder that runs over a flat batch of tokens on the paged KV cache; its weights never train.

    weights_bytes: of all tensors it holds, rotary tables included; a tied embedding counts once.
    kv_scales: layer -> scales of K and V for an fp8 cache, where the checkpoint has them.
    """

    dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    kv_scales: dict[int, tuple[float, float]]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Any],
        metadata: AttentionMetadata,
        lora: LoRABatch | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden] of input_ids int64 [T] at positions int64 [T]; writes their keys and values.

        lora: the adapters of these tokens; only for the dense decoder, others have none to be given.

        kv_caches: one a layer, as `engine.runner.allocate_kv_caches` gives them for the model's dimensions:
        `LayerKVCache`, or for multi-head latent attention a tensor [num_blocks, block_size, latent width].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden]."""
        ...
