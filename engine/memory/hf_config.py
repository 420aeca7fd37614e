"""Any Hugging Face `config.json` as a `ModelShape`: what its layers cache, and what its weights take."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.memory.hf_layers import layer_groups, layer_kinds
from engine.memory.hf_values import FLAGS, NESTED, HfValues
from engine.memory.parameters import count_parameters
from engine.memory.quantization import BY_FLAG, quantization_of
from engine.memory.recurrent import DTYPE_BYTES, dtype_of
from engine.memory.shape import ModelShape
from engine.memory.weights import weights_of


def model_shape(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape a `config.json` describes; raises `ConfigError` naming the key that is missing or wrong.

    An architecture that is not known here is read by its standard keys, which the assumptions say.
    """
    if not isinstance(config, Mapping) or not config:
        raise ConfigError(
            "config.json is empty or not a JSON object; give a model's config.json, or --layers and so on"
        )
    values = HfValues(config)
    kinds = layer_kinds(values)
    groups = layer_groups(values, kinds)
    if not values.known:
        values.assume(
            f"{values.architecture or 'the architecture'} is not known here; it is read by its standard keys as "
            + ("a decoder whose layers all cache every token" if set(kinds) == {"full"} else "the layers it names")
        )
    if values.text.get("is_encoder_decoder") or values.config.get("is_encoder_decoder"):
        values.assume("an encoder-decoder: its cross-attention and its encoder are not counted")
    counted = count_parameters(values, kinds)
    experts = values.optional("num_experts", 0) or 0
    quantization, dtype = quantization_of(values), dtype_of(values)
    weights = weights_of(counted, dtype, quantization) if counted else None
    if counted is None:
        values.assume(
            "the config does not tell the size of the weights; give --weights-gib for a plan of the whole GPU"
        )
    elif weights is None and quantization is not None:
        values.assume(
            f"how many bits {quantization.name} takes is not in the config; give --weights-gib for a plan of the GPU"
        )
    return ModelShape(
        name=name or str(config.get("_name_or_path") or values.architecture or "model"),
        layers=groups,
        architecture=values.architecture,
        hidden_size=values.optional("hidden_size"),
        intermediate_size=_intermediate(values),
        num_q_heads=values.optional("num_attention_heads"),
        vocab_size=values.optional("vocab_size"),
        max_position_embeddings=_positions(values),
        dtype=dtype,
        parameters=counted.total if counted else None,
        active_parameters=counted.active if counted else None,
        embedding_parameters=counted.embedding + counted.head if counted else None,
        weights_bytes=weights.bytes if weights else None,
        weights_how=weights.how if weights else "",
        quantization=quantization.name if quantization else None,
        embedding_bytes=weights.embedding if weights else 0,
        head_bytes=weights.head if weights else 0,
        replicated_bytes=weights.replicated if weights else 0,
        kv_projection_bytes=weights.kv_projection if weights else 0,
        num_experts=experts if experts > 1 else None,
        experts_per_token=values.optional("num_experts_per_tok") if experts > 1 else None,
        moe_intermediate_size=(values.optional("moe_intermediate_size") or _intermediate(values))
        if experts > 1
        else None,
        assumptions=tuple(values.assumptions),
    )


def _intermediate(values: HfValues) -> int | None:
    size = values.raw("intermediate_size")
    return max(size) if isinstance(size, list) and size else values.optional("intermediate_size")


def _positions(values: HfValues) -> int | None:
    """Positions the model serves: stretched by rope scaling as vLLM stretches them."""
    positions = values.optional("max_position_embeddings")
    scaling = values.raw("rope_parameters") or values.raw("rope_scaling")
    if positions is None or not isinstance(scaling, Mapping):
        return positions
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if not isinstance(factor, (int, float)) or not 1 < factor < 1e6:
        return positions
    if kind == "dynamic" or kind == "linear":
        return int(positions * factor)
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        return max(positions, int(original * factor))
    return positions


def read_config(source: str) -> tuple[dict[str, Any], str]:
    """(config, name) of a file, a directory, `-` for standard input, or JSON text itself; raises `ConfigError`."""
    if source == "-":
        return _parsed(sys.stdin.read(), "standard input"), ""
    if source.lstrip().startswith("{"):
        return _parsed(source, "the pasted config"), ""
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        from engine.gguf_config import gguf_hf_config

        return gguf_hf_config(path), path.stem
    file = path / "config.json" if path.is_dir() else path
    name = (
        path.resolve().name
        if path.is_dir()
        else path.resolve().parent.name
        if path.name == "config.json"
        else path.stem
    )
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "holds no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(f"{source!r} {what}; give a model's config.json, its directory, or - to paste one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from None
    return _parsed(text, repr(str(file))), name


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}; give a Hugging Face config.json") from None
    if not isinstance(config, dict) or not config:
        raise ConfigError(f"{where} is not a JSON object with values; give a Hugging Face config.json")
    return config


def with_dims(config: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """The config with dims of flags put where it lacks them; raises `ConfigError` where it says otherwise."""
    values = HfValues(config)
    for key, value in dims.items():
        stated = values.text.get(key)
        if stated is not None and stated != value:
            raise ConfigError(f"{FLAGS[key]} {value} contradicts the config's {key} of {stated}; leave one of them out")
    return _put(config, dims)


def _put(config: Mapping[str, Any], dims: Mapping[str, Any]) -> dict[str, Any]:
    for key in NESTED:
        if isinstance(config.get(key), Mapping) and config[key]:
            return {**config, key: _put(config[key], dims)}
    return {**config, **dims}


def with_quantization(config: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """The config with the weights that `--quantization` makes; raises `ConfigError` where they are others already."""
    name = flag.lower().removesuffix("_marlin").replace("modelopt_fp4", "nvfp4")
    if name not in BY_FLAG:
        raise ConfigError(f"--quantization {flag} is not known here; use one of {', '.join(BY_FLAG)}, or --weights-gib")
    own = quantization_of(HfValues(config))
    if own is not None and own.name != name:
        raise ConfigError(
            f"--quantization {flag} contradicts the checkpoint, whose weights are {own.name}; leave it out"
        )
    return dict(config) if own is not None else {**config, "quantization_config": BY_FLAG[name]}


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config with `--dtype` in force; raises `ConfigError` for one that is not known."""
    name = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if name == "auto":
        return dict(config)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype} is not known; use auto, bfloat16, float16 or float32")
    return _put(config, {"dtype": name, "torch_dtype": name})
