"""Parameters of a decoder, counted from the sizes in its config, in the classes that quantization treats alike.

Checked against the models that `transformers` builds: within 1% for the presets (tests/engine_memory_inputs). Heads
of multi-token prediction are not counted: engines load them only as a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.memory.hf_layers import head_dim, kv_heads
from engine.memory.hf_values import HfValues, family_of
from engine.memory.recurrent import recurrence_of

_PLAIN_MLP = (
    "gpt2 gpt_bigcode gpt_neox gptj opt bloom mpt phi falcon starcoder2 nemotron nemotron_h arcee persimmon apertus"
).split()
_FUSED_BIASES = ("gpt2", "gpt_bigcode", "opt", "bloom", "phi", "persimmon")  # every projection has a bias
_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen")
_TWO_NORMS_MORE = ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")
_TIED = ("gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "cohere", "cohere2")


@dataclass(frozen=True)
class Parameters:
    """Counts. `replicated` of them are held whole by every tensor-parallel rank, `kv_projection` by ranks that share
    a KV head; both are within the other classes. `other`: norms, routers, convolutions."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    dense: int = 0
    experts: int = 0
    shared_experts: int = 0
    other: int = 0
    vision: int = 0
    active_experts: int = 0
    replicated: int = 0
    kv_projection: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.embedding
            + self.head
            + self.attention
            + self.dense
            + self.experts
            + self.shared_experts
            + self.other
            + self.vision
        )

    @property
    def active(self) -> int:
        """Those a token passes through: of the experts only the chosen ones."""
        return self.total - self.experts + self.active_experts


def count_parameters(values: HfValues, kinds: list[str]) -> Parameters | None:
    """None where the config does not tell sizes that only weights need (vocabulary, hidden and MLP sizes)."""
    hidden, vocab = values.optional("hidden_size"), values.optional("vocab_size")
    if hidden is None or vocab is None:
        return None
    family = family_of(values.model_type)
    attention = dense = experts = active = shared = other = replicated = kv_projection = 0
    for index, kind in enumerate(kinds):
        mixed, whole, kv = _mixer(values, kind, hidden, family, index)
        attention += mixed
        replicated += whole
        kv_projection += kv
        mlp = _mlp(values, index, kind, hidden, family)
        if mlp is None:
            return None
        dense, experts, active, shared = (
            dense + mlp.dense,
            experts + mlp.experts,
            active + mlp.active,
            shared + mlp.shared,
        )
        norms = _norms(values, hidden, family, kind)
        other, replicated = other + mlp.router + norms, replicated + mlp.router + norms
    embedding, head, more = _embeddings(values, hidden, vocab, family, len(kinds))
    other += more + hidden
    return Parameters(
        embedding=embedding,
        head=head,
        attention=attention,
        dense=dense,
        experts=experts,
        shared_experts=shared,
        other=other,
        vision=_vision(values, hidden),
        active_experts=active,
        replicated=replicated + hidden,
        kv_projection=kv_projection,
    )


def tied(values: HfValues) -> bool:
    """Whether the output head is the embedding."""
    for part in (values.text, values.config):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    if family_of(values.model_type) in _TIED:
        return True
    stated = values.defaults.get("tie_word_embeddings")
    if stated is None:
        values.assume("tie_word_embeddings is missing; the output head is counted as weights of its own")
        return False
    return bool(stated)


def _embeddings(values: HfValues, hidden: int, vocab: int, family: str, layers: int) -> tuple[int, int, int]:
    width = values.optional("word_embed_proj_dim") or hidden
    embedding = vocab * width
    more = 2 * hidden * width if width != hidden else 0
    if family in _LEARNED_POSITIONS:
        embedding += ((values.optional("max_position_embeddings") or 0) + (2 if family == "opt" else 0)) * hidden
    per_layer = values.optional("hidden_size_per_layer_input")
    if per_layer:  # Gemma 3n and 4: a small embedding of its own for every layer
        embedding += (values.optional("vocab_size_per_layer_input") or vocab) * layers * per_layer
        more += hidden * layers * per_layer + layers * (2 * hidden * per_layer + hidden)
    return embedding, 0 if tied(values) else vocab * hidden, more


