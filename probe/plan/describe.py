"""A `Deployment` from the flags of `kvoncall plan`: model, GPUs, engine, flags and stated figures.

What contradicts itself is refused in one sentence that names both flags; what was taken for granted becomes a note.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.memory.deployment import Deployment, Gpu
from engine.memory.engines import engine_name, resolve_version
from engine.memory.hf_config import model_shape, read_config, with_dims, with_dtype, with_quantization
from engine.memory.model_presets import find_config, gpu, gpu_from_memory, read_model
from engine.memory.plan import plan
from engine.memory.recurrent import DTYPE_BYTES
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.units import GIB, gib
from probe.plan.options import LONGEST
from runbooks.flags import nearest_version

ASSUMED_LENGTH = 8192
GPUS_PER_NODE = 8
CATALOGED = ("vllm", "sglang", "tensorrt-llm", "tgi")
_DIMS = {
    "layers": "num_hidden_layers",
    "kv_heads": "num_key_value_heads",
    "query_heads": "num_attention_heads",
    "head_dim": "head_dim",
}
_STATED_KV = ("kv_gib", "stage_kv_gib", "kv_cache_memory_bytes", "num_gpu_blocks_override")
_SAME_NAME = (
    "tp",
    "pp",
    "dp",
    "dcp",
    "stage_layers",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_dp_attention",
    "num_gpu_blocks_override",
    "max_kv_tokens",
    "max_lora_rank",
    "max_loras",
    "tokens_per_request",
    "kv_offloading_per_rank",
)
_STATED = {
    "kv_gib": "kv_cache_bytes",
    "weights_gib": "weights_bytes",
    "activation_gib": "activation_bytes",
    "non_torch_gib": "non_torch_bytes",
    "cuda_graph_gib": "cuda_graph_bytes",
    "other_processes_gib": "other_processes_bytes",
}


@dataclass(frozen=True)
class Described:
    """What to plan, and what a reader should know of how it was read."""

    deployment: Deployment
    notes: tuple[str, ...] = ()


def describe(options: argparse.Namespace, base: Deployment | None = None) -> Described:
    """The deployment of the flags; over `base` (a live server) where there is one. Raises `ConfigError`."""
    refuse_contradictions(options)
    notes: list[str] = []
    given = _given(options, notes)
    made = Deployment(shape=shape_of(options), **given) if base is None else replace(base, **given)
    if options.gpus is None:
        made = replace(made, num_gpus=ranks_of(made) if base is None else made.num_gpus)
    notes.extend(_version_notes(made))
    notes.extend(_gpu_notes(options, made))
    if made.max_model_len == LONGEST:
        made = _longest(replace(made, max_model_len=None), notes)
    if made.max_model_len is None and made.shape.max_position_embeddings is None:
        made = replace(made, max_model_len=ASSUMED_LENGTH)
        notes.append(
            f"no context length was given: concurrency is for requests of {ASSUMED_LENGTH:,} tokens; "
            "add --max-model-len"
        )
    return Described(made, tuple(notes))


def _longest(made: Deployment, notes: list[str]) -> Deployment:
    """vLLM's `--max-model-len auto`: the model's own length, or the longest that fits."""
    if made.shape.max_position_embeddings is None:
        raise ConfigError(
            "--max-model-len auto needs a model that states its context length; give the length in tokens"
        )
    whole = plan(made)
    if whole.fits or whole.largest_model_len < 1:
        return made
    notes.append(f"--max-model-len auto: {whole.largest_model_len:,} of the model's {whole.max_model_len:,} tokens fit")
    return replace(made, max_model_len=whole.largest_model_len)


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for two flags of which only one can hold."""
    dims = [f"--{name.replace('_', '-')}" for name in (*_DIMS, "mla_latent") if getattr(options, name) is not None]
    sources = [flag for flag, value in (("--model", options.model), ("--model-config", options.model_config)) if value]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} both name a model; leave one out")
    if options.model and dims:
        raise ConfigError(f"--model and {dims[0]} both describe the model; leave one out")
    stated = [_flag(name) for name in _STATED_KV if getattr(options, name) is not None]
    if len(stated) > 1:
        raise ConfigError(f"{' and '.join(stated)} both state the size of the KV cache; leave one out")
    if stated and options.gpu_memory_utilization is not None:
        raise ConfigError(
            f"{stated[0]} states the size of the KV cache, so --gpu-memory-utilization cannot decide it; leave one out"
        )
    if options.mla_latent and options.kv_heads:
        raise ConfigError(
            "--mla-latent and --kv-heads contradict each other: a latent is kept once for all heads; leave one out"
        )
    if (options.window is None) != (options.window_layers is None):
        raise ConfigError("--window and --window-layers belong together: how many tokens, and in how many layers")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def shape_of(options: argparse.Namespace) -> ModelShape:
    """The model: a preset, a config, or plain dims."""
    dims = {key: getattr(options, name) for name, key in _DIMS.items() if getattr(options, name) is not None}
    if not options.model and not options.model_config:
        return _plain(options)
    if options.mla_latent:
        raise ConfigError("--mla-latent describes a model by plain dims; with --model-config leave it out")
    config, name = find_config(options.model) if options.model else read_config(options.model_config)
    config = with_dims(config, dims) if dims else config
    if options.dtype:
        config = with_dtype(config, options.dtype)
    if options.quantization:
        config = with_quantization(config, options.quantization)
    return model_shape(config, name)


