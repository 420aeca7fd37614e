"""Parameters of a layer's feed-forward part: dense, or experts with a router, shared experts beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.memory import families
from engine.memory.hf_values import HfValues
from engine.memory.parameters_mixer import len_without_shared

_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True)
class Mlp:
    """Parameters of one layer's feed-forward part; `active` of the experts are chosen for a token."""

    dense: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    router: int = 0


def mlp_parameters(values: HfValues, index: int, hidden: int, family: str) -> Mlp | None:
    """The feed-forward part of a layer; None where its size is not in the config."""
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return Mlp()
    if family == "nemotron_h":
        return _nemotron_h_mlp(values, index, hidden)
    matrices = 2 if family in families.PLAIN_MLP else 3
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
        return Mlp(beside, experts * one, chosen * one, _shared_experts(values, hidden, size, matrices, family), router)
    size = _dense_size(values, index, family)
    if size is None:
        return None
    twice = 2 if family == "longcat_flash" else 1
    return Mlp(dense=twice * (matrices * hidden * size + _mlp_biases(values, hidden, size, matrices, family)))


def _mlp_biases(values: HfValues, hidden: int, size: int, matrices: int, family: str) -> int:
    if family in families.BIAS_EVERYWHERE or family in ("gpt_neox", "gptj") or values.switch("mlp_bias"):
        return (matrices - 1) * size + hidden
    if family == "starcoder2" and values.switch("use_bias", True):
        return size + hidden
    return 0


def _dense_size(values: HfValues, index: int, family: str) -> int | None:
    if family == "llama4_text" and values.optional("intermediate_size_mlp"):
        return values.whole("intermediate_size_mlp")
    sizes = values.raw("intermediate_size")
    if isinstance(sizes, list) and len(sizes) > index:
        return values.entry({"intermediate_size": sizes[index]}, "intermediate_size")
    blocks = values.raw("block_configs")
    if isinstance(blocks, list) and len(blocks) > index and isinstance(blocks[index], Mapping):
        ffn = blocks[index].get("ffn")
        ffn = ffn if isinstance(ffn, Mapping) else {}
        if ffn.get("no_op"):
            return 0
        multiple = ffn.get("ffn_mult")
        if isinstance(multiple, (int, float)) and 0 < multiple < 1e6:
            wide = int(2 * multiple * values.whole("hidden_size") / 3)
            return -(-wide // 256) * 256
        if ffn.get("intermediate_size"):
            return values.entry(ffn, "intermediate_size")
    if family == "lfm2" and values.switch("block_auto_adjust_ff_dim", True):
        wide = int(2 * values.whole("intermediate_size") / 3)
        multiple_of = values.optional("block_multiple_of") or 256
        return -(-wide // multiple_of) * multiple_of
    size = values.optional("intermediate_size")
    if family == "recurrent_gemma" and size:
        return size // 2  # its config states gate and up together
    if family == "granitemoehybrid" and not values.optional("num_experts"):
        return values.optional("shared_intermediate_size") or size
    if size is None and family in families.FOUR_TIMES_HIDDEN:
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
    if values.optional("shared_intermediate_size"):
        return matrices * hidden * values.whole("shared_intermediate_size")
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
    first = max(values.optional(key, 0) or 0 for key in _DENSE_FIRST)
    if family == "ernie4_5_moe" and values.raw("moe_layer_start_index") is None:
        first = 1
    if index < first:
        return False
    step = values.optional("decoder_sparse_step") or values.optional("moe_layer_interval") or 1
    if isinstance(frequency, int) and frequency > 1:
        return index % frequency == 0
    return (index + 1) % step == 0


def _nemotron_h_mlp(values: HfValues, index: int, hidden: int) -> Mlp | None:
    pattern = values.raw("hybrid_override_pattern")
    types = values.raw("layer_types") or (list(pattern) if isinstance(pattern, str) else [])
    kind = str(types[index]).lower() if len(types) > index else ""
    if kind in ("mlp", "-"):
        size = _dense_size(values, index, "nemotron_h")
        return None if size is None else Mlp(dense=2 * hidden * size)
    if kind in ("moe", "e"):
        size, count = values.whole("moe_intermediate_size"), values.whole("num_experts")
        latent = values.optional("moe_latent_size") or hidden
        one = 2 * latent * size
        shared = 2 * hidden * (values.optional("moe_shared_expert_intermediate_size") or size)
        shared *= values.optional("n_shared_experts", 0) or 0
        around = 2 * hidden * latent if latent != hidden else 0
        chosen = values.optional("num_experts_per_tok", 1) or 1
        return Mlp(around, count * one, chosen * one, shared, hidden * count + count)
    return Mlp()
