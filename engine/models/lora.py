"""LoRA adapters of the dense decoder: reading a PEFT directory, and adding its products to those of a batch.

An adapter adds scale * B A to a projection W, so x (W + scale * B A)^T = x W^T + (x A^T) (scale * B^T). Projections
that the decoder keeps as one matrix have one pair here too: the A side by side, the B on the diagonal.
Rows of a batch that have no adapter are not touched, and a batch without adapters costs nothing.
Names and meaning of the files: PEFT's `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ConfigError, ModelDims

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The decoder's matrices and the projections each is made of, in order."""
TARGETS = tuple(name.split(".")[1] for names in PARTS.values() for name in names)

_TENSOR = re.compile(r"^base_model\.model\.model\.layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])\.weight$")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,), "bias": ("none",),
    "modules_to_save": ([],), "rank_pattern": ({},), "alpha_pattern": ({},), "layer_replication": ([],),
    "trainable_token_indices": ([], {}), "use_qalora": (False,), "target_parameters": ([],),
    "alora_invocation_tokens": ([],), "arrow_config": ({},), "use_bdlora": (False,),
}  # fmt: skip
"""Settings of PEFT that change the function: only these values of them are what is computed here."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one of the decoder's matrices: a [in, rank] and b [rank, out], scale included."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoRAWeights:
    """A loaded adapter. layers: for each decoder layer, `PARTS` name -> what is added; parts may be missing."""

    rank: int
    layers: tuple[dict[str, LowRank], ...]

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for layer in self.layers for pair in layer.values())


@dataclass(frozen=True)
class LoRABatch:
    """The adapters of one batch, each with its rows, int64 [n]; `None` when all rows are its."""

    groups: tuple[tuple[Tensor | None, LoRAWeights], ...]

    @staticmethod
    def of(sequences: Sequence[tuple[int, LoRAWeights | None]], device: torch.device) -> LoRABatch | None:
        """The batch of sequences one behind the other, each with its tokens' number; `None` when nobody has one."""
        rows: dict[int, tuple[LoRAWeights, list[int]]] = {}
        start = 0
        for length, weights in sequences:
            if weights is not None:
                rows.setdefault(id(weights), (weights, []))[1].extend(range(start, start + length))
            start += length
        if not rows:
            return None
        return LoRABatch(
            tuple(
                (None if len(indices) == start else torch.tensor(indices, device=device), weights)
                for weights, indices in rows.values()
            )
        )

    @staticmethod
    def widest(dims: ModelDims, rank: int, num_tokens: int, dtype: torch.dtype, device: torch.device) -> LoRABatch:
        """Stands for an adapter of this rank in every matrix, of all rows but one: what needs most memory."""
        shapes = _projection_shapes(dims)
        layer = {}
        for part, names in PARTS.items():
            a = torch.zeros(shapes[names[0]][1], rank * len(names), dtype=dtype, device=device)
            layer[part] = LowRank(a, a.new_zeros(a.shape[1], sum(shapes[name][0] for name in names)))
        rows = torch.arange(max(1, num_tokens - 1), device=device)
        return LoRABatch(((rows, LoRAWeights(rank, (layer,) * dims.num_layers)),))

    def add(self, out: Tensor, x: Tensor, layer: int, part: str) -> None:
        """out [T, out] += what the adapters make of x [T, in] in one matrix of a layer."""
        for rows, weights in self.groups:
            pair = weights.layers[layer].get(part)
            if pair is None:
                continue
            if rows is None:
                out.addmm_(torch.mm(x, pair.a), pair.b)
            else:
                out.index_add_(0, rows, torch.mm(torch.mm(x.index_select(0, rows), pair.a), pair.b))


