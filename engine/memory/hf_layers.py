"""What every layer of a Hugging Face model keeps of a token: full, sliding, chunked, latent, recurrent or nothing.

A layer's kind is one word; `layer_groups` puts equal layers together. What a config leaves open is decided as the
model's class in `transformers` and vLLM decide it, and noted as an assumption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.memory.hf_values import HfValues, family_of
from engine.memory.recurrent import recurrent_state_bytes, state_row_bytes
from engine.memory.shape import LayerGroup

KINDS = {
    "full": ("full_attention", "attention", "global_attention", "global", "full", "indexed_attention", "*"),
    "sliding": ("sliding_attention", "sliding_window", "local_attention", "local", "sliding"),
    "chunked": ("chunked_attention",),
    "recurrent": ("linear_attention", "mamba", "mamba2", "recurrent", "linear", "conv", "short_conv", "m"),
    "hybrid": ("hybrid",),
    "none": ("moe", "mlp", "-", "e", "no_op"),
    "csa": ("compressed_sparse_attention",),
    "hca": ("heavily_compressed_attention",),
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
_PATTERN_OF = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
}
_LATENT_AS_HEADS = ("minicpm3",)  # engines expand its latent and cache K and V of every head
_ALL_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_INDEXER_SCALE_GROUP, _INDEXER_SCALE_BYTES = 128, 4  # fp8 keys of the indexer: one float32 scale for 128 values


def layer_kinds(values: HfValues) -> list[str]:
    """The kind of every layer, in order: a key of `KINDS`."""
    count = values.num_layers
    kinds = _stated(values, count) or _by_architecture(values, count)
    crossed = values.raw("cross_attention_layers")
    if isinstance(crossed, list):
        values.assume(f"{len(crossed)} layers attend to images only; what they cache of images is not counted")
        kinds = ["none" if i in crossed else kind for i, kind in enumerate(kinds)]
    if values.switch("use_cla"):  # Hunyuan: of each few layers the first keeps KV for all
        every = values.optional("cla_share_factor", 2) or 2
        values.assume(f"one layer in {every} keeps KV, the others read it (cla_share_factor)")
        kinds = ["none" if i % every else kind for i, kind in enumerate(kinds)]
    shared = values.optional("num_kv_shared_layers", 0) or 0
    if shared:
        values.assume(f"the last {shared} layers read the KV of earlier ones and keep none (num_kv_shared_layers)")
        kinds[count - shared :] = ["none"] * shared
    return kinds


def _stated(values: HfValues, count: int) -> list[str] | None:
    """Kinds that the config names layer by layer."""
    types = values.raw("layer_types")
    if family_of(values.model_type) == "recurrent_gemma" and isinstance(types, list):
        types = [types[i % len(types)] for i in range(count)]
    pattern = values.raw("hybrid_override_pattern")
    if isinstance(pattern, str) and types is None:
        types = list(pattern)
    if types is None and isinstance(values.raw("attn_type_list"), list):
        types = ["full_attention" if kind else "linear_attention" for kind in values.raw("attn_type_list")]
    if types is None and isinstance(values.raw("hybrid_layer_pattern"), list):  # MiMo: 1 is a sliding layer
        types = ["sliding_attention" if kind else "full_attention" for kind in values.raw("hybrid_layer_pattern")]
    if types is None:
        return None
    if not isinstance(types, list) or len(types) < count:
        raise ConfigError(f"config.json: layer_types must name a kind for each of {count} layers, found {types!r:.80}")
    kinds = [_KIND_OF.get(str(kind).lower()) for kind in types[:count]]
    if family_of(values.model_type) == "recurrent_gemma":
        kinds = ["sliding" if kind == "full" else kind for kind in kinds]
    if None in kinds:
        wrong = types[kinds.index(None)]
        known = ", ".join(name for names in KINDS.values() for name in names[:1])
        raise ConfigError(f"config.json: layer_types names {wrong!r}, which is not known here; known are {known}")
    return [kind for kind in kinds if kind]


def _by_architecture(values: HfValues, count: int) -> list[str]:
    """Kinds that a few numbers of the config give, by the rule of the architecture."""
    family = family_of(values.model_type)
    if family in _ALL_RECURRENT:
        return ["recurrent"] * count
    linear = values.raw("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = linear["full_attn_layers"]  # counted from 1
        return ["full" if i + 1 in full else "recurrent" for i in range(count)]
    if family == "kimi_linear" or values.raw("full_attention_interval") or family in ("qwen3_next",):
        return _every(values.optional("full_attention_interval", 4) or 4, count, "recurrent")
    if family.startswith("qwen3_5"):
        return _every(4, count, "recurrent")
    if family == "jamba":
        period, offset = values.whole("attn_layer_period"), values.optional("attn_layer_offset", 0) or 0
        return ["full" if i % period == offset % period else "recurrent" for i in range(count)]
    indices = values.raw("attn_layer_indices") or values.raw("full_attn_idxs")
    if isinstance(indices, list) or family == "bamba":
        return ["full" if i in (indices or ()) else "recurrent" for i in range(count)]
    if family == "falcon_h1":
        return ["hybrid"] * count
    if family == "llama4_text":
        return _llama4(values, count)
    if family == "deepseek_v4":
        return _deepseek_v4(values, count)
    return _windows(values, family, count)


def _windows(values: HfValues, family: str, count: int) -> list[str]:
    window = values.optional("sliding_window")
    if window is None or values.raw("use_sliding_window") is False:
        return ["full"] * count
    pattern = values.raw("sliding_window_pattern") or values.raw("_sliding_window_pattern") or _PATTERN_OF.get(family)
    if isinstance(pattern, str):
        return ["full" if pattern[i % len(pattern)].upper() == "G" else "sliding" for i in range(count)]
    if isinstance(pattern, int):
        kinds = _every(pattern, count, "sliding")
        return [*kinds[:-1], "full"] if family == "gemma4_text" else kinds
    first = values.raw("max_window_layers")
    if isinstance(first, int):
        return ["sliding" if i >= first else "full" for i in range(count)]
    if not values.known:
        values.assume(f"every layer keeps a sliding window of {window} tokens (sliding_window, no other layout given)")
    return ["sliding"] * count


def _every(period: int, count: int, other: str) -> list[str]:
    return [other if (i + 1) % period else "full" for i in range(count)]


def _llama4(values: HfValues, count: int) -> list[str]:
    if values.optional("attention_chunk_size") is None:
        return ["full"] * count
    rope = values.raw("no_rope_layers")
    if isinstance(rope, list) and len(rope) >= count:
        return ["chunked" if rope[i] else "full" for i in range(count)]
    return _every(values.optional("no_rope_layer_interval", 4) or 4, count, "chunked")


def _deepseek_v4(values: HfValues, count: int) -> list[str]:
    ratios = values.raw("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < count:
        values.assume("compress_ratios are missing; layers alternate as in DeepSeek-V4-Pro")
        return ["hca", "hca", *("csa" if i % 2 else "hca" for i in range(count - 2))][:count]
    return [{0: "sliding", 4: "csa"}.get(ratio, "hca") for ratio in ratios[:count]]


def layer_groups(values: HfValues, kinds: list[str]) -> tuple[LayerGroup, ...]:
    """Equal layers together, in the order in which they first appear."""
    blocks = values.raw("block_configs")
    if isinstance(blocks, list) and blocks:  # Nemotron-NAS: KV heads differ by layer, some layers have no attention
        return _variable_groups(values, blocks)
    counts = Counter(kinds)
    twice = 2 if family_of(values.model_type) == "longcat_flash" else 1
    if twice == 2:
        values.assume("each layer of LongCat-Flash has two attention blocks, both with a cache")
    if "hybrid" in counts:
        values.assume("layers with attention and a recurrent state are counted as one layer of each")
    return tuple(
        _group(values, part, count * twice)
        for kind, count in counts.items()
        for part in (("full", "recurrent") if kind == "hybrid" else (kind,))
    )


def _variable_groups(values: HfValues, blocks: list[Any]) -> tuple[LayerGroup, ...]:
    q_heads, width = values.whole("num_attention_heads"), head_dim(values, "full")
    counts: Counter[int] = Counter()
    for block in blocks:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        attention = attention if isinstance(attention, Mapping) else {"no_op": True}
        group = values.entry(attention, "n_heads_in_group", q_heads)
        heads = values.entry(attention, "num_key_value_heads", max(1, q_heads // group))
        counts[0 if attention.get("no_op") or attention.get("replace_with_linear") else heads] += 1
    return tuple(
        LayerGroup(count, "full", heads, width) if heads else LayerGroup(count, "none")
        for heads, count in counts.items()
    )


def _group(values: HfValues, kind: str, count: int) -> LayerGroup:
    if kind == "none":
        return LayerGroup(count, "none")
    if kind == "recurrent":
        row = state_row_bytes(values)
        return LayerGroup(count, "recurrent", state_bytes=recurrent_state_bytes(values), state_row_bytes=row)
    if kind in ("csa", "hca") or family_of(values.model_type) == "deepseek_v4":
        return _compressed_group(values, kind, count)
    latent = values.optional("kv_lora_rank")
    if latent and kind == "full" and values.model_type not in _LATENT_AS_HEADS:
        width = latent + (values.optional("qk_rope_head_dim", 0) or 0)
        v_width = values.optional("v_head_dim")
        return LayerGroup(count, "latent", v_head_dim=v_width, latent_width=width, index_width=_indexer_bytes(values))
    window = None
    if kind == "sliding":
        window = values.whole("sliding_window")
    elif kind == "chunked":
        window = values.whole("attention_chunk_size")
    width = head_dim(values, kind)
    v_width = values.optional("swa_v_head_dim" if kind == "sliding" else "v_head_dim") or values.optional("v_head_dim")
    return LayerGroup(
        count,
        kind,  # type: ignore[arg-type]  # full, sliding or chunked
        num_kv_heads=kv_heads(values, kind),
        head_dim=width,
        v_head_dim=v_width if v_width != width else None,
        window=window,
    )


def _compressed_group(values: HfValues, kind: str, count: int) -> LayerGroup:
    """DeepSeek-V4: K and V are one vector; a layer keeps the last `sliding_window` tokens and one vector per m."""
    width, window = values.whole("head_dim"), values.whole("sliding_window")
    if kind == "sliding":
        return LayerGroup(count, "sliding", num_kv_heads=1, head_dim=width, v_head_dim=0, window=window)
    ratio = {"csa": 4, "hca": 128}[kind]
    values.assume(
        f"{count} layers keep one vector of {width} values for {ratio} tokens beside a window of {window}; "
        "engines pad such caches to pages, so the pool they print is smaller"
    )
    return LayerGroup(
        count,
        "latent",
        latent_width=-(-width // ratio),
        state_bytes=window * width * 2,
        index_width=-(-_indexer_bytes(values) // ratio) if kind == "csa" else 0,
    )


def _indexer_bytes(values: HfValues) -> int:
    """Bytes a token of the indexer's keys: fp8 values and their scales."""
    width = values.optional("index_head_dim", 0) or 0
    return width + width // _INDEXER_SCALE_GROUP * _INDEXER_SCALE_BYTES


