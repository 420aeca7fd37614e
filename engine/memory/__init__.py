"""The one place that knows bytes: KV cache per token, pool size, what fits. Pure Python, never torch.

`embedded` sizes the pool of the engine in this repository, exactly. `shape` describes any decoder, `deployment` any
server of it, and `plan` divides the memory of its GPUs, for vLLM, SGLang, TensorRT-LLM and TGI of any version.
"""

from engine.memory.embedded import (
    NULL_BLOCKS,
    MemoryPlan,
    bookkeeping_bytes_per_block,
    kv_bytes_per_block,
    kv_bytes_per_token,
    num_blocks_for,
    open_blocks_bytes,
    plan_kv_cache,
)

__all__ = [
    "NULL_BLOCKS",
    "MemoryPlan",
    "bookkeeping_bytes_per_block",
    "kv_bytes_per_block",
    "kv_bytes_per_token",
    "num_blocks_for",
    "open_blocks_bytes",
    "plan_kv_cache",
]
