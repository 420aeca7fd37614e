"""The pool of the engine in this repository: KV cache per token, pool size, what fits.

Used by the engine when it sizes its pool and by the runbooks when they recommend. What a format takes, its scales
included, comes from `kernels.formats`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import ConfigError, EngineConfig, ModelDims
from engine.kv_formats import format_name
from kernels.formats import KVFormat, resolve_kv_format

NULL_BLOCKS = 1  # block 0 pads block tables and is never handed out, as in vLLM
BOOKKEEPING_BYTES_PER_BLOCK = 768  # what the engine remembers of a block: its record, hash, index, recent eviction
WITNESS_BYTES_PER_BLOCK = 512  # and its tokens, where they are compared; 4 bytes a token besides


def bookkeeping_bytes_per_block(config: EngineConfig) -> int:
    """Bytes of host memory an engine keeps of a KV block besides the block itself."""
    compares_tokens = config.prefix_cache_verify or config.prefix_caching_hash_algo == "unsafe_truncated"
    witness = WITNESS_BYTES_PER_BLOCK + 4 * config.block_size if compares_tokens else 0
    return BOOKKEEPING_BYTES_PER_BLOCK + witness


def kv_bytes_per_block(dims: ModelDims, kv_dtype: str | Sequence[KVFormat], block_size: int) -> int:
    """Bytes of one block of `block_size` tokens over all layers, scales included.

    kv_dtype: one value of `--kv-cache-dtype` for all layers, or the format of each layer. Multi-head latent attention
    keeps one vector of the latent's width a token and layer, for all heads and for both keys and values; a quantized
    format for it is a `ConfigError`.
    """
    if isinstance(kv_dtype, str):
        return dims.num_layers * _layer_bytes_per_block(dims, resolve_kv_format(kv_dtype, dims.dtype), block_size)
    return sum(_layer_bytes_per_block(dims, kv_format, block_size) for kv_format in kv_dtype)


def _layer_bytes_per_block(dims: ModelDims, kv_format: KVFormat, block_size: int) -> int:
    if dims.latent_width:
        if kv_format.quantized:
            raise ConfigError(f"latents are kept in floating point only, not in {kv_format.name}")
        return kv_format.key.bytes_per_block_head(dims.latent_width, block_size)
    return dims.num_kv_heads * kv_format.bytes_per_block_head(dims.head_dim, block_size)


def kv_bytes_per_token(dims: ModelDims, kv_dtype: str | Sequence[KVFormat], block_size: int = 16) -> int:
    """Bytes of K and V one token takes over all layers, rounded up: parameters per block are shared by its tokens."""
    return -(-kv_bytes_per_block(dims, kv_dtype, block_size) // block_size)


def open_blocks_bytes(config: EngineConfig, dims: ModelDims) -> int:
    """Bytes beside the pool for blocks that are not full yet: one a sequence, as precise as the activations.

    0 for layers whose format quantizes every token when it is written.
    """
    open_layers = sum(kv_format.keeps_open_blocks for kv_format in config.layer_kv_formats(dims))
    exact = resolve_kv_format("auto", config.resolved_dtype(dims))
    return config.max_num_seqs * kv_bytes_per_block(dims, [exact] * open_layers, config.block_size)


def num_blocks_for(kv_bytes: int, dims: ModelDims, kv_dtype: str | Sequence[KVFormat], block_size: int) -> int:
    """Whole blocks that fit into `kv_bytes` (the null block counts as one of them)."""
    return kv_bytes // kv_bytes_per_block(dims, kv_dtype, block_size)


@dataclass(frozen=True)
class MemoryPlan:
    """How a device's memory is divided. All sizes in bytes; `num_gpu_blocks` includes the null block."""

    device_memory_bytes: int
    weights_bytes: int
    activation_peak_bytes: int
    kv_cache_dtype: str  # the format in force, "mixed" when layers have several
    kv_layer_dtypes: tuple[str, ...]  # the format of each layer
    kv_cache_bytes: int
    kv_bytes_per_block: int
    kv_bytes_per_token: int  # rounded up where a block's parameters do not divide among its tokens
    open_blocks_bytes: int  # beside the pool, see open_blocks_bytes()
    bookkeeping_bytes: int  # records of the blocks, where the engine's own process is the device; else 0
    block_size: int
    num_gpu_blocks: int
    kv_cache_size_tokens: int
    max_model_len: int
    max_concurrency: float  # requests of max_model_len that fit at once
    source: str  # "profile", "kv_cache_memory_bytes" or "num_gpu_blocks_override"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        return dataclasses.asdict(self)


