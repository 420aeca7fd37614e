"""Accounts of the prefix cache: who was served whose blocks, and what isolation costs.

Everything is booked when a request is admitted for the first time. A preempted request finds its own old blocks when
it comes back; counting that as a hit would show reuse where there is none. A request that waits for room is looked up
in every step and counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_hash import BlockKeys
from engine.block_pool import Block, BlockPool
from engine.request import Request

BREACH_KINDS = ("namespace", "adapter", "image", "weights", "tokens")
HIT_SCOPES = ("own", "shared", "public")


@dataclass(slots=True)
class PrefixCacheStats:
    """Totals over first admissions.

    queries, hits: prompt tokens of admitted requests, and those whose KV was found, as vLLM counts them.
    hits_by_scope: the hits by whose blocks they are: computed by the same owner; by another, or by somebody unnamed;
    public. hits_lost: tokens beyond the hit that requests with a namespace would have found had everybody shared.
    breaches: blocks served although they are truly another's, by kind, see `BlockIdentity.difference`. refused: hits
    that were not served because of it (`--prefix-cache-verify`), at most one a request, since a lookup ends there.
    """

    queries: int = 0
    hits: int = 0
    hits_by_scope: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(HIT_SCOPES, 0)))
    hits_lost: int = 0
    breaches: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(BREACH_KINDS, 0)))
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(BREACH_KINDS, 0)))

    def record(
        self, pool: BlockPool, request: Request, keys: BlockKeys, hits: Sequence[Block], block_size: int
    ) -> None:
        """Books the lookup of a request that is about to be admitted for the first time."""
        self.queries += request.num_prompt_tokens
        self.hits += len(hits) * block_size
        owner = request.identity.owner
        for index, block in enumerate(hits):
            cached = block.cached
            assert cached is not None
            self.hits_by_scope[_scope(cached.public, cached.owner, owner)] += block_size
            cached.use(owner)
            kind = breach_kind(block, keys, index)
            if kind is not None:
                self.breaches[kind] += 1
        num_asked_blocks = (request.num_prompt_tokens - 1) // block_size
        end = min(num_asked_blocks, len(keys.hashes))
        if len(hits) >= end:
            return
        refused = pool.get_cached_block(keys.hashes[len(hits)])
        if refused is not None:
            self.refused[breach_kind(refused, keys, len(hits)) or "tokens"] += 1
        if keys.content_hashes is not keys.hashes:
            self.hits_lost += block_size * _run_of_others(pool, keys.content_hashes[len(hits) : end])


def breach_kind(block: Block, keys: BlockKeys, index: int) -> str | None:
    """How a cached block truly differs from block `index` of a request, whose hash it has; `None`: it does not.

    Tokens are compared only if witnesses are kept.
    """
    cached = block.cached
    assert cached is not None
    assert cached.identity is not None
    own = keys.identity_of(index)
    kind = None if cached.identity is own else cached.identity.difference(own)
    if kind is None and keys.witnesses and cached.witness is not keys.witnesses[index]:
        return "tokens"
    return kind


def _scope(public: bool, computed_by: str, owner: str) -> str:
    if public:
        return "public"
    return "own" if owner and computed_by == owner else "shared"


def _run_of_others(pool: BlockPool, content_hashes: Sequence[bytes]) -> int:
    """How many of these blocks, from the first on, are cached for anybody."""
    for count, content_hash in enumerate(content_hashes):
        if all(pool.is_expired(block) for block in pool.index.blocks_with_content(content_hash)):
            return count
    return len(content_hashes)
