"""What the scheduler hands out: the work of one step, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.forks import BlockCopy
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part in one step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens)."""

    request: Request
    num_scheduled_tokens: int
    num_computed_tokens: int  # before the step
    samples: bool  # False for a chunk that does not reach the request's last token


@dataclass(slots=True)
class SchedulerOutput:
    """One step: requests with one token to compute first, then chunks; both in scheduling order.

    block_copies: content to copy between blocks before the step is computed.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State and totals since start. `kv_usage` 0..1; prefix figures in tokens; block_states in blocks.

    The last group: see `engine.prefix_audit`. Breaches and expiries are blocks, refusals requests; forks are requests
    that started from another's blocks, and fork copies the blocks copied for it.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions_total: int
    preempted_requests_total: int  # requests preempted at least once
    evictions_total: int  # cached blocks dropped for new ones: normal life of an LRU cache
    evicted_before_reuse_total: int  # blocks asked for again soon after: see record_first_admission
    prefix_queries_total: int
    prefix_hits_total: int
    block_states: dict[str, int]

    prefix_hits_by_scope: dict[str, int] = field(default_factory=dict)
    prefix_hits_lost_total: int = 0
    isolation_breaches: dict[str, int] = field(default_factory=dict)
    prefix_hits_refused: dict[str, int] = field(default_factory=dict)
    prefix_expired_total: int = 0
    cached_blocks_by_owner: dict[str, int] = field(default_factory=dict)
    forks_total: int = 0
    fork_copies_total: int = 0
    weights_version: int = 0

    @classmethod
    def of(
        cls,
        manager: KVCacheManager,
        *,
        running: int,
        waiting: int,
        preemptions_total: int,
        preempted_requests_total: int,
    ) -> SchedulerStats:
        """The scheduler's own figures, and those of its KV cache."""
        pool, prefix = manager.block_pool, manager.prefix_stats
        return cls(
            running=running,
            waiting=waiting,
            kv_usage=pool.usage,
            preemptions_total=preemptions_total,
            preempted_requests_total=preempted_requests_total,
            evictions_total=pool.evictions_total,
            evicted_before_reuse_total=manager.evicted_before_reuse_total,
            prefix_queries_total=prefix.queries,
            prefix_hits_total=prefix.hits,
            block_states=pool.block_states(),
            prefix_hits_by_scope=dict(prefix.hits_by_scope),
            prefix_hits_lost_total=prefix.hits_lost,
            isolation_breaches=dict(prefix.breaches),
            prefix_hits_refused=dict(prefix.refused),
            prefix_expired_total=pool.expired_total,
            cached_blocks_by_owner=pool.index.num_blocks_by_owner(),
            forks_total=manager.forks_total,
            fork_copies_total=manager.fork_copies_total,
            weights_version=manager.weights_version,
        )
