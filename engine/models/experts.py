"""Feed-forward layers of DeepSeek-V2: dense, and mixtures of routed experts beside shared ones.

A router sends every token to a few experts; tokens are sorted by expert, so that each expert multiplies its tokens
once. Shared experts see all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import ModelLoadError
from engine.models.checkpoint import Checkpoint
from engine.models.config_values import non_negative_int, positive_float, positive_int


@dataclass
class DenseMLP:
    """down(silu(gate(x)) * up(x)). gate_up: [hidden, 2 * intermediate]; down: [intermediate, hidden]."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, hidden: int, intermediate: int) -> DenseMLP:
        """Takes `<prefix>.{gate,up,down}_proj.weight`."""
        gate_up = {f"{prefix}.gate_proj.weight": intermediate, f"{prefix}.up_proj.weight": intermediate}
        return cls(
            gate_up=checkpoint.take_transposed(gate_up, hidden),
            down=checkpoint.take_transposed({f"{prefix}.down_proj.weight": hidden}, intermediate),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x and the result: [T, hidden]."""
        gate, up = torch.mm(x, self.gate_up).chunk(2, dim=-1)
        return torch.mm(functional.silu(gate).mul_(up), self.down)


@dataclass(frozen=True)
class Router:
    """How experts are chosen: the most probable ones, or those within the best groups ("group_limited_greedy")."""

    num_experts: int
    top_k: int
    scaling: float
    num_groups: int = 1
    top_groups: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Router:
        """From a `config.json`; raises `ModelLoadError` for a method it does not know or numbers that do not fit."""
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelLoadError(f"config.json: topk_method {method!r} is not one of greedy, group_limited_greedy")
        if (config.get("scoring_func") or "softmax") != "softmax" or config.get("norm_topk_prob"):
            raise ModelLoadError("config.json: DeepSeek here routes by softmax without norm_topk_prob, as V2 does")
        grouped = method == "group_limited_greedy"
        router = cls(
            num_experts=non_negative_int(config, "n_routed_experts"),
            top_k=non_negative_int(config, "num_experts_per_tok"),
            scaling=positive_float(config, "routed_scaling_factor", 1.0),
            num_groups=positive_int(config, "n_group", 1) if grouped else 1,
            top_groups=positive_int(config, "topk_group", 1) if grouped else 1,
        )
        if router.num_experts % router.num_groups or not router.top_groups <= router.num_groups:
            raise ModelLoadError(
                f"config.json: {router.num_experts} experts cannot be routed as {router.top_groups} of "
                f"{router.num_groups} groups"
            )
        return router

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts, each [T, top_k], of router logits float32 [T, num_experts]."""
        scores = logits.softmax(dim=-1)
        if self.num_groups > 1:
            groups = scores.view(-1, self.num_groups, self.num_experts // self.num_groups)
            best = groups.amax(dim=-1).topk(self.top_groups, dim=-1).indices
            kept = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1.0)
            scores = (groups * kept.unsqueeze(-1)).flatten(1)
        weights, experts = scores.topk(self.top_k, dim=-1)
        return weights.mul_(self.scaling), experts


@dataclass
class Mixture:
    """Routed experts, and the shared ones as one wider MLP. gate: [hidden, num_experts] float32."""

    router: Router
    gate: Tensor
    experts: list[DenseMLP]
    shared: DenseMLP | None

    def __call__(self, x: Tensor) -> Tensor:
        """x and the result: [T, hidden]."""
        weights, chosen = self.router(torch.mm(x.float(), self.gate))
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        order = chosen.flatten().argsort()
        tokens = order // self.router.top_k
        gains = weights.flatten().index_select(0, order).unsqueeze(-1).to(x.dtype)
        counts = chosen.flatten().bincount(minlength=self.router.num_experts).tolist()
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert(x.index_select(0, rows)).mul_(gains[start : start + count]))
                start += count
        return out


def load_experts(
    checkpoint: Checkpoint, prefix: str, hidden: int, config: Mapping[str, Any], router: Router
) -> Mixture:
    """Takes the mixture at `<prefix>`; `ModelLoadError` when `config.json` does not describe one."""
    width = positive_int(config, "moe_intermediate_size")
    if not 1 <= router.top_k <= router.num_experts:
        raise ModelLoadError(
            f"config.json: num_experts_per_tok must be between 1 and n_routed_experts ({router.num_experts}), found "
            f"{router.top_k}"
        )
    gate = checkpoint.take_transposed({f"{prefix}.gate.weight": router.num_experts}, hidden).float()
    num_shared = non_negative_int(config, "n_shared_experts")
    shared = DenseMLP.load(checkpoint, f"{prefix}.shared_experts", hidden, width * num_shared) if num_shared else None
    return Mixture(
        router=router,
        gate=gate,
        experts=[DenseMLP.load(checkpoint, f"{prefix}.experts.{i}", hidden, width) for i in range(router.num_experts)],
        shared=shared,
    )
