"""What one token takes with each way of attention, for a model's own dimensions: MHA, GQA, MQA and MLA, in bytes.

The row a model has is exact; the others are what it would take if it had been built that way. Bytes with 4 bits
include the scales of `int4_per_token_head`, the bytes of 8 bits those of a plain fp8 cache (none a token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.slots import head_block_bytes, latent_block_bytes
from runbooks.knowledge.text import Text, in_both

_FORMATS = ("bfloat16", "fp8_e4m3", "int4_per_token_head")
_KEEP_KV = ("full", "sliding", "chunked", "latent")
ROPE = 64  # values of a latent that carry the position, in all DeepSeek-like models
_DEEPSEEK_KEY, _DEEPSEEK_VALUE = 128 + ROPE, 128  # of each head before it is compressed

_EFFECT = {
    "MHA": Text("every query head has its own keys and values", "每个 Query 头都有自己的 K、V"),
    "GQA": Text("groups of query heads share keys and values", "一组 Query 头共享 K、V"),
    "MQA": Text("all query heads share one key and value", "所有 Query 头共享一份 K、V"),
    "MLA": Text("one latent for all heads, and a rotary key beside it", "所有头共享一个潜在向量，另存一份 RoPE 键"),
}


@dataclass(frozen=True)
class AttentionRow:
    """One way of attention. Bytes are per token and layer, `all_*` over all layers that keep KV."""

    kind: str
    own: bool  # the way the model is built
    kv_heads: int  # 0 for MLA
    values_per_token_layer: int
    bytes_16: int
    bytes_8: int
    bytes_4: int
    all_16: int
    all_8: int
    all_4: int
    share_of_mha: float
    how: str
    meaning: Text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; Chinese under `zh`."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "meaning"}
        return {**plain, **in_both(meaning=self.meaning)}


def attention_table(
    shape: ModelShape, *, key_dim: int | None = None, value_dim: int | None = None
) -> list[AttentionRow]:
    """MHA, GQA, MQA and MLA for a model. Raises `ConfigError` where no layer keeps KV or heads are unknown.

    key_dim, value_dim: width of a head's key and value where the model keeps a latent and does not say them; those of
    DeepSeek (192 and 128) otherwise.
    """
    groups = [group for group in shape.layers if group.attention in _KEEP_KV]
    if not groups:
        raise ConfigError(f"{shape.name or 'the model'} keeps no KV of tokens, so there is nothing to compare")
    if not shape.num_q_heads:
        raise ConfigError("the number of query heads is not known; give num_attention_heads")
    group = groups[0]
    heads = shape.num_q_heads
    key, value = _widths(group, key_dim, value_dim)
    own = kind_of(group, heads)
    grouped = group.num_kv_heads if own == "GQA" else max(2, heads // 8)
    layers = sum(one.count for one in groups)
    counts = {"MHA": heads, "GQA": grouped, "MQA": 1}
    rows = [_heads_row(kind, kind == own, count, key, value, layers) for kind, count in counts.items()]
    rows.append(_latent_row(group.latent_width or 4 * value + ROPE, own == "MLA", layers))
    return [_against(rows[0], row) for row in rows]


def row_of(table: Sequence[AttentionRow], kind: str) -> AttentionRow:
    """The row of one way of attention."""
    return next(row for row in table if row.kind == kind)


def _widths(group: LayerGroup, key_dim: int | None, value_dim: int | None) -> tuple[int, int]:
    key = key_dim or group.head_dim or _DEEPSEEK_KEY
    return key, value_dim or group.v_head_dim or (group.head_dim or _DEEPSEEK_VALUE)


def kind_of(group: LayerGroup, heads: int) -> str:
    """The way of attention of a group of layers under so many query heads."""
    if group.attention == "latent":
        return "MLA"
    if group.num_kv_heads == 1:
        return "MQA"
    return "MHA" if group.num_kv_heads >= heads else "GQA"


def _heads_row(kind: str, own: bool, heads: int, key: int, value: int, layers: int) -> AttentionRow:
    values = heads * (key + value)
    each = [heads * head_block_bytes(name, key, value, 1) for name in _FORMATS]
    width = f"2 x {key}" if key == value else f"({key} + {value})"
    return _row(kind, own, heads, values, each, layers, f"{heads} KV heads x {width} values = {values:,}")


def _latent_row(width: int, own: bool, layers: int) -> AttentionRow:
    each = [latent_block_bytes(name, width, 1) for name in _FORMATS]
    return _row("MLA", own, 0, width, each, layers, f"latent {width - ROPE} + rotary key {ROPE} values = {width:,}")


def _row(kind: str, own: bool, heads: int, values: int, each: list[int], layers: int, how: str) -> AttentionRow:
    bytes_16, bytes_8, bytes_4 = each
    return AttentionRow(
        kind=kind,
        own=own,
        kv_heads=heads,
        values_per_token_layer=values,
        bytes_16=bytes_16,
        bytes_8=bytes_8,
        bytes_4=bytes_4,
        all_16=layers * bytes_16,
        all_8=layers * bytes_8,
        all_4=layers * bytes_4,
        share_of_mha=1.0,
        how=f"{how}; x 2 B = {bytes_16:,} B a token and layer; x {layers} layers = {layers * bytes_16:,} B",
        meaning=_EFFECT[kind],
    )


def _against(mha: AttentionRow, row: AttentionRow) -> AttentionRow:
    return replace(row, share_of_mha=row.bytes_16 / mha.bytes_16)
