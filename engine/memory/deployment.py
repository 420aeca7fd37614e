"""A server as its operator describes it: model, GPUs, engine and version, and the flags that decide memory."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.shape import ModelShape


@dataclass(frozen=True)
class Gpu:
    """One kind of device. memory_bytes: what the driver reports as its total, not the number on the box.

    compute_capability: (major, minor), None for other vendors. memory_bandwidth: bytes a second.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None = None
    memory_bandwidth: float | None = None
    unified: bool = False  # shares its memory with the host (GB10, GH200's managed part)


@dataclass(frozen=True)
class Deployment:
    """One server. A flag that is None has the default of its engine and version; `*_bytes` are bytes per GPU.

    Stated figures win over estimated ones: `weights_bytes`, `activation_bytes`, `non_torch_bytes`,
    `cuda_graph_bytes`, and `kv_cache_bytes`, which skips the division of memory altogether (a log that states the
    KV memory; also `--kv-cache-memory-bytes`). stage_layers: layers of each pipeline stage, None for an even split.
    tokens_per_request: what a typical request holds at its end, for concurrency beside that at max_model_len.
    stage_kv_cache_bytes: stated KV memory of each pipeline stage. max_kv_tokens: SGLang's --max-total-tokens,
    TensorRT-LLM's max_tokens. enable_dp_attention: the dp ranks share the tp GPUs and attention is divided by tp / dp
    only (SGLang); otherwise dp counts whole servers. max_num_batched_tokens is SGLang's --chunked-prefill-size,
    TensorRT-LLM's max_num_tokens. dcp: decode context parallel size. kv_offloading_per_rank: `kv_offloading_bytes`
    is of each rank.
    """

    shape: ModelShape
    engine: str = "vllm"  # vllm, sglang, tensorrt-llm, tgi, kvoncall
    version: str | None = None
    gpu: Gpu | None = None
    num_gpus: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    stage_layers: tuple[int, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    gpu_memory_utilization: float | None = None  # SGLang's mem_fraction_static, TensorRT-LLM's free fraction
    enforce_eager: bool = False
    hybrid_kv_cache: bool = True  # False: every layer is billed as full attention
    num_gpu_blocks_override: int | None = None
    kv_cache_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    cuda_graph_bytes: int | None = None
    other_processes_bytes: int = 0
    kv_offloading_bytes: int = 0  # host memory for KV, over all ranks of the server
    host_memory_bytes: int | None = None
    draft: ModelShape | None = None
    max_lora_rank: int = 0
    max_loras: int = 0
    tokens_per_request: int | None = None
    stage_kv_cache_bytes: tuple[int, ...] | None = None
    max_kv_tokens: int | None = None
    enable_dp_attention: bool = False
    dcp: int = 1
    num_speculative_tokens: int = 0
    kv_offloading_per_rank: bool = False
    enable_prefix_caching: bool | None = None
