"""SGLang's automatic sizes: chunked prefill, the largest batch with a CUDA graph, and `mem_fraction_static`.

The fraction is (GPU - reserve) / GPU; the reserve is a rule of thumb for activations and graphs, in MiB, by version.
"""

from __future__ import annotations

from engine.memory.deployment import Deployment

_MIB = 1 << 20
_RESERVE_SINCE = (0, 4, 8)  # before, a constant by tensor-parallel size
_DP_CHUNK_SINCE = (0, 5, 15)  # before, data-parallel attention reserved for the undivided chunk
_PREFILL_GRAPHS_SINCE = (0, 5, 10)
_TIERS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_CONSTANT = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


def _memory_mib(deployment: Deployment) -> float | None:
    return deployment.gpu.memory_bytes / _MIB if deployment.gpu else None


def _tier(deployment: Deployment) -> tuple[int, int]:
    """(chunked prefill size, largest graph batch) by the GPU's memory."""
    memory = _memory_mib(deployment)
    if memory is None:
        return 4096, 160
    for gib, chunk, graphs, graphs_tp4 in _TIERS:
        if memory < gib * 1024:
            return chunk, graphs_tp4 if deployment.tp >= 4 else graphs
    return 16384, 512


def chunked_prefill_size(deployment: Deployment) -> int:
    """The default of --chunked-prefill-size."""
    return _tier(deployment)[0]


def max_graph_batch(deployment: Deployment) -> int:
    """The default of --cuda-graph-max-bs."""
    return _tier(deployment)[1]


def reserve_mib(deployment: Deployment, version: tuple[int, ...]) -> float:
    """What the automatic fraction leaves for activations and graphs. `max_num_batched_tokens` is set already."""
    chunk = deployment.max_num_batched_tokens or chunked_prefill_size(deployment)
    attention_dp = deployment.dp if deployment.enable_dp_attention else 1
    if attention_dp > 1 and version >= _DP_CHUNK_SINCE:
        chunk = -(-chunk // attention_dp)
    graphs = max_graph_batch(deployment)
    reserve = 512 + max(chunk, 2048) * 1.5 + deployment.tp * deployment.pp / 8 * 1024
    if not deployment.enforce_eager:
        reserve += graphs * 2
    if attention_dp > 1:
        reserve += graphs * attention_dp * (4.5 if graphs > 300 else 3)
    if deployment.num_speculative_tokens:
        reserve += 2048
    if version >= _PREFILL_GRAPHS_SINCE and any(group.attention == "latent" for group in deployment.shape.layers):
        reserve += 1536
    memory = _memory_mib(deployment)
    return max(reserve, 10 * 1024) if memory is not None and memory > 60 * 1024 else reserve


def mem_fraction_static(deployment: Deployment, version: tuple[int, ...]) -> float:
    """The automatic value of --mem-fraction-static, never below 0.05."""
    memory = _memory_mib(deployment)
    if memory is None:
        return 0.88
    if version < _RESERVE_SINCE:
        return next(fraction for tp, fraction in _CONSTANT if deployment.tp >= tp)
    return max(0.05, round((memory - reserve_mib(deployment, version)) / memory, 3))
