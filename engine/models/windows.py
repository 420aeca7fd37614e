"""Which layers of an architecture see only a sliding window, as its `config.json` says. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from engine.errors import ModelLoadError
from engine.models.config_values import non_negative_int, positive_int

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types


class Windows(Enum):
    """Which layers see only a sliding window."""

    NONE = "none"
    EVERY = "every"
    LAST = "last"  # those from max_window_layers on, if use_sliding_window
    LOCAL = "local"  # all but every sliding_window_pattern-th


WINDOWS = {
    "MistralForCausalLM": Windows.EVERY,
    "Qwen2ForCausalLM": Windows.LAST,
    "Qwen3ForCausalLM": Windows.LAST,
    "Gemma3ForCausalLM": Windows.LOCAL,
}


def layer_windows(architecture: str, num_layers: int, config: Mapping[str, Any]) -> list[int | None]:
    """The sliding window of every layer, None where it sees everything. Defaults are those of `transformers`.

    Raises `ModelLoadError` naming the key that is wrong.
    """
    windows = WINDOWS.get(architecture, Windows.NONE)
    switched_off = windows is Windows.LAST and not config.get("use_sliding_window")
    if windows is Windows.NONE or switched_off or config.get("sliding_window", 4096) is None:
        return [None] * num_layers
    window = positive_int(config, "sliding_window", 4096)
    if windows is Windows.EVERY:
        return [window] * num_layers
    types = config.get("layer_types") or _default_layer_types(windows, num_layers, config)
    known = isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)
    if not known or len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types must name {FULL} or {SLIDING} for each of {num_layers} layers")
    return [window if kind == SLIDING else None for kind in types]


def _default_layer_types(windows: Windows, num_layers: int, config: Mapping[str, Any]) -> list[str]:
    if windows is Windows.LOCAL:
        period = positive_int(config, "sliding_window_pattern", positive_int(config, "_sliding_window_pattern", 6))
        return [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
    first = non_negative_int(config, "max_window_layers", 28)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]
