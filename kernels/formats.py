"""KV cache formats: the one place that knows how a key or value vector is stored and how many bytes it takes.

Pure Python, so that planners can do memory math without torch. Every format stores K and V in two separate
tensors of shape [num_blocks, num_kv_heads, block_size, head_dim] ("HND": one block of one head is one
contiguous run).
"""

from __future__ import annotations

from dataclasses import dataclass

_BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVFormat:
    """How one key or value vector is stored.

    name: the value of --kv-cache-dtype that selects it. storage_dtype: torch's name of the element type.
    """

    name: str
    storage_dtype: str

    def bytes_per_token_head(self, head_dim: int) -> int:
        """Bytes of ONE vector (a key or a value, not both) of one KV head of one token."""
        if head_dim <= 0:
            raise ValueError(f"head_dim must be positive, got {head_dim}.")
        return head_dim * _BYTES_PER_ELEMENT[self.storage_dtype]


KV_FORMATS: dict[str, KVFormat] = {name: KVFormat(name, name) for name in _BYTES_PER_ELEMENT}


def resolve_kv_format(kv_cache_dtype: str, model_dtype: str) -> KVFormat:
    """The format that --kv-cache-dtype asks for; "auto" means the model's own dtype.

    Raises ValueError with the list of known formats when there is no such format.
    """
    name = model_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if name not in KV_FORMATS:
        known = ", ".join(["auto", *KV_FORMATS])
        asked = f"{kv_cache_dtype!r}" + (f" (model dtype {model_dtype!r})" if kv_cache_dtype == "auto" else "")
        raise ValueError(f"Unknown KV cache dtype {asked}; use one of: {known}.")
    return KV_FORMATS[name]
