"""The tensors of a GGUF file under their Hugging Face names, dequantized as they are taken.

Undoes what llama.cpp's conversion does to weights: query and key rows of Llama are reordered for its way of rotating
neighbouring pairs, and the norm weights of Gemma have 1 added. Rows are dequantized a few at a time, so that loading
needs little beyond the weights themselves. Needs the `gguf` package (extra `gemma`).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType, TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import ModelLoadError
from engine.gguf_config import hf_config_of
from engine.gguf_file import TensorInfo, read_gguf_header
from engine.models.checkpoint import Checkpoint

CHUNK_ELEMENTS = 1 << 20  # dequantized at once

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA3_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GGUFCheckpoint(Checkpoint):
    """The weights of one GGUF file; raises `ModelLoadError` when a tensor is cut off or of an unknown type."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(path, dtype, device)
        self._gguf = _import_gguf()
        header = read_gguf_header(path)
        config = hf_config_of(header)
        self._tensors = header.tensors
        self._architecture: str = header.metadata["general.architecture"]
        self._layer_names = _LAYER | (_GEMMA3_NORMS if self._architecture == "gemma3" else {})
        self._heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        file_size = path.stat().st_size
        for info in header.tensors.values():
            end = info.offset + math.prod(info.shape[:-1]) * self._row_bytes(info)
            if end > file_size:
                raise ModelLoadError(
                    f"{str(path)!r} is cut short: tensor {info.name!r} ends at byte {end}, but the file has "
                    f"{file_size} bytes; fetch it again"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = {}

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def unused(self) -> list[str]:
        return sorted(self._tensors.keys() - {self._gguf_name(name) for name in self._taken})

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[self._gguf_name(name)].shape

    def copy_rows(self, name: str, out: Tensor) -> None:
        info = self._tensors[self._gguf_name(name)]
        matrix = out if out.dim() > 1 else out.unsqueeze(0)
        rows = self._raw_rows(info, matrix.shape[0])
        chunk = max(1, CHUNK_ELEMENTS // matrix.shape[1])
        subtract = np.float32(1) if self._architecture == "gemma3" and name.endswith("norm.weight") else None
        for start in range(0, len(rows), chunk):
            values = self._dequantize(np.array(rows[start : start + chunk]), info)
            matrix[start : start + chunk].copy_(torch.from_numpy(values if subtract is None else values - subtract))

    def _dequantize(self, raw: NDArray[np.uint8], info: TensorInfo) -> NDArray[np.float32]:
        kind = self._gguf.GGMLQuantizationType(info.type_id)
        try:
            values: NDArray[np.float32] = self._gguf.quants.dequantize(raw, kind)
        except NotImplementedError:
            raise ModelLoadError(
                f"tensor {info.name!r} in {str(self.source)!r} is quantized as {kind.name}, which the gguf package "
                "cannot dequantize; fetch another quantization"
            ) from None
        return values

    def _raw_rows(self, info: TensorInfo, num_rows: int) -> NDArray[np.uint8]:
        """The quantized bytes [rows, bytes of a row], in the order of Hugging Face."""
        shape = (num_rows, self._row_bytes(info))
        rows: NDArray[np.uint8] = np.memmap(self.source, np.uint8, mode="r", offset=info.offset, shape=shape)
        part = info.name.split(".")[-2]
        if self._architecture == "llama" and part in self._heads and num_rows > 1:
            pairs = rows.reshape(self._heads[part], -1, 2, shape[1])  # stored pairs (2i, 2i + 1) of each head
            rows = pairs.swapaxes(1, 2).reshape(shape)
        return rows

    def _row_bytes(self, info: TensorInfo) -> int:
        try:
            elements, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(info.type_id)]
        except (ValueError, KeyError):
            raise ModelLoadError(
                f"tensor {info.name!r} in {str(self.source)!r} is of ggml type {info.type_id}, which the installed "
                "gguf package does not know; upgrade it or fetch another quantization"
            ) from None
        if info.shape[-1] % elements:
            raise ModelLoadError(
                f"tensor {info.name!r} in {str(self.source)!r} has rows of {info.shape[-1]} values, which its type "
                f"cannot hold; the file is corrupt, fetch it again"
            )
        return int(info.shape[-1] // elements * size)

    def _gguf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        match = _LAYER_NAME.fullmatch(stem)
        if match:
            return f"blk.{match[1]}.{self._layer_names.get(match[2], match[2])}.{kind}"
        return f"{_TOP.get(stem, stem)}.{kind}"


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ModelLoadError(
            "GGUF files need the gguf package, which is not installed: pip install 'kvoncall[gemma]'"
        ) from None
    module: ModuleType = gguf
    return module