def _plain(options: argparse.Namespace) -> ModelShape:
    missing = [
        _flag(name)
        for name in ("layers", *(() if options.mla_latent else ("kv_heads", "head_dim")))
        if getattr(options, name) is None
    ]
    if missing:
        raise ConfigError(
            f"no model was given ({', '.join(missing)} missing): add --model NAME, --model-config FILE, or --layers "
            "with --kv-heads and --head-dim (--mla-latent for latent attention)"
        )
    layers, windowed = options.layers, options.window_layers or 0
    if windowed > layers:
        raise ConfigError(f"--window-layers {windowed} are more than the {layers} of --layers")
    if options.query_heads and options.kv_heads and options.query_heads % options.kv_heads:
        raise ConfigError(f"--query-heads {options.query_heads} is not a multiple of --kv-heads {options.kv_heads}")
    if options.mla_latent:
        groups = [LayerGroup(layers - windowed, "latent", latent_width=options.mla_latent)]
        what = f"a latent of {options.mla_latent}"
    else:
        groups = [LayerGroup(layers - windowed, "full", options.kv_heads, options.head_dim)]
        what = f"{options.kv_heads} KV heads x {options.head_dim}"
    if windowed:
        groups.append(
            LayerGroup(windowed, "sliding", options.kv_heads or 1, options.head_dim or 1, window=options.window)
        )
    dtype = options.dtype or "bfloat16"
    weights = int(options.params * DTYPE_BYTES.get(dtype, 2)) if options.params else None
    return ModelShape(
        name=f"{layers} layers x {what}",
        layers=tuple(group for group in groups if group.count),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_q_heads=options.query_heads,
        vocab_size=options.vocab_size,
        dtype=dtype,
        parameters=options.params,
        weights_bytes=weights,
        weights_how=f"{options.params:,} parameters x {DTYPE_BYTES.get(dtype, 2)} bytes" if options.params else "",
    )


def _given(options: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    """Fields of `Deployment` that the flags state."""
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME_NAME}
    for name, field in _STATED.items():
        if getattr(options, name) is not None:
            fields[field] = _noted(getattr(options, name), _flag(name), notes)
    if options.engine:
        fields["engine"], fields["version"] = split_engine(options.engine)
    if options.kv_cache_memory_bytes:
        fields["kv_cache_bytes"] = _noted(options.kv_cache_memory_bytes, "--kv-cache-memory-bytes", notes)
    if options.stage_kv_gib:
        fields["stage_kv_cache_bytes"] = tuple(int(size * GIB) for size in options.stage_kv_gib)
    if options.kv_cache_dtype_skip_layers:
        fields["kv_cache_dtype_skip_layers"] = tuple(options.kv_cache_dtype_skip_layers)
    if options.disable_hybrid_kv_cache_manager is not None:
        fields["hybrid_kv_cache"] = not options.disable_hybrid_kv_cache_manager
    if options.kv_offloading_size is not None:
        if options.kv_offloading_size <= 0:
            raise ConfigError(f"--kv-offloading-size must be more than 0 GiB, found {options.kv_offloading_size:g}")
        fields["kv_offloading_bytes"] = int(options.kv_offloading_size * GIB)
    if options.host_memory:
        fields["host_memory_bytes"] = _noted(options.host_memory, "--host-memory", notes)
    draft, ahead = _speculative(options)
    if draft:
        fields["draft"] = read_model(draft)
    if ahead:
        fields["num_speculative_tokens"] = ahead
    fields["gpu"] = _gpu(options, notes)
    fields["num_gpus"] = options.gpus
    return {name: value for name, value in fields.items() if value is not None}


