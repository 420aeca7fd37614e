"""The rule of thumb of many articles, beside the exact figure: how many requests, and how full to run the pool."""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.capacity import ArticleEstimate, Part
from engine.memory.deployment import Deployment
from engine.memory.pages import Layout


def article_estimate(
    deployment: Deployment, layout: Layout, kv_bytes: int, parts: Sequence[Part], tokens: int, concurrency: float
) -> ArticleEstimate:
    """(GPU - weights) / (KV of one request x 1.3 to 1.5); without a GPU its KV memory stands for the difference."""
    length = deployment.max_model_len or 0
    request = deployment.tokens_per_request or length
    per_request = layout.blocks_for(request) * layout.bytes_per_block + layout.state_bytes
    free = kv_bytes
    if deployment.gpu is not None:
        free = deployment.gpu.memory_bytes - sum(part.bytes for part in parts if part.name == "weights")
    exact = concurrency
    if request != length and layout.blocks_for(request):
        exact = concurrency * layout.blocks_for(length) / layout.blocks_for(request)
    low, high = int(tokens * 0.6), int(tokens * 0.8)
    return ArticleEstimate(
        tokens_per_request=request,
        kv_bytes_per_request=per_request,
        concurrent_safety_1_3=_requests(free, per_request, 1.3),
        concurrent_safety_1_5=_requests(free, per_request, 1.5),
        exact_concurrency=exact,
        kv_tokens_at_60_percent=low,
        kv_tokens_at_80_percent=high,
        guidance=(
            f"60 to 80% KV use is {low:,} to {high:,} tokens in flight: below, memory is idle; above, a burst or "
            "longer answers preempt running requests. Cached blocks that nobody references count as free."
        ),
    )


def _requests(free: int, per_request: int, safety: float) -> int:
    return max(0, int(free / (per_request * safety))) if per_request else 0