def kv_heads(values: HfValues, kind: str = "full") -> int:
    """KV heads of a layer of that kind: grouped, one for multi-query, else as many as query heads."""
    if kind == "full" and values.optional("num_global_key_value_heads") and values.switch("attention_k_eq_v", True):
        return values.whole("num_global_key_value_heads")
    if kind == "sliding" and values.optional("swa_num_key_value_heads"):
        return values.whole("swa_num_key_value_heads")
    family = family_of(values.model_type)
    if family == "falcon":
        if values.switch("new_decoder_architecture"):
            return values.optional("num_key_value_heads") or values.whole("num_attention_heads")
        return 1 if values.switch("multi_query", True) else values.whole("num_attention_heads")
    if family == "gpt_bigcode":
        return 1 if values.switch("multi_query", True) else values.whole("num_attention_heads")
    if values.switch("multi_query_attention"):  # ChatGLM
        return values.whole("multi_query_group_num")
    q_heads = values.optional("num_attention_heads")
    heads = values.optional("num_key_value_heads") or q_heads
    if heads is None:
        raise ConfigError(values._missing("num_key_value_heads"))
    if q_heads and q_heads % heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({q_heads}) is not a multiple of num_key_value_heads ({heads}); "
            "correct one of them or give --kv-heads"
        )
    return heads


def head_dim(values: HfValues, kind: str = "full") -> int:
    """Width of a key head: stated, of global layers, or hidden size over query heads."""
    if kind == "full" and family_of(values.model_type) == "gemma4_text":
        return values.optional("global_head_dim", 512) or 512
    if kind == "sliding" and values.optional("swa_head_dim"):
        return values.whole("swa_head_dim")
    stated = values.optional("head_dim")
    if stated:
        return stated
    if values.optional("qk_nope_head_dim"):
        return values.whole("qk_nope_head_dim") + (values.optional("qk_rope_head_dim", 0) or 0)
    hidden, heads = values.optional("hidden_size"), values.optional("num_attention_heads")
    if not hidden or not heads:
        raise ConfigError(values._missing("head_dim"))
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); give --head-dim"
        )
    return hidden // heads
