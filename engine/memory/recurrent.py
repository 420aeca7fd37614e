"""State that recurrent layers (Mamba, gated delta nets, short convolutions) keep of a sequence, whatever its length.

Bytes over all tensor-parallel ranks. The convolution keeps its last `kernel - 1` inputs in the model's dtype; the
state proper has a dtype of its own where the config names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.memory.hf_values import HfValues, family_of

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "float64": 8}


@dataclass(frozen=True)
class Recurrence:
    """Sizes in elements: channels of the convolution, its kernel, and the state."""

    kind: str  # "mamba1", "mamba2", "delta", "kda", "conv", "rglru"
    conv_channels: int
    kernel: int
    state: int
    inner: int = 0  # width of the layer's inner vector
    heads: int = 0
    groups: int = 0
    state_size: int = 0


def dtype_of(values: HfValues) -> str:
    """The dtype of activations and unquantized weights."""
    for part in (values.text, values.config):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return "bfloat16"


def recurrent_state_bytes(values: HfValues) -> int:
    """Bytes of one recurrent layer for one sequence, all ranks together."""
    sizes = recurrence_of(values)
    width = DTYPE_BYTES.get(dtype_of(values), 2)
    ssm = str(values.raw("mamba_ssm_dtype") or values.raw("mamba_ssm_cache_dtype") or "")
    wide = sizes.kind in ("kda", "rglru") or family_of(values.model_type) == "nemotron_h"
    state_width = DTYPE_BYTES.get(ssm, 4 if wide else width)
    return sizes.conv_channels * (sizes.kernel - 1) * width + sizes.state * state_width


def state_row_bytes(values: HfValues) -> int:
    """Bytes of one more input of the convolution, which a speculated token needs; Mamba 1 has no speculation."""
    sizes = recurrence_of(values)
    return 0 if sizes.kind == "mamba1" else sizes.conv_channels * DTYPE_BYTES.get(dtype_of(values), 2)


def recurrence_of(values: HfValues) -> Recurrence:
    """The sizes of the model's recurrent layers; raises `ConfigError` where the config does not tell them."""
    linear = values.raw("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi delta attention: q, k and v of every head, one matrix a head
        heads, width = values.entry(linear, "num_heads"), values.entry(linear, "head_dim")
        inner = heads * width
        return Recurrence(
            "kda", 3 * inner, values.entry(linear, "short_conv_kernel_size", 4), heads * width * width, inner, heads
        )
    if values.optional("linear_num_value_heads"):
        keys = values.whole("linear_num_key_heads") * values.whole("linear_key_head_dim")
        v_heads, v_width = values.whole("linear_num_value_heads"), values.whole("linear_value_head_dim")
        state = v_heads * v_width * values.whole("linear_key_head_dim")
        kernel = values.whole("linear_conv_kernel_dim")
        return Recurrence("delta", 2 * keys + v_heads * v_width, kernel, state, v_heads * v_width, v_heads)
    if values.optional("conv_L_cache"):
        hidden = values.whole("hidden_size")
        return Recurrence("conv", hidden, values.whole("conv_L_cache"), 0, hidden)
    if family_of(values.model_type) == "recurrent_gemma":
        width = values.optional("lru_width") or values.whole("hidden_size")
        return Recurrence("rglru", width, values.optional("conv1d_width", 4) or 4, width, width)
    if values.model_type in ("minimax", "minimax_m1", "minimax_text_01"):
        heads = values.whole("num_attention_heads")
        width = values.optional("head_dim") or values.whole("hidden_size") // heads
        return Recurrence("lightning", 0, 1, heads * width * width, heads * width, heads)
    return _mamba(values)


def _mamba(values: HfValues) -> Recurrence:
    state = values.optional("mamba_d_state") or values.optional("ssm_state_size") or values.optional("state_size")
    if not state:
        raise ConfigError(
            f"config.json of {values.architecture}: recurrent layers without known sizes (looked for mamba_d_state, "
            "ssm_state_size, linear_num_value_heads); describe the model by --layers, --kv-heads and --head-dim"
        )
    kernel = values.optional("mamba_d_conv") or values.optional("conv_kernel") or 4
    expand = values.optional("mamba_expand") or values.optional("expand") or 2
    heads = values.optional("mamba_n_heads") or values.optional("mamba_num_heads") or values.optional("n_mamba_heads")
    if values.model_type == "mamba2":
        heads = values.whole("num_heads")
    if not heads or values.model_type in ("mamba", "falcon_mamba", "jamba"):
        inner = values.optional("mamba_d_ssm") or expand * values.whole("hidden_size")
        return Recurrence("mamba1", inner, kernel, inner * state, inner, state_size=state)
    width = values.raw("mamba_d_head") or values.raw("mamba_head_dim")
    if values.model_type == "mamba2":
        width = values.whole("head_dim")
    stated = values.optional("mamba_d_ssm") or expand * values.whole("hidden_size")
    inner = heads * width if isinstance(width, int) else stated
    groups = values.optional("mamba_n_groups") or values.optional("n_groups") or values.optional("mamba_ngroups") or 1
    return Recurrence("mamba2", inner + 2 * groups * state, kernel, inner * state, inner, heads, groups, state)
