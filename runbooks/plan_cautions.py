"""What the arithmetic of a plan cannot tell: formats and blocks that the GPU, the checkpoint or the version refuse."""

from __future__ import annotations

from engine.memory.deployment import Deployment
from runbooks.flags import why_value_absent
from runbooks.hardware import why_not_block_size, why_not_on

KV_DTYPE, BLOCK_SIZE = "--kv-cache-dtype", "--block-size"
_VLLMS_OWN_BACKEND = "flash_attn"  # on CUDA, where none was chosen


def cautions(deployment: Deployment) -> tuple[str, ...]:
    """Why a server does not run as planned, a sentence a reason; empty where nothing is known against it.

    deployment: as given; what it leaves to the engine's defaults is not judged.
    """
    engine, version = deployment.engine, deployment.version
    capability = deployment.gpu.compute_capability if deployment.gpu else None
    found: list[str | None] = []
    if deployment.kv_cache_dtype != "auto":
        found.append(why_value_absent(engine, version, KV_DTYPE, deployment.kv_cache_dtype))
        found.append(
            why_not_on(
                capability,
                deployment.kv_cache_dtype,
                checkpoint_quantization=deployment.shape.quantization,
                engine=engine,
                version=version,
                mla=any(group.attention == "latent" for group in deployment.shape.layers),
            )
        )
    if deployment.block_size is not None and engine == "vllm":
        found.append(why_value_absent(engine, version, BLOCK_SIZE, deployment.block_size))
        backend = _VLLMS_OWN_BACKEND if capability is not None else None
        found.append(
            why_not_block_size(
                deployment.block_size, attention_backend=backend, engine=engine, version=version, gpu_sm=capability
            )
        )
    return tuple(dict.fromkeys(reason for reason in found if reason is not None))
