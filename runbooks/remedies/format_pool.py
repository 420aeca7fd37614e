"""What the KV pool holds once its format has changed: the same bytes, another number of tokens.

The embedded engine's own planner says it exactly. Another engine's pool is taken to keep its bytes, unless its number
of blocks is set by hand: then the tokens stay and the bytes change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import ConfigError, EngineConfig, apply_changes
from engine.memory import plan_kv_cache
from runbooks.facts import TargetFacts
from runbooks.flags import EMBEDDED
from runbooks.quality_candidates import is_set
from runbooks.remedies.pool import BLOCKS_OVERRIDE, requests_held, size, wanted_tokens


@dataclass(frozen=True)
class PoolAfter:
    """Tokens of the pool, None when they cannot be computed; `problem`: why the engine would not start so."""

    tokens: int | None
    problem: str | None = None


def pool_after(facts: TargetFacts, flags: Mapping[str, Any], bytes_per_token: int | None) -> PoolAfter:
    """The pool after `flags` are set, with `bytes_per_token` of K and V over all layers."""
    weights, peak, device = facts.weights_bytes, facts.activation_peak_bytes, facts.device_memory_bytes
    if facts.engine == EMBEDDED and facts.dims and weights is not None and peak is not None and device is not None:
        values = {flag: value for flag, value in {**facts.flags, **flags}.items() if is_set(value)}
        try:
            plan = plan_kv_cache(
                EngineConfig.from_args(apply_changes([], values)),
                facts.dims,
                weights_bytes=weights,
                activation_peak_bytes=peak,
                device_memory_bytes=device,
                bookkeeping_bytes_per_block=(facts.bookkeeping_bytes or 0) // (facts.num_gpu_blocks or 1),
            )
        except ConfigError as error:
            return PoolAfter(None, str(error))
        return PoolAfter(plan.kv_cache_size_tokens)
    tokens, before = facts.kv_cache_size_tokens, facts.kv_bytes_per_token
    if tokens is None or before is None or bytes_per_token is None:
        return PoolAfter(None)
    if facts.flags.get(BLOCKS_OVERRIDE) is None:
        tokens = tokens * before // bytes_per_token
        tokens -= tokens % (facts.block_size or 1)
    if facts.max_model_len is not None and tokens < facts.max_model_len:
        return PoolAfter(tokens, f"a pool of {tokens} tokens does not hold one request of {facts.max_model_len}")
    return PoolAfter(tokens)


def cost_in_words(facts: TargetFacts, bytes_before: int | None, bytes_after: int | None, pool: PoolAfter) -> str:
    """Bytes and tokens before and after, and the storm that would follow where the pool gets too small for the peak."""
    parts = ["the prefix cache starts empty"]
    if bytes_before is not None and bytes_after is not None:
        parts.insert(0, f"{bytes_after} bytes per token in place of {bytes_before}")
    now, then = facts.kv_cache_size_tokens, pool.tokens
    if now is not None and then is not None:
        parts.insert(1, f"the pool holds {then} tokens in place of {now} ({then / now:.2f}x)")
        if facts.flags.get(BLOCKS_OVERRIDE) is not None and bytes_after is not None:
            parts.append(f"{BLOCKS_OVERRIDE} keeps the number of blocks, so the pool takes {size(then * bytes_after)}")
    if warning := storm_warning(facts, then):
        parts.append(warning)
    return "; ".join(parts)


def storm_warning(facts: TargetFacts, pool_tokens: int | None) -> str | None:
    """Why the alert `eviction-storm` would follow: the peak that was seen wants more than the pool then holds."""
    wanted, (need, _) = wanted_tokens(facts), facts.request_tokens
    if facts.traffic.peak_demand is None or wanted is None or need is None or pool_tokens is None:
        return None
    if wanted <= pool_tokens:
        return None
    held = requests_held(pool_tokens, need, facts.block_size)
    return (
        f"the requests wanted {wanted} tokens at once at the peak, so expect `eviction-storm` unless --max-num-seqs "
        f"goes to {held}"
    )