def _norms(values: HfValues, hidden: int, family: str, kind: str) -> int:
    each = (
        2 * hidden if family in _FUSED_BIASES or family in ("gpt_neox", "falcon", "starcoder2", "stablelm") else hidden
    )
    if family == "nemotron_h":
        return hidden
    if family in ("phi", "gptj", "cohere", "cohere2"):
        return each
    if family == "olmo":
        return 0
    return each * (4 if family in _TWO_NORMS_MORE else 2)


def _mixer(values: HfValues, kind: str, hidden: int, family: str, index: int) -> tuple[int, int, int]:
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
    return values.whole("num_hidden_layers") - (values.optional("num_kv_shared_layers", 0) or 0)


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
    if family in _FUSED_BIASES or (family == "gpt_neox" and values.switch("attention_bias", True)):
        total += qkv + hidden
    elif family == "gpt_oss" or (family not in _QKV_BIAS and values.switch("attention_bias")):
        total += qkv + (hidden if family not in ("glm", "glm4", "seed_oss", "glm4_moe") else 0)
    elif family in _QKV_BIAS or values.switch("use_qkv_bias") or values.switch("add_qkv_bias"):
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


@dataclass(frozen=True)
class _Mlp:
    dense: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    router: int = 0


def _mlp(values: HfValues, index: int, kind: str, hidden: int, family: str) -> _Mlp | None:
    """The feed-forward part of a layer; None where its size is not in the config."""
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return _Mlp()
    if family == "nemotron_h":
        return _nemotron_h_mlp(values, index, hidden)
    matrices = 2 if family in _PLAIN_MLP else 3
    experts = values.optional("num_experts", 0) or 0
    if experts > 1 and _is_sparse(values, index, family):
        size = values.optional("moe_intermediate_size") or values.optional("intermediate_size")
        if size is None:
            return None
        chosen = values.optional("num_experts_per_tok", 1) or 1
        one = matrices * hidden * size + (2 * size + hidden if family == "gpt_oss" else 0)
        router = hidden * experts + (experts if family == "gpt_oss" or experts >= 128 else 0)
        dense = _dense_size(values, index, family)
        beside = matrices * hidden * dense if dense and family == "gemma4_text" else 0
        return _Mlp(
            beside, experts * one, chosen * one, _shared_experts(values, hidden, size, matrices, family), router
        )
    size = _dense_size(values, index, family)
    if size is None:
        return None
    twice = 2 if family == "longcat_flash" else 1
    return _Mlp(dense=twice * (matrices * hidden * size + _mlp_biases(values, hidden, size, matrices, family)))


def _mlp_biases(values: HfValues, hidden: int, size: int, matrices: int, family: str) -> int:
    if family in _FUSED_BIASES or family in ("gpt_neox", "gptj") or values.switch("mlp_bias"):
        return (matrices - 1) * size + hidden
    if family == "starcoder2" and values.switch("use_bias", True):
        return size + hidden
    return 0


