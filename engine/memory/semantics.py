"""What engines and their versions mean by the same words: utilization, block size, defaults, what is inside the budget.

Sources: vLLM's arg_utils.py, config/cache.py, worker.py, gpu_worker.py and kv_cache_utils.py by version; SGLang's
memory_hook.py; TensorRT-LLM's KvCacheConfig; TGI's launcher. `resolve` fills a deployment's unset flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.memory.deployment import Deployment, Gpu
from engine.memory.engines import engine_name, resolve_version
from engine.memory.sglang_defaults import chunked_prefill_size, mem_fraction_static
from engine.memory.weights import even_stages

_GIB = 1 << 30
_FLAGS = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "tensorrt-llm": "free_gpu_memory_fraction",
    "tgi": "--cuda-memory-fraction",
    "kvoncall": "--gpu-memory-utilization",
}
_LENGTH_FLAGS = {"sglang": "--context-length", "tensorrt-llm": "--max_seq_len", "tgi": "--max-total-tokens"}
_BATCH_FLAGS = {
    "sglang": "--chunked-prefill-size",
    "tensorrt-llm": "--max_num_tokens",
    "tgi": "--max-batch-prefill-tokens",
}
_SEQS_FLAGS = {"sglang": "--max-running-requests", "tensorrt-llm": "--max_batch_size", "tgi": "--max-batch-size"}
_KV_DTYPE_FLAGS = {"tensorrt-llm": "kv_cache_config.dtype"}
_TP_FLAGS = {"sglang": "--tp-size", "tensorrt-llm": "--tp_size", "tgi": "--num-shard"}
_LATENT_BACKENDS_SINCE = (0, 32)  # as read there; 0.8 to 0.17 forced FlashMLA's block size, versions between not read
TGI_WIGGLE_ROOM = 0.95  # TGI leaves 5% of what is free to the allocator


@dataclass(frozen=True)
class Semantics:
    """What decides memory in one engine version. notes: sentences for the plan's warnings (version assumed, ...).

    profile: how the engine finds what it needs beside weights: "torch_peak" (peak of torch's allocations),
    "device" (what the device has lost since the start, torch's cached blocks included), "device_total" (the same and
    everything else on the card), "none" (SGLang reserves a fraction instead).
    """

    engine: str
    version: tuple[int, ...]
    utilization_flag: str
    default_utilization: float | None
    graphs_inside_budget: bool
    global_cap: bool  # utilization also counts what other processes hold
    null_block: bool
    hybrid_manager: bool
    v1: bool = True
    profile: str = "torch_peak"
    tokens_from_concurrency: bool = False  # the log prints concurrency x max_model_len
    rounds_tokens_up: bool = False
    in_flight_batches: int = 1  # batches scheduled before a window's old blocks are freed
    keeps_reduced_tensors: bool = False  # collectives kept their inputs until the end of the step
    notes: tuple[str, ...] = ()

    @property
    def length_flag(self) -> str:
        return _LENGTH_FLAGS.get(self.engine, "--max-model-len")

    @property
    def batch_flag(self) -> str:
        return _BATCH_FLAGS.get(self.engine, "--max-num-batched-tokens")

    @property
    def seqs_flag(self) -> str:
        return _SEQS_FLAGS.get(self.engine, "--max-num-seqs")

    @property
    def kv_dtype_flag(self) -> str:
        return _KV_DTYPE_FLAGS.get(self.engine, "--kv-cache-dtype")

    @property
    def tp_flag(self) -> str:
        return _TP_FLAGS.get(self.engine, "--tensor-parallel-size")


def semantics_of(engine: str, version: str | None) -> Semantics:
    """Raises `ConfigError` for an engine that is not known; an unknown version becomes the nearest known."""
    name = engine_name(engine)
    numbers, note = resolve_version(name, version)
    notes = (note,) if note else ()
    if name == "vllm":
        generation = re.search(r"\bv([01])\b(?![.\d])", (version or "").lower())
        v1 = numbers >= (0, 8) if generation is None else generation[1] == "1" and numbers >= (0, 6)
        return Semantics(
            name,
            numbers,
            _FLAGS[name],
            0.92 if numbers >= (0, 20) else 0.9,
            graphs_inside_budget=numbers >= (0, 21),
            global_cap=_vllm_global_cap(numbers, v1),
            null_block=v1,
            hybrid_manager=v1 and numbers >= (0, 9, 1),
            v1=v1,
            profile=_vllm_profile(numbers),
            tokens_from_concurrency=numbers >= (0, 21),
            in_flight_batches=2 if numbers >= (0, 30) else 1,
            keeps_reduced_tensors=numbers < (0, 2, 6),
            notes=notes,
        )
    defaults: dict[str, float | None] = {"sglang": None, "tensorrt-llm": 0.9, "tgi": 1.0, "kvoncall": 0.92}
    return Semantics(
        name,
        numbers,
        _FLAGS[name],
        defaults[name],
        graphs_inside_budget=False,
        global_cap=False,
        null_block=name == "kvoncall",
        hybrid_manager=name == "sglang",
        profile="none" if name == "sglang" else "torch_peak",
        rounds_tokens_up=name == "tensorrt-llm",
        notes=notes,
    )


def _vllm_global_cap(numbers: tuple[int, ...], v1: bool) -> bool:
    """Utilization was a cap on the whole card: until 0.4.0, in 0.6.4 and its post release, and in early V1."""
    return numbers < (0, 4, 1) or (0, 6, 4) <= numbers < (0, 6, 5) or (v1 and numbers < (0, 9, 1))


def _vllm_profile(numbers: tuple[int, ...]) -> str:
    if numbers < (0, 2, 5):
        return "torch_peak"
    if numbers < (0, 4, 1):
        return "device_total"
    return "device" if numbers < (0, 6, 4) else "torch_peak"


def resolve(deployment: Deployment) -> Deployment:
    """The deployment with every default of its engine and version filled in.

    Raises `ConfigError` where no default can be known: a length that neither the flags nor the model state.
    """
    semantics = semantics_of(deployment.engine, deployment.version)
    gpu = deployment.gpu
    length = deployment.max_model_len or deployment.shape.max_position_embeddings
    if length is None:
        raise ConfigError(
            f"{deployment.shape.name or 'the model'} states no context length: add {semantics.length_flag}"
        )
    seqs = deployment.max_num_seqs or _default_seqs(semantics, gpu)
    batched = deployment.max_num_batched_tokens or _default_batched(semantics, deployment, length)
    if semantics.engine == "vllm" and deployment.max_num_batched_tokens is None and semantics.version >= (0, 18):
        batched = min(batched, seqs * length)  # no step can hold more
    if semantics.engine == "vllm" and deployment.max_num_seqs is None and semantics.version >= (0, 10, 2):
        seqs = min(seqs, batched)
    filled = replace(
        deployment,
        engine=semantics.engine,
        version=deployment.version or ".".join(str(part) for part in semantics.version),
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        block_size=deployment.block_size or _default_block(semantics, deployment),
        stage_layers=deployment.stage_layers or _even_stages(deployment.shape.num_layers, deployment.pp),
    )
    utilization = deployment.gpu_memory_utilization
    if utilization is None:
        utilization = semantics.default_utilization
    if utilization is None and gpu is not None:
        utilization = mem_fraction_static(filled, semantics.version)
    return replace(filled, gpu_memory_utilization=utilization)


def _large(gpu: Gpu | None) -> bool:
    """Whether vLLM takes its larger defaults: 70 GiB or more, the A100 excepted."""
    return gpu is not None and gpu.memory_bytes >= 70 * _GIB and "a100" not in gpu.name.lower()


def _huge(gpu: Gpu | None, version: tuple[int, ...]) -> bool:
    return gpu is not None and gpu.memory_bytes >= 160 * _GIB and version >= (0, 28)


def _default_seqs(semantics: Semantics, gpu: Gpu | None) -> int:
    if semantics.engine == "kvoncall":
        return 64
    if semantics.engine == "tensorrt-llm":
        return 2048 if semantics.version >= (0, 13) else 256
    if semantics.engine != "vllm":
        return 256
    if not semantics.v1:
        return 256
    unified_small = gpu is not None and gpu.unified and semantics.version >= (0, 33)
    return 1024 if (_large(gpu) or _huge(gpu, semantics.version)) and not unified_small else 256


def _default_batched(semantics: Semantics, deployment: Deployment, length: int) -> int:
    if semantics.engine == "sglang":
        return chunked_prefill_size(deployment)
    if semantics.engine == "tensorrt-llm":
        return 8192
    if semantics.engine == "tgi":
        return 4096
    if semantics.engine == "kvoncall":
        return 2048
    if not semantics.v1:
        return _v0_batched(semantics, deployment, length)
    gpu = deployment.gpu
    if _huge(gpu, semantics.version):
        return 16384
    unified_small = gpu is not None and gpu.unified and semantics.version >= (0, 33)
    return 8192 if _large(gpu) and not unified_small else 2048


def _v0_batched(semantics: Semantics, deployment: Deployment, length: int) -> int:
    """Without chunked prefill a batch must hold one request of full length; long models are chunked from 0.5.4 on.

    Chunking is off on GPUs before Ampere, which have no kernel for it.
    """
    capability = deployment.gpu.compute_capability if deployment.gpu else None
    old_gpu = capability is not None and capability < (8, 0)
    if semantics.version >= (0, 5, 4) and length > 32768 and not old_gpu:
        return 512 if semantics.version < (0, 6, 5) else 2048
    return max(length, 2048)


def _default_block(semantics: Semantics, deployment: Deployment) -> int:
    if semantics.engine == "sglang" or (semantics.engine == "tgi" and semantics.version >= (2, 3)):
        return 1
    if semantics.engine == "tensorrt-llm":
        return 32 if semantics.version >= (0, 16) else 64
    if semantics.engine != "vllm":
        return 16
    if deployment.kv_cache_dtype == "ultraquant_4bit":
        return 64
    return _latent_block(semantics, deployment)


def _latent_block(semantics: Semantics, deployment: Deployment) -> int:
    """vLLM's block size by the backend that it prefers for latent attention; 16 for all other attention.

    FlashMLA takes 64. By 0.32 it is chosen for fp8 on Hopper and for sparse attention; without it, Blackwell's
    FlashInfer takes 32 and all others 16.
    """
    latents = [group for group in deployment.shape.layers if group.attention == "latent"]
    if not latents or semantics.version < (0, 8):
        return 16
    capability = deployment.gpu.compute_capability if deployment.gpu else None
    sparse = any(group.index_width for group in latents)
    if semantics.version < _LATENT_BACKENDS_SINCE or sparse or capability is None:
        return 64
    if capability[0] == 10:
        return 32
    return 64 if capability[0] == 9 and deployment.kv_cache_dtype.startswith("fp8") else 16


def _even_stages(layers: int, pp: int) -> tuple[int, ...]:
    if pp < 1 or layers < pp:
        raise ConfigError(f"--pipeline-parallel-size {pp} does not go with {layers} layers: use at most one a layer")
    return even_stages(layers, pp)
