"""What a GPU and an attention backend can do with a KV cache: the formats of `--kv-cache-dtype` and sizes of blocks.

Rules are those of the engines' own checks (vLLM's attention backends and `platforms/cuda.py`, SGLang's server
arguments) and of vllm#26431 and vllm#8409. What is not known of a device answers nothing: advice then stays silent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from runbooks.flags import version_key

Capability = tuple[int, int]

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
E4M3_NAMES = ("fp8", "fp8_e4m3", "fp8_e4m3fn")
E5M2 = "fp8_e5m2"
MLA_ONLY = ("fp8_ds_mla", "nvfp4_ds_mla")
_FLASHINFER_FP8_SINCE = "0.10.2"  # vllm#24577: stored as fp8 on Ampere, computed in 16 bits
_SPARSE_E4M3 = "keeps 8-bit latents and needs FlashMLA's kernels, from compute capability 9.0 on"


@dataclass(frozen=True)
class _Need:
    """The least compute capability of a format, the only major version (where it is one), and why."""

    least: Capability
    why: str
    family: tuple[int, ...] = ()


_BLACKWELL_FP4 = "4-bit floats with a scale for every 16 values are a Blackwell data type"
_NEEDS: dict[str, _Need] = {
    "nvfp4": _Need(BLACKWELL, _BLACKWELL_FP4, (10,)),
    "nvfp4_4over6": _Need(BLACKWELL, _BLACKWELL_FP4, (10,)),
    "nvfp4_ds_mla": _Need(BLACKWELL, _BLACKWELL_FP4, (10,)),
    "fp4_e2m1": _Need(BLACKWELL, "4-bit floats are a Blackwell data type"),
    "fp4_mx_block16": _Need(BLACKWELL, "4-bit floats with block scales are a Blackwell data type"),
    "mxfp8": _Need(BLACKWELL, "8-bit floats with block scales are a Blackwell data type"),
    "ultraquant_4bit": _Need(BLACKWELL, "4-bit floats with a scale for every 32 values are a Blackwell data type"),
    "fp8_ds_mla": _Need(HOPPER, _SPARSE_E4M3),
    "fp8_per_token_head": _Need(ADA, "e4m3 in Triton's kernels needs 8.9 (Ada) or later"),
    "turboquant_k8v4": _Need(ADA, "its keys are e4m3, which Triton's kernels compile for 8.9 (Ada) or later"),
    **dict.fromkeys(
        ("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        _Need(AMPERE, "its kernels are built for 8.0 (Ampere) or later"),
    ),
    **dict.fromkeys(
        ("octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "int4_per_token_head", "int8_per_token_head"),
        _Need((7, 5), "its kernels are Triton's, which no longer serve Volta"),
    ),
}

# Formats that only the Triton kernels of vLLM read.
_TRITON_ONLY = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "turboquant_", "octave_")

# (multiple, largest) of the block sizes a backend's kernels take.
_BLOCKS: dict[str, tuple[int, int | None]] = {
    "flash": (16, None),
    "triton": (16, None),
    "flashinfer": (16, 64),
    "flashmla": (64, 64),
    "cutlass_mla": (128, 128),
}
_XFORMERS_LARGEST = 32  # vLLM's V0 engine on CUDA takes no larger block


def capability_of(value: Any) -> Capability | None:
    """(major, minor) of "8.6", "sm_86", 86, 8.6 or a pair; None where it is not said or cannot be read."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return (int(value[0]), int(value[1])) if len(value) == 2 else None
    text = str(value).lower().removeprefix("sm").lstrip("_")
    if match := re.fullmatch(r"(\d+)\.(\d+)", text):
        return int(match[1]), int(match[2])
    if match := re.fullmatch(r"(\d+)(\d)[a-z]?", text):
        return int(match[1]), int(match[2])
    return None


def why_not_on(
    gpu_sm: Any,
    value: Any,
    *,
    checkpoint_quantization: str | None = None,
    attention_backend: str | None = None,
    engine: str = "vllm",
    version: str | None = None,
    mla: bool | None = None,
) -> str | None:
    """Why this `--kv-cache-dtype` cannot run on such a GPU with such a checkpoint; None: nothing is known against it.

    gpu_sm: compute capability as `capability_of` reads it, None where the device is unknown or another vendor's.
    mla: whether the model has multi-head latent attention, None where it is not known.
    """
    name = str(value)
    sm, backend = capability_of(gpu_sm), (attention_backend or "").lower()
    if name in MLA_ONLY and mla is False:
        return f"{name} is a layout of latents: it exists for models with multi-head latent attention only"
    if name == "fp8_inc" and sm is not None:
        return "fp8_inc is for Intel Gaudi; this is an NVIDIA GPU"
    if name == E5M2:
        return _why_not_e5m2(sm, checkpoint_quantization, backend, engine, mla)
    if engine == "vllm" and name.startswith(_TRITON_ONLY) and (problem := _why_not_triton(name, backend, mla)):
        return problem
    if sm is None:
        return None
    if name in E4M3_NAMES:
        return _why_not_e4m3(sm, backend, engine, version)
    need = _NEEDS.get(name)
    if need is None:
        return None
    if sm < need.least or (engine == "vllm" and need.family and sm[0] not in need.family):
        return f"{name} does not run on compute capability {_dotted(sm)}: {need.why} ({_dotted(need.least)})"
    return None