def _dense_size(values: HfValues, index: int, family: str) -> int | None:
    if family == "llama4_text" and values.optional("intermediate_size_mlp"):
        return values.whole("intermediate_size_mlp")
    sizes = values.raw("intermediate_size")
    if isinstance(sizes, list) and len(sizes) > index:
        return int(sizes[index])
    blocks = values.raw("block_configs")
    if isinstance(blocks, list) and len(blocks) > index and isinstance(blocks[index], Mapping):
        ffn = blocks[index].get("ffn") or {}
        if ffn.get("no_op"):
            return 0
        multiple = ffn.get("ffn_mult")
        if multiple:
            wide = int(2 * multiple * values.whole("hidden_size") / 3)
            return -(-wide // 256) * 256
        if ffn.get("intermediate_size"):
            return int(ffn["intermediate_size"])
    if family == "lfm2" and values.switch("block_auto_adjust_ff_dim", True):
        wide = int(2 * values.whole("intermediate_size") / 3)
        multiple_of = values.optional("block_multiple_of") or 256
        return -(-wide // multiple_of) * multiple_of
    size = values.optional("intermediate_size")
    if size is None and family in ("gpt2", "gpt_bigcode", "gptj", "bloom", "falcon", "mpt"):
        return 4 * values.whole("hidden_size")
    if family == "gemma4_text" and values.switch("use_double_wide_mlp") and index >= len_without_shared(values):
        return 2 * (size or 0)
    return size


def _shared_experts(values: HfValues, hidden: int, size: int, matrices: int, family: str) -> int:
    own = values.optional("shared_expert_intermediate_size")
    if own:
        return matrices * hidden * own + hidden
    if family == "llama4_text":
        return matrices * hidden * size
    return matrices * hidden * size * (values.optional("n_shared_experts", 0) or 0)


def _is_sparse(values: HfValues, index: int, family: str) -> bool:
    kinds = values.raw("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) > index:
        return "dense" not in str(kinds[index])
    if isinstance(values.raw("moe_layers"), list):
        return index in values.raw("moe_layers")
    if isinstance(values.raw("mlp_only_layers"), list) and index in values.raw("mlp_only_layers"):
        return False
    if family == "gemma4_text":
        return values.switch("enable_moe_block")
    if family == "jamba":
        period, offset = values.whole("expert_layer_period"), values.optional("expert_layer_offset", 0) or 0
        return index % period == offset
    if family == "llama4_text":
        return (index + 1) % (values.optional("interleave_moe_layer_step", 1) or 1) == 0
    frequency = values.raw("moe_layer_freq")
    if isinstance(frequency, list) and len(frequency) > index:
        return bool(frequency[index])
    first = values.optional("first_k_dense_replace", 0) or values.optional("num_dense_layers", 0) or 0
    if index < first:
        return False
    step = values.optional("decoder_sparse_step") or values.optional("moe_layer_interval") or 1
    if isinstance(frequency, int) and frequency > 1:
        return index % frequency == 0
    return (index + 1) % step == 0


def _nemotron_h_mlp(values: HfValues, index: int, hidden: int) -> _Mlp | None:
    pattern = values.raw("hybrid_override_pattern")
    types = values.raw("layer_types") or (list(pattern) if isinstance(pattern, str) else [])
    kind = str(types[index]).lower() if len(types) > index else ""
    if kind in ("mlp", "-"):
        size = _dense_size(values, index, "nemotron_h")
        return None if size is None else _Mlp(dense=2 * hidden * size)
    if kind in ("moe", "e"):
        size, count = values.whole("moe_intermediate_size"), values.whole("num_experts")
        latent = values.optional("moe_latent_size") or hidden
        one = 2 * latent * size
        shared = 2 * hidden * (values.optional("moe_shared_expert_intermediate_size") or size)
        shared *= values.optional("n_shared_experts", 0) or 0
        around = 2 * hidden * latent if latent != hidden else 0
        chosen = values.optional("num_experts_per_tok", 1) or 1
        return _Mlp(around, count * one, chosen * one, shared, hidden * count + count)
    return _Mlp()


def _vision(values: HfValues, hidden: int) -> int:
    """An estimate of the vision tower and its projector; 0 for text models."""
    vision = values.config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return 0

    def first(*names: str) -> int:
        return next((int(vision[name]) for name in names if isinstance(vision.get(name), int)), 0)

    width = first("hidden_size", "embed_dim", "width", "vt_hidden_size")
    layers = first("num_hidden_layers", "depth", "layers", "vt_num_hidden_layers")
    if not width or not layers:
        values.assume("the vision tower's size is not in the config; its weights are not counted")
        return 0
    inner = first("intermediate_size", "vt_intermediate_size") or int(width * float(vision.get("mlp_ratio") or 4))
    gated = 3 if "silu" in str(vision.get("hidden_act", "")) else 2
    patch = first("patch_size") or 14
    tower = layers * (4 * width * width + gated * width * inner) + 3 * patch * patch * width
    merge = first("spatial_merge_size") or 1
    projector = (
        (merge * merge * width) ** 2 + merge * merge * width * hidden if merge > 1 else width * hidden + hidden**2
    )
    values.assume(
        f"a vision tower of about {(tower + projector) / 1e6:,.0f} million parameters is counted with the weights"
    )
    return tower + projector
