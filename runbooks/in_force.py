"""The value a flag has on a target now: set, measured, or the default of its engine and version.

Several of vLLM's defaults are not in its parser: they depend on the GPU and the version (`EngineArgs` resolves them).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from runbooks.engine_names import VLLM, vllm_flag
from runbooks.facts import TargetFacts
from runbooks.flags import default_of, version_key

GIB = 1024**3
_LARGE_GPU, _LARGEST_GPU = 70 * GIB, 160 * GIB
_MEASURED = {
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len",
    "--block-size": "block_size",
    "--tensor-parallel-size": "tp",
    "--pipeline-parallel-size": "pp",
}


@dataclass(frozen=True)
class InForce:
    """A flag's value, and how that is known. value None: unset without a default, or unknown."""

    value: Any
    how: Literal["set", "measured", "default", "unknown"]


def value_in_force(facts: TargetFacts, flag: str) -> InForce:
    """What the flag amounts to on this target; a flag nobody named counts as unset."""
    if facts.flags.get(flag) is not None:
        return InForce(facts.flags[flag], "set")
    measured = _MEASURED.get(vllm_flag(facts.engine, flag))
    if measured is not None and (value := getattr(facts, measured)) is not None:
        return InForce(value, "measured")
    default = effective_default(facts, flag)
    return InForce(default, "default" if default is not None else "unknown")


def effective_default(facts: TargetFacts, flag: str) -> Any:
    """The default of a flag for this engine, version and GPU; None: unset, or it cannot be told."""
    if facts.engine == VLLM and facts.version is not None:
        if flag == "--max-num-seqs":
            return _batch_default(facts, seqs=True)
        if flag == "--max-num-batched-tokens":
            return _batch_default(facts, seqs=False)
    return _catalog_default(facts.engine, facts.version, flag)


@functools.cache
def _catalog_default(engine: str, version: str | None, flag: str) -> Any:
    return default_of(engine, version, flag)


def _batch_default(facts: TargetFacts, *, seqs: bool) -> int | None:
    """--max-num-seqs and --max-num-batched-tokens of `vllm serve`, by version and the GPU's memory."""
    memory, version = facts.device_memory_bytes, version_key(facts.version or "")
    if version < (0, 8):
        return 256 if seqs else None
    if memory is None:
        return None
    name = facts.gpu.name.lower() if facts.gpu is not None else None
    if name is None and version >= (0, 9) and _LARGE_GPU <= memory < _LARGEST_GPU:
        return None  # an A100 counts as small since 0.9.0, and nothing says which GPU it is
    large = memory >= _LARGE_GPU and not (version >= (0, 9) and "a100" in (name or ""))
    if seqs:
        return 1024 if large else 256
    if memory >= _LARGEST_GPU and version >= (0, 28):
        return 16_384
    return 8192 if large else 2048
