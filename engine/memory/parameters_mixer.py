"""Parameters of a layer's attention (heads, latent, compressed) or recurrence."""

from __future__ import annotations

from engine.memory import families
from engine.memory.hf_layers import head_dim, kv_heads
from engine.memory.hf_values import HfValues
from engine.memory.recurrent import recurrence_of


def mixer_parameters(values: HfValues, kind: str, hidden: int, family: str, index: int) -> tuple[int, int, int]:
    """(parameters of the layer's attention or recurrence, those every rank holds, those of K and V)."""
    if kind == "none" and index >= len_without_shared(values):
        return _reading_only(values, hidden, family, index), 0, 0
    if kind == "none":
        return 0, 0, 0
    if kind == "recurrent":
        return _recurrent(values, hidden), 0, 0
    if kind in ("csa", "hca") or family == "deepseek_v4":
        return _compressed(values, hidden, kind)
    if values.optional("kv_lora_rank") and kind == "full":
        return _latent(values, hidden, 2 if family == "longcat_flash" else 1)
    total, kv = _heads(values, kind, hidden, family)
    return total + (_recurrent(values, hidden) if kind == "hybrid" else 0), 0, kv


def len_without_shared(values: HfValues) -> int:
    """Layers before those that read the KV of others."""
    return values.num_layers - (values.optional("num_kv_shared_layers", 0) or 0)


def _reading_only(values: HfValues, hidden: int, family: str, index: int) -> int:
    """A layer that reads another's KV: `transformers` and checkpoints still have its K and V projections in Gemma 3n,
    not in Gemma 4; they are a thousandth of the whole."""
    types = values.raw("layer_types")
    kind = "full" if isinstance(types, list) and "full" in str(types[index]) else "sliding"
    return _heads(values, kind, hidden, family)[0]


def _heads(values: HfValues, kind: str, hidden: int, family: str) -> tuple[int, int]:
    q_heads = values.optional("num_attention_heads") or 0
    width, heads = head_dim(values, kind), kv_heads(values, kind)
    v_width = values.optional("v_head_dim") or width
    gate = 2 if values.switch("attn_output_gate", family == "qwen3_next" or family.startswith("qwen3_5")) else 1
    values_too = not (kind == "full" and values.switch("attention_k_eq_v"))
    kv = hidden * heads * (width + (v_width if values_too else 0))
    total = hidden * q_heads * width * gate + kv + q_heads * v_width * hidden
    qkv = (q_heads + heads) * width + heads * v_width
    if family in families.BIAS_EVERYWHERE or (family == "gpt_neox" and values.switch("attention_bias", True)):
        total += qkv + hidden
    elif family == "gpt_oss" or (family not in families.QKV_BIAS and values.switch("attention_bias")):
        total += qkv + (0 if family in families.QKV_BIAS_ONLY else hidden)
    elif family in families.QKV_BIAS or values.switch("use_qkv_bias") or values.switch("add_qkv_bias"):
        total += qkv
    elif family == "starcoder2" and values.switch("use_bias", True):
        total += qkv + hidden
    return total, kv


def _latent(values: HfValues, hidden: int, blocks: int) -> tuple[int, int, int]:
    heads, rank = values.whole("num_attention_heads"), values.whole("kv_lora_rank")
    rope, nope = values.optional("qk_rope_head_dim", 0) or 0, values.optional("qk_nope_head_dim", 0) or 0
    v_width = values.optional("v_head_dim") or nope
    q_rank = values.optional("q_lora_rank") if values.text.get("q_lora_rank", 1) is not None else None
    down = hidden * (rank + rope) + rank
    if q_rank:
        down += hidden * q_rank + q_rank
        up = q_rank * heads * (nope + rope)
    else:
        up = hidden * heads * (nope + rope)
    up += rank * heads * (nope + v_width) + heads * v_width * hidden
    index_heads, index_width = values.optional("index_n_heads", 0) or 0, values.optional("index_head_dim", 0) or 0
    if index_heads and index_width:
        down += (q_rank or hidden) * index_heads * index_width + hidden * (index_width + index_heads)
    return (down + up) * blocks, down * blocks, 0


def _compressed(values: HfValues, hidden: int, kind: str) -> tuple[int, int, int]:
    """DeepSeek-V4: low-rank queries, one shared key-value vector, a grouped low-rank output, and compressors."""
    heads, width, q_rank = values.whole("num_attention_heads"), values.whole("head_dim"), values.whole("q_lora_rank")
    o_rank, groups = values.whole("o_lora_rank"), values.whole("o_groups")
    whole = hidden * (q_rank + width)
    total = whole + q_rank * heads * width + heads * width * o_rank + o_rank * groups * hidden
    if kind in ("csa", "hca"):
        compressor = hidden * width * 2 * (2 if kind == "csa" else 1)
        whole, total = whole + compressor, total + compressor
    if kind == "csa":
        index_width, index_heads = values.whole("index_head_dim"), values.whole("index_n_heads")
        indexer = q_rank * index_heads * index_width + hidden * (index_heads + 4 * index_width)
        whole, total = whole + indexer, total + indexer
    return total, whole, 0


def _recurrent(values: HfValues, hidden: int) -> int:
    sizes = recurrence_of(values)
    inner, kernel = sizes.inner, sizes.kernel
    if sizes.kind == "delta":
        return (
            hidden * (sizes.conv_channels + inner)
            + hidden * 2 * sizes.heads
            + sizes.conv_channels * kernel
            + inner * hidden
        )
    if sizes.kind == "kda":
        width = inner // sizes.heads
        gates = 2 * (hidden * width + width * inner) + hidden * sizes.heads
        return 3 * hidden * inner + 3 * inner * kernel + gates + inner * hidden
    if sizes.kind == "conv":
        return 3 * hidden * inner + inner * kernel + inner * hidden
    if sizes.kind == "rglru":
        heads = values.optional("num_attention_heads") or 1
        return 3 * hidden * inner + inner * (kernel + 1) + 2 * (inner * inner // heads + inner) + inner
    if sizes.kind == "lightning":
        return hidden * 3 * inner + hidden * inner + inner * hidden
    if sizes.kind == "mamba2":
        projected = 2 * inner + 2 * sizes.groups * sizes.state_size + sizes.heads
        return hidden * projected + sizes.conv_channels * (kernel + 1) + inner * hidden + inner + 3 * sizes.heads
    rank = values.raw("mamba_dt_rank") or values.raw("time_step_rank")
    dt = rank if isinstance(rank, int) else -(-hidden // 16)
    return (
        2 * hidden * inner
        + inner * (kernel + 1)
        + inner * (dt + 2 * sizes.state_size)
        + (dt + 1) * inner
        + (inner * sizes.state_size + inner + inner * hidden)
    )