def _speculative(options: argparse.Namespace) -> tuple[str | None, int | None]:
    """(draft model, tokens ahead), also from vLLM's --speculative-config."""
    draft, ahead = options.draft_model, options.num_speculative_tokens
    if options.speculative_config is None:
        return draft, ahead
    try:
        config = json.loads(options.speculative_config)
        stated = config.get("model"), config.get("num_speculative_tokens")
    except (ValueError, AttributeError):
        raise ConfigError(
            f"--speculative-config is not a JSON object: {options.speculative_config!r}; write for example "
            '\'{"model": "Qwen3-0.6B", "num_speculative_tokens": 4}\''
        ) from None
    return draft or stated[0], ahead or stated[1]


def _noted(read: tuple[int, str], flag: str, notes: list[str]) -> int:
    size, note = read
    if note:
        notes.append(f"{flag} {note}")
    return size


def _gpu(options: argparse.Namespace, notes: list[str]) -> Gpu | None:
    if options.gpu_memory is None:
        return gpu(options.gpu) if options.gpu else None
    size = _noted(options.gpu_memory, "--gpu-memory", notes)
    if not options.gpu:
        return gpu_from_memory(f"{size}B")[0]
    known = gpu(options.gpu)
    if abs(size / known.memory_bytes - 1) > 0.15:
        raise ConfigError(
            f"--gpu-memory {gib(size)} contradicts --gpu {known.name}, which has {gib(known.memory_bytes)}; "
            "leave one out"
        )
    return replace(known, memory_bytes=size)


def split_engine(text: str) -> tuple[str, str | None]:
    """("vllm", "0.33.0") of vllm@0.33.0; a version may also follow `==`, `:` or a space."""
    for mark in ("@", "==", ":", " "):
        if mark in text.strip():
            name, version = text.strip().split(mark, 1)
            return name.strip(), version.strip().removeprefix("v") or None
    return text.strip(), None


def _version_notes(made: Deployment) -> list[str]:
    """A version between known ones: which is the nearest (the plan itself tells of one beyond them)."""
    engine = engine_name(made.engine)
    if made.version is None or engine not in CATALOGED or resolve_version(engine, made.version)[1]:
        return []
    nearest, note = nearest_version(engine, made.version)
    return [f"{engine} {made.version} is not a known version: planned as {nearest}, the nearest"] if note else []


def ranks_of(made: Deployment) -> int:
    """GPUs of one replica; data-parallel attention (SGLang) shares those of tensor parallelism."""
    return made.tp * made.pp * (1 if made.enable_dp_attention else made.dp)


def _gpu_notes(options: argparse.Namespace, made: Deployment) -> list[str]:
    ranks = ranks_of(made)
    split = f"tp {made.tp} x pp {made.pp}" + ("" if made.enable_dp_attention else f" x dp {made.dp}")
    notes = []
    if options.gpus is not None and options.gpus < ranks:
        raise ConfigError(f"--gpus {options.gpus} are fewer than {split} = {ranks}; give more GPUs or less parallelism")
    if options.gpus is not None and options.gpus > ranks:
        replicas, idle = divmod(options.gpus, ranks)
        notes.append(
            f"{options.gpus} GPUs are {replicas} replicas of {ranks} ({split})"
            + (f" and {idle} idle" if idle else "")
            + f": the figures are of one replica; all together {replicas} times the tokens and requests"
        )
    if made.dp > 1 and not made.enable_dp_attention:
        notes.append(f"dp {made.dp}: every data-parallel rank has a pool of its own; the figures are of one")
    if ranks > GPUS_PER_NODE:
        notes.append(
            f"{ranks} ranks are more than one node of {GPUS_PER_NODE} as a rule: host memory counts for each node, "
            "and tensor parallelism across nodes is slow"
        )
    return notes