def read_adapter(path: Path, dims: ModelDims, dtype: torch.dtype, device: torch.device, max_rank: int) -> LoRAWeights:
    """The adapter in a PEFT directory, for a dense decoder of these dimensions; raises `ConfigError`."""
    config = _read_config(path)
    rank, scale = _rank_and_scale(path, config, max_rank)
    tensors = _read_tensors(path)
    shapes = _projection_shapes(dims)
    projections: list[dict[str, LowRank]] = [{} for _ in range(dims.num_layers)]
    for name in sorted(tensors):
        match = _TENSOR.match(name)
        if match is None or match[2] not in shapes or int(match[1]) >= dims.num_layers:
            raise _bad(path, f"tensor {name} is none that this model has; adapters may target {', '.join(TARGETS)}")
        if match[3] == "B":
            continue
        rows, columns = shapes[match[2]]
        a, b = tensors[name], tensors.get(name.replace("lora_A", "lora_B"))
        if b is None:
            raise _bad(path, f"tensor {name} has no lora_B beside it")
        for tensor, shape, letter in ((a, (rank, columns), "A"), (b, (rows, rank), "B")):
            if tuple(tensor.shape) != shape:
                raise _bad(
                    path,
                    f"lora_{letter} of layer {match[1]}, {match[2]}, has shape {list(tensor.shape)}, but rank {rank} "
                    f"and this model ask for {list(shape)}",
                )
        a, b = a.t().to(device, dtype), (b.float() * scale).t().to(device, dtype)
        projections[int(match[1])][match[2]] = LowRank(a.contiguous(), b.contiguous())
    found = sum(map(len, projections))
    if not found or len(tensors) != 2 * found:
        raise _bad(path, "its tensors are not pairs of lora_A and lora_B" if tensors else "it has no tensors")
    return LoRAWeights(rank, tuple(_fused(layer, shapes) for layer in projections))


def _fused(projections: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, int]]) -> dict[str, LowRank]:
    """The pairs of a layer's matrices from those of its projections."""
    fused = {}
    for part, names in PARTS.items():
        present = [name for name in names if name in projections]
        if not present:
            continue
        first = projections[present[0]]
        total_rank = sum(projections[name].b.shape[0] for name in present)
        b = first.b.new_zeros(total_rank, sum(shapes[name][0] for name in names))
        row = column = 0
        for name in names:
            if name in projections:
                block = projections[name].b
                b[row : row + block.shape[0], column : column + block.shape[1]] = block
                row += block.shape[0]
            column += shapes[name][0]
        fused[part] = LowRank(torch.cat([projections[name].a for name in present], dim=1).contiguous(), b)
    return fused


def _projection_shapes(dims: ModelDims) -> dict[str, tuple[int, int]]:
    """Projection -> (out, in)."""
    hidden, inter = dims.hidden_size, dims.intermediate_size
    q_size, kv_size = dims.num_q_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    return {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(path, f"{CONFIG_FILE} cannot be read ({error.strerror}); give the directory PEFT wrote") from None
    except ValueError as error:
        raise _bad(path, f"{CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _bad(path, f"{CONFIG_FILE} does not say peft_type LORA; only LoRA adapters can be served")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise _bad(path, f"{CONFIG_FILE} sets {key} to {value!r}, which this engine does not compute")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        unknown = sorted(str(target) for target in targets if str(target).rpartition(".")[2] not in TARGETS)
        if unknown:
            raise _bad(path, f"target {unknown[0]} cannot be adapted here; adapters may target {', '.join(TARGETS)}")
    return config


def _rank_and_scale(path: Path, config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise _bad(path, f"{CONFIG_FILE} needs r, a positive integer, and lora_alpha, a number")
    if rank > max_rank:
        raise _bad(path, f"rank {rank} is above --max-lora-rank {max_rank}; raise the flag")
    return rank, float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = path / WEIGHTS_FILE
    try:
        with safe_open(str(file), framework="pt", device="cpu") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise _bad(path, f"{WEIGHTS_FILE} cannot be read as safetensors ({error})") from None


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(f"adapter {str(path)!r}: {what}")