def plan_kv_cache(
    config: EngineConfig,
    dims: ModelDims,
    *,
    weights_bytes: int,
    activation_peak_bytes: int,
    device_memory_bytes: int | None = None,
    bookkeeping_bytes_per_block: int = 0,
) -> MemoryPlan:
    """Sizes the KV pool as vLLM does.

    By profile: `device x --gpu-memory-utilization - weights - activation peak - open blocks`, of which each block
    takes its own bytes and those of its bookkeeping (on a CPU, whose device is the process itself). An explicit
    `--kv-cache-memory-bytes` or `--num-gpu-blocks-override` replaces that figure without a check against
    the device: such a configuration can run out of memory, which is then a real failure.
    Raises `ConfigError` when one request of `max_model_len` would not fit into the pool.
    """
    device = config.device_memory if device_memory_bytes is None else device_memory_bytes
    formats = config.layer_kv_formats(dims)
    open_blocks = open_blocks_bytes(config, dims)
    per_block = kv_bytes_per_block(dims, formats, config.block_size)
    max_model_len = config.resolved_max_model_len(dims)
    if config.num_gpu_blocks_override is not None:
        source, num_blocks = "num_gpu_blocks_override", config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        source, num_blocks = (
            "kv_cache_memory_bytes",
            num_blocks_for(config.kv_cache_memory_bytes, dims, formats, config.block_size),
        )
    else:
        source = "profile"
        budget = int(device * config.gpu_memory_utilization) - weights_bytes - activation_peak_bytes - open_blocks
        num_blocks = budget // (per_block + bookkeeping_bytes_per_block)
        if num_blocks < 1 + NULL_BLOCKS:
            raise ConfigError(
                f"no memory is left for the KV cache: {device} bytes x {config.gpu_memory_utilization} minus weights "
                f"{weights_bytes}, activation peak {activation_peak_bytes} and open blocks {open_blocks} gives "
                f"{budget}; raise --device-memory or --gpu-memory-utilization, or lower --max-num-batched-tokens"
            )
    usable_blocks = max(0, num_blocks - NULL_BLOCKS)
    tokens = usable_blocks * config.block_size
    blocks_per_request = -(-max_model_len // config.block_size)
    if tokens < max_model_len:
        raise ConfigError(
            f"a request of --max-model-len {max_model_len} needs {blocks_per_request * per_block} bytes of KV cache, "
            f"but the pool holds {usable_blocks * per_block}; raise --gpu-memory-utilization, or lower "
            f"--max-model-len to at most {tokens}"
        )
    return MemoryPlan(
        device_memory_bytes=device,
        weights_bytes=weights_bytes,
        activation_peak_bytes=activation_peak_bytes,
        kv_cache_dtype=format_name(formats),
        kv_layer_dtypes=tuple(kv_format.name for kv_format in formats),
        kv_cache_bytes=num_blocks * per_block,
        kv_bytes_per_block=per_block,
        kv_bytes_per_token=kv_bytes_per_token(dims, formats, config.block_size),
        open_blocks_bytes=open_blocks,
        bookkeeping_bytes=num_blocks * bookkeeping_bytes_per_block,
        block_size=config.block_size,
        num_gpu_blocks=num_blocks,
        kv_cache_size_tokens=tokens,
        max_model_len=max_model_len,
        max_concurrency=usable_blocks / blocks_per_request,
        source=source,
    )
