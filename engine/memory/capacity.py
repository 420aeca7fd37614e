"""What a plan says: the division of one GPU's memory, the pool that results, and what decides."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from engine.memory.deployment import Deployment
from engine.memory.offload import OffloadPlan

GIB = 1 << 30
Verdict = Literal["fits", "at_risk", "does_not_fit"]


@dataclass(frozen=True)
class Part:
    """One part of a GPU's memory. inside_budget: whether utilization pays for it. how: the arithmetic in words."""

    name: str
    bytes: int
    inside_budget: bool
    how: str


@dataclass(frozen=True)
class ArticleEstimate:
    """Concurrency by the rule of thumb (GPU - weights) / (KV of one request x safety), beside the exact figure.

    tokens_per_request: what was taken as one request. guidance: what 60 to 80% KV use means for this pool.
    """

    tokens_per_request: int
    kv_bytes_per_request: int
    concurrent_safety_1_3: int
    concurrent_safety_1_5: int
    exact_concurrency: float
    kv_tokens_at_60_percent: int
    kv_tokens_at_80_percent: int
    guidance: str


@dataclass(frozen=True)
class CapacityPlan:
    """Memory of one GPU of a deployment, with every default filled in. Sizes in bytes, per GPU.

    parts add up to the GPU's memory (empty when the KV memory was stated and no GPU was). kv_cache_bytes may be
    negative: then it is what is missing before a first block. kv_bytes_per_token: per rank of the stage that decides,
    None where no layer grows with the context. kv_tokens: as the engine's log prints it. kv_blocks: as the log
    prints it, vLLM's null block included. max_concurrency: requests of max_model_len at once. largest_model_len:
    longest request that fits. needed_bytes: KV of one request of max_model_len. margin_bytes: KV memory beyond what
    that request needs, the null block included. needed_utilization: what would make it fit, None if nothing up to 1.
    offload: the host tier that the deployment's flags ask for.
    """

    deployment: Deployment
    parts: tuple[Part, ...]
    gpu_memory_utilization: float | None
    budget_bytes: int | None
    kv_cache_bytes: int
    kv_bytes_per_token: int | None
    kv_fixed_bytes_per_request: int
    kv_bytes_per_block: int
    block_size: int
    kv_blocks: int
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_concurrency: float
    largest_model_len: int
    needed_bytes: int
    needed_utilization: float | None
    verdict: Verdict
    fits: bool
    margin_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    articles: ArticleEstimate
    offload: OffloadPlan | None = None

    def part(self, name: str) -> int:
        """Bytes of all parts of that name; 0 when there is none."""
        return sum(part.bytes for part in self.parts if part.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with kv_bytes_per_token, kv_tokens, kv_blocks, max_concurrency, fits on top level."""
        data = dataclasses.asdict(self)
        data["model"] = self.deployment.shape.name
        return data
