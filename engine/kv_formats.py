"""Which format each layer's keys and values are kept in: one for all, some layers left out, or a map of layers.

`--kv-cache-dtype-skip-layers` (vLLM's) names layers that keep the model's own dtype, `--kv-cache-dtype-layers` (ours)
gives layers any format. What needs no model is checked when the flags are parsed, the rest once the model is known.
Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.errors import ConfigError
from engine.model_dims import ModelDims
from kernels.formats import KV_CACHE_DTYPES, KVFormat, resolve_kv_format

SLIDING_WINDOW = "sliding_window"  # names all layers that have one
MIXED = "mixed"  # how several formats are called where there is room for one name

_SKIP = "--kv-cache-dtype-skip-layers"
_MAP = "--kv-cache-dtype-layers"
_LAYERS = re.compile(r"\s*(\d+)(?:-(\d+))?\s*")


def split_layer_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words of `--kv-cache-dtype-skip-layers`, however they were divided by blanks and commas."""
    return tuple(part for word in words for part in re.split(r"[\s,]+", word) if part)


def parse_layer_map(text: str) -> dict[int, str]:
    """Layer -> format of `0-1:auto,2:int8_per_token_head`; raises `ConfigError` saying what cannot be read."""
    found: dict[int, str] = {}
    for entry in filter(str.strip, text.split(",")):
        layers, colon, kv_cache_dtype = entry.partition(":")
        match = _LAYERS.fullmatch(layers)
        if not match or not colon:
            raise ConfigError(f"{_MAP}: cannot read {entry!r}; write LAYER:FORMAT or FIRST-LAST:FORMAT between commas")
        kv_cache_dtype = kv_cache_dtype.strip()
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"{_MAP}: {kv_cache_dtype!r} is not a format; use one of: {', '.join(KV_CACHE_DTYPES)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{_MAP}: {entry.strip()!r} names no layer, as {first} is above {last}")
        for layer in range(first, last + 1):
            if layer in found:
                raise ConfigError(f"{_MAP} names layer {layer} twice; name it once")
            found[layer] = kv_cache_dtype
    return found


def layer_problems(skip_layers: Sequence[str], layer_map: str) -> list[str]:
    """What is wrong with the two flags whatever the model is, one sentence each."""
    unknown = [word for word in skip_layers if word != SLIDING_WINDOW and not re.fullmatch(r"\d+", word)]
    if unknown:
        return [f"{_SKIP} takes layer indices or {SLIDING_WINDOW}, got {unknown[0]!r}"]
    try:
        mapped = parse_layer_map(layer_map)
    except ConfigError as error:
        return [str(error)]
    return [_in_both(int(word)) for word in skip_layers if word != SLIDING_WINDOW and int(word) in mapped][:1]


def layer_kv_formats(
    dims: ModelDims, model_dtype: str, block_size: int, kv_cache_dtype: str, skip_layers: Sequence[str], layer_map: str
) -> tuple[KVFormat, ...]:
    """The format of every layer; `ConfigError` for a layer the model does not have or a format that cannot hold it."""
    mapped = parse_layer_map(layer_map)
    _check_layers(_MAP, mapped, dims)
    skipped = _skipped_layers(skip_layers, dims)
    both = sorted(skipped & mapped.keys())
    if both:
        raise ConfigError(_in_both(both[0]))
    names = dict.fromkeys(range(dims.num_layers), kv_cache_dtype) | dict.fromkeys(skipped, "auto") | mapped
    formats = {name: _suitable_format(name, dims, model_dtype, block_size) for name in set(names.values())}
    return tuple(formats[names[layer]] for layer in range(dims.num_layers))


def format_name(formats: Sequence[KVFormat]) -> str:
    """The name of the format of all layers, "mixed" when they have several."""
    names = {kv_format.name for kv_format in formats}
    return names.pop() if len(names) == 1 else MIXED


def _skipped_layers(skip_layers: Sequence[str], dims: ModelDims) -> set[int]:
    skipped = {int(word) for word in skip_layers if word != SLIDING_WINDOW}
    _check_layers(_SKIP, skipped, dims)
    if SLIDING_WINDOW in skip_layers:
        if not dims.sliding_window_layers:
            raise ConfigError(f"{_SKIP} {SLIDING_WINDOW}: the model has no layer with a sliding window; name indices")
        skipped.update(dims.sliding_window_layers)
    return skipped


def _check_layers(flag: str, layers: set[int] | dict[int, str], dims: ModelDims) -> None:
    outside = [layer for layer in sorted(layers) if layer >= dims.num_layers]
    if outside:
        raise ConfigError(
            f"{flag} names layer {outside[0]}, but the model has {dims.num_layers} layers: 0 to {dims.num_layers - 1}"
        )


def _suitable_format(kv_cache_dtype: str, dims: ModelDims, model_dtype: str, block_size: int) -> KVFormat:
    try:
        kv_format = resolve_kv_format(kv_cache_dtype, model_dtype)
        kv_format.bytes_per_block_head(dims.head_dim, block_size)
    except ValueError as error:
        raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype} does not suit the model: {error}") from None
    if dims.latent_width and kv_format.quantized:
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype} does not suit the model: multi-head latent attention caches latents, "
            "which are kept in floating point only; use auto or one of float32, float16, bfloat16"
        )
    return kv_format


def _in_both(layer: int) -> str:
    return f"layer {layer} is in both {_SKIP} and {_MAP}; name it in one of them"
