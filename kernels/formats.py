"""KV cache formats: the one place that knows how keys and values are stored and how many bytes they take.

Pure Python, so that planners can do memory math without torch; `kernels.quantize` packs and unpacks.
A format names how keys and how values are stored; the two may differ. Either way a layer's codes lie in a tensor
[num_blocks, num_kv_heads, block_size, row width] ("HND": one block of one head is one contiguous run), and what is
needed to read them back, in a tensor [num_blocks, num_kv_heads, 1 or 2, block_size or head_dim] of its own: copying,
sharing or freeing a block id carries both, and a token's scale is never touched by later tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class Grouping(Enum):
    """Which elements share one scale (and one minimum)."""

    NONE = "none"  # floating point; fp8 has one scale a layer, outside the pool
    TOKEN = "token"  # the head_dim channels of one token and KV head
    CHANNEL = "channel"  # the block_size tokens of one channel and KV head: known only when the block is full


@dataclass(frozen=True)
class VectorFormat:
    """How key vectors, or value vectors, are stored.

    storage_dtype: torch's name of the element type of the codes. elements_per_code: 2 when a byte holds channels j
    (low nibble) and j + head_dim / 2 (high nibble). num_params: 1 scale, or 2 for scale and minimum, per group.
    code_offset: what is added to a signed code to store it unsigned. rotated: a fixed orthogonal matrix is applied
    to the vector first, which spreads outlier channels; see `kernels.quantize.rotation_matrix`.
    """

    name: str
    storage_dtype: str
    elements_per_code: int = 1
    grouping: Grouping = Grouping.NONE
    num_params: int = 0
    param_dtype: str = "float32"
    code_offset: int = 0
    rotated: bool = False

    def row_width(self, head_dim: int) -> int:
        """Codes of one vector. ValueError when head_dim cannot be packed."""
        if head_dim <= 0 or head_dim % self.elements_per_code:
            raise ValueError(
                f"{self.name} needs a positive head_dim divisible by {self.elements_per_code}: {head_dim}."
            )
        return head_dim // self.elements_per_code

    def params_shape(self, head_dim: int, block_size: int) -> tuple[int, int]:
        """Shape of one block and head's parameters: [1 or 2, groups]; (0, 0) when there are none."""
        if self.grouping is Grouping.NONE:
            return (0, 0)
        return (self.num_params, block_size if self.grouping is Grouping.TOKEN else head_dim)

    def bytes_per_block_head(self, head_dim: int, block_size: int) -> int:
        """Bytes of block_size vectors of one KV head, parameters included."""
        rows, groups = self.params_shape(head_dim, block_size)
        codes = block_size * self.row_width(head_dim) * _BYTES[self.storage_dtype]
        return codes + rows * groups * _BYTES[self.param_dtype]


_FLOATS = {name: VectorFormat(name, name) for name in ("float32", "float16", "bfloat16")}
_FP8_E4M3 = VectorFormat("fp8_e4m3", "float8_e4m3fn")
_FP8_E5M2 = VectorFormat("fp8_e5m2", "float8_e5m2")
_INT8 = VectorFormat("int8", "int8", grouping=Grouping.TOKEN, num_params=1)
_INT4_SYMMETRIC = VectorFormat("int4_symmetric", "uint8", 2, Grouping.TOKEN, num_params=1, code_offset=8)
_INT4 = VectorFormat("int4", "uint8", 2, Grouping.TOKEN, num_params=2, param_dtype="float16")
_INT4_ROTATED = VectorFormat("int4_rotated", "uint8", 2, Grouping.TOKEN, 2, "float16", rotated=True)
_INT4_CHANNEL = VectorFormat("int4_channel", "uint8", 2, Grouping.CHANNEL, 2, "float16")


@dataclass(frozen=True)
class KVFormat:
    """A value of --kv-cache-dtype: how keys and how values are stored, and the source of the scheme."""

    name: str
    key: VectorFormat
    value: VectorFormat
    source: str

    @property
    def keeps_open_blocks(self) -> bool:
        """Whether a block stays in full precision, outside the pool, until its last slot is written."""
        return Grouping.CHANNEL in (self.key.grouping, self.value.grouping)

    @property
    def quantized(self) -> bool:
        return self.name not in _FLOATS

    @property
    def scaled(self) -> bool:
        """Whether keys and values have one scale a layer, outside the pool."""
        return self.name.startswith("fp8")

    def bytes_per_block_head(self, head_dim: int, block_size: int) -> int:
        """Bytes of keys AND values of one block and one KV head, scales and minima included."""
        return sum(part.bytes_per_block_head(head_dim, block_size) for part in (self.key, self.value))


def _both(name: str, part: VectorFormat, source: str) -> KVFormat:
    return KVFormat(name, part, part, source)


KV_FORMATS: dict[str, KVFormat] = {
    kv_format.name: kv_format
    for kv_format in (
        *(_both(name, part, "as the model computes") for name, part in _FLOATS.items()),
        _both("fp8_e4m3", _FP8_E4M3, "vLLM: one scale a layer for K, one for V; saturates at 448"),
        _both("fp8_e5m2", _FP8_E5M2, "vLLM: one scale a layer for K, one for V; saturates at 57344"),
        _both("int8_per_token_head", _INT8, "vLLM 0.20: symmetric, scale = absmax / 127 per token and head"),
        _both("int4_symmetric", _INT4_SYMMETRIC, "the naive scheme: scale = absmax / 7 per token and head"),
        _both(
            "int4_per_token_head",
            _INT4_ROTATED,
            "vLLM 0.25's scheme (rotation, asymmetric, 4 bytes of parameters a vector), with the minimum stored as it "
            "is, where vLLM clamps a zero point",
        ),
        KVFormat(
            "int4_kivi",
            _INT4_CHANNEL,
            _INT4,
            "KIVI (arXiv 2402.02750): keys per channel over a block, values per token (one group a head, not 32 "
            "channels); blocks that are not full yet stay in full precision",
        ),
        KVFormat("int8k_int4v", _INT8, _INT4_ROTATED, "keys get the bits (arXiv 2502.15075): int8 K, rotated int4 V"),
    )
}
_ALIASES = {"fp8": "fp8_e4m3"}  # as in vLLM
KV_CACHE_DTYPES = ("auto", *KV_FORMATS, *_ALIASES)


def resolve_kv_format(kv_cache_dtype: str, model_dtype: str) -> KVFormat:
    """The format that --kv-cache-dtype asks for; "auto" means the model's own dtype, "fp8" is fp8_e4m3.

    Raises ValueError with the list of known formats when there is no such format.
    """
    name = model_dtype if kv_cache_dtype == "auto" else _ALIASES.get(kv_cache_dtype, kv_cache_dtype)
    if name not in KV_FORMATS:
        asked = f"{kv_cache_dtype!r}" + (f" (model dtype {model_dtype!r})" if kv_cache_dtype == "auto" else "")
        raise ValueError(f"Unknown KV cache dtype {asked}; use one of: {', '.join(KV_CACHE_DTYPES)}.")
    return KV_FORMATS[name]
