"""Reads the labels of `vllm:cache_config_info`: the running configuration of the cache, as vLLM itself tells it.

Values are text, "None" for unset. Two of them mislead: `kv_cache_memory_bytes` carries a default where the number of
blocks is set by hand, and `kv_cache_size_tokens` may count the null block, which no request ever gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.config import ModelDims, flag_of
from engine.memory import NULL_BLOCKS, kv_bytes_per_block, kv_bytes_per_token
from runbooks.engine_names import flag_for
from runbooks.flags import why_absent

_NUMBERS = {
    "gpu_memory_utilization": float,
    "kv_offloading_size": float,
    "swap_space": float,
    "cpu_offload_gb": float,
    "prefix_match_unit": int,
    "prefix_cache_retention_interval": int,
}
_SWITCHES = ("calculate_kv_scales", "enable_prefix_caching", "kv_sharing_fast_prefill")
_WORDS = ("prefix_caching_hash_algo", "mamba_cache_mode")


def read_labels(facts: Mapping[str, Any], given: Mapping[str, Any], dims: ModelDims | None) -> dict[str, Any]:
    """Fields of `TargetFacts` from the labels at top level, or under "cache_config_info".

    given: flags that are known from elsewhere; they win over labels. A label that is no flag of the version, as some
    fields of the configuration outlive theirs, is left out.
    """
    nested = facts.get("cache_config_info")
    labels: Mapping[str, Any] = nested if isinstance(nested, Mapping) else facts
    block_size, blocks = whole(labels.get("block_size")), whole(labels.get("num_gpu_blocks"))
    engine, version = str(facts.get("engine", "vllm")), facts.get("version")
    told = _flags(labels, block_size)
    if version is not None:
        told = {flag: value for flag, value in told.items() if why_absent(engine, version, flag) is None}
    flags = {**told, **given}
    return {
        "engine": engine,
        "version": version,
        "flags": flags,
        "dims": dims,
        "block_size": block_size,
        "num_gpu_blocks": blocks,
        "kv_cache_size_tokens": _usable_tokens(whole(labels.get("kv_cache_size_tokens")), blocks, block_size),
        **_kv_bytes(dims, flags.get("--kv-cache-dtype"), block_size),
        "max_num_seqs": whole(flags.get(flag_for(engine, "--max-num-seqs"))),
        "max_num_batched_tokens": whole(flags.get(flag_for(engine, "--max-num-batched-tokens"))),
        "max_model_len": whole(flags.get(flag_for(engine, "--max-model-len"))),
    }


def whole(value: Any) -> int | None:
    """A label or a flag's value as an integer; None where it is unset or no number."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return None


def _flags(labels: Mapping[str, Any], block_size: int | None) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        if name in labels:
            text = labels[name]
            flags[flag_of(name)] = None if text in (None, "None") else kind(float(text))
    override = whole(labels.get("num_gpu_blocks_override"))
    if "num_gpu_blocks_override" in labels:
        flags["--num-gpu-blocks-override"] = override
    if "kv_cache_memory_bytes" in labels and override is None:
        flags["--kv-cache-memory-bytes"] = whole(labels["kv_cache_memory_bytes"])
    if labels.get("cache_dtype") is not None:
        flags["--kv-cache-dtype"] = labels["cache_dtype"]
    if "kv_cache_dtype_skip_layers" in labels:
        flags["--kv-cache-dtype-skip-layers"] = _words(labels["kv_cache_dtype_skip_layers"])
    if str(labels.get("user_specified_block_size")) in ("True", "False"):
        flags["--block-size"] = block_size if str(labels["user_specified_block_size"]) == "True" else None
    for name in _SWITCHES:
        if str(labels.get(name)) in ("True", "False"):
            flags[flag_of(name)] = str(labels[name]) == "True"
    for name in _WORDS:
        if labels.get(name) not in (None, "None"):
            flags[flag_of(name)] = labels[name]
    return flags


def _words(value: Any) -> str | None:
    """A list as the labels write it, `['0', '3']`, as the words of a flag; None when it is empty."""
    return " ".join(re.findall(r"\w+", str(value))) or None if value not in (None, "None") else None


def _usable_tokens(stated: int | None, blocks: int | None, block_size: int | None) -> int | None:
    """Tokens that requests can get. A stated size that is all blocks counts the null block too: it is taken off."""
    if blocks is None or block_size is None:
        return stated
    if stated is None or stated == blocks * block_size:
        return max(0, blocks - NULL_BLOCKS) * block_size
    return stated


def _kv_bytes(dims: ModelDims | None, kv_dtype: Any, block_size: int | None) -> dict[str, int]:
    """Bytes per block and token; nothing for a format this build does not know: unknown, not guessed."""
    if dims is None or kv_dtype is None or block_size is None:
        return {}
    try:
        return {
            "kv_bytes_per_block": kv_bytes_per_block(dims, str(kv_dtype), block_size),
            "kv_bytes_per_token": kv_bytes_per_token(dims, str(kv_dtype), block_size),
        }
    except ValueError:
        return {}