def storage_only(gpu_sm: Any, value: Any) -> bool:
    """Whether the GPU keeps this format but cannot compute in it: half the bytes, no faster arithmetic."""
    sm = capability_of(gpu_sm)
    return sm is not None and sm < ADA and (str(value) in E4M3_NAMES or str(value) == E5M2)


def nearest_working(
    gpu_sm: Any,
    values: tuple[str, ...] | list[str],
    *,
    checkpoint_quantization: str | None = None,
    attention_backend: str | None = None,
    engine: str = "vllm",
    version: str | None = None,
    mla: bool | None = None,
) -> str | None:
    """The first of `values` that nothing speaks against; None: none of them runs."""
    for value in values:
        problem = why_not_on(
            gpu_sm,
            value,
            checkpoint_quantization=checkpoint_quantization,
            attention_backend=attention_backend,
            engine=engine,
            version=version,
            mla=mla,
        )
        if problem is None:
            return value
    return None


def why_not_block_size(
    size: int,
    *,
    attention_backend: str | None = None,
    engine: str = "vllm",
    version: str | None = None,
    gpu_sm: Any = None,
) -> str | None:
    """Why the kernels of a backend take no block of `size` tokens; None: nothing is known against it.

    What the parser of a version refuses is the catalog's matter.
    """
    if size < 1:
        return f"a block holds at least one token, not {size}"
    if engine != "vllm":
        return None
    if gpu_sm is not None and version is not None and version_key(version) < (0, 8) and size > _XFORMERS_LARGEST:
        return f"vLLM {version} takes blocks of at most {_XFORMERS_LARGEST} tokens on CUDA"
    name = (attention_backend or "").lower()
    key = next((k for k in ("cutlass_mla", "flashmla", "flashinfer", "triton", "flash") if k in name), None)
    if key is None:
        return None
    multiple, largest = _BLOCKS[key]
    if size % multiple or (largest is not None and size > largest):
        takes = (
            f"{largest}" if multiple == largest else f"multiples of {multiple}" + (f" to {largest}" if largest else "")
        )
        return f"blocks of {size} tokens do not go with the {attention_backend} backend, which takes {takes}"
    return None


def is_fp8(checkpoint_quantization: str | None) -> bool:
    """Whether the weights are 8-bit floats."""
    return checkpoint_quantization is not None and "fp8" in checkpoint_quantization.lower()


def _why_not_e4m3(sm: Capability, backend: str, engine: str, version: str | None) -> str | None:
    if sm >= ADA:
        return None
    if engine == "vllm" and sm >= AMPERE and "flashinfer" in backend:
        if version is None or version_key(version) >= version_key(_FLASHINFER_FP8_SINCE):
            return None
        return (
            f"vLLM {version} computes e4m3 from 8.9 (Ada) on; FlashInfer stores it on Ampere since "
            f"{_FLASHINFER_FP8_SINCE}"
        )
    offer = "fp8_e5m2 is kept there as storage, unless the checkpoint is fp8" if sm >= AMPERE else "use auto"
    return (
        f"e4m3 needs compute capability 8.9 (Ada) or later on the Triton and FlashAttention paths; this GPU has "
        f"{_dotted(sm)}: {offer}"
    )


def _why_not_e5m2(
    sm: Capability | None, checkpoint: str | None, backend: str, engine: str, mla: bool | None
) -> str | None:
    if is_fp8(checkpoint):
        return f"fp8_e5m2 is refused with an fp8 checkpoint (it is {checkpoint}): use fp8_e4m3, or auto"
    if sm is not None and sm < AMPERE:
        return f"e5m2 is stored from compute capability 8.0 (Ampere) on; this GPU has {_dotted(sm)}: use auto"
    if engine == "vllm" and "flash_attn" in backend:
        return "FlashAttention takes no e5m2: choose FlashInfer or Triton, or fp8_e4m3 on 8.9 and later"
    if engine == "vllm" and mla:
        return "MLA backends keep latents in 16 bits or e4m3, not in e5m2"
    return None


def _why_not_triton(name: str, backend: str, mla: bool | None) -> str | None:
    if "flash" in backend or "cutlass" in backend:
        return f"{name} is read by vLLM's Triton kernels, and the {backend.upper()} backend is chosen"
    return f"{name} keeps keys and values of heads; this model keeps latents" if mla else None


def _dotted(sm: Capability) -> str:
    return f"{sm[0]}.{sm[1]}"
