"""The prefix cache as a radix tree: runs of blocks that belong together, with owners, hits, ages and bytes.

A view, built when it is asked for; the cache itself is a table of hashes. It shows no text and no tokens, since
whoever can reach the debug endpoints may read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from engine.block_pool import Block
from engine.prefix_cache import MAX_USERS, CachedPrefix

MAX_NODES = 500
ID_DIGITS = 16

Copies = Mapping[bytes, Sequence[Block]]  # hash -> the blocks that have it


def prefix_tree(blocks: Sequence[Block], now: float, block_size: int, bytes_per_block: int) -> dict[str, Any]:
    """Nodes, parents before children, most recently used roots first; at most MAX_NODES, `truncated` are left out.

    A node is a run of blocks without a branch, all with the same owners. id: of its last block's hash. parent: the
    node it continues, `None` also when that is no longer cached. depth_blocks: blocks before it in the prompt.
    num_blocks, num_tokens: of the run, once. copies: further blocks with the same content; bytes counts them. owners:
    who computed or used it, at most MAX_USERS labels. public: everybody may share it. hits: of its most used block.
    age_s: since the first of it was cached; idle_s: since it was last held, 0 while `referenced_blocks` are.
    """
    copies: dict[bytes, list[Block]] = {}
    for block in blocks:
        if block.cached is not None:
            copies.setdefault(block.cached.block_hash, []).append(block)
    children: dict[bytes | None, list[bytes]] = {}
    for block_hash in copies:
        children.setdefault(_parent(copies, block_hash), []).append(block_hash)
    roots = sorted(children.get(None, []), key=lambda block_hash: _idle(copies[block_hash], now))
    waiting: deque[tuple[bytes, str | None]] = deque((block_hash, None) for block_hash in roots)
    nodes: list[dict[str, Any]] = []
    truncated = 0
    while waiting:
        first, parent = waiting.popleft()
        run = _run_from(first, copies, children)
        node_id = run[-1].hex()[:ID_DIGITS]
        waiting.extend((child, node_id) for child in children.get(run[-1], []))
        if len(nodes) == MAX_NODES:
            truncated += 1
            continue
        nodes.append({"id": node_id, "parent": parent} | _describe(run, copies, now, block_size, bytes_per_block))
    num_cached_blocks = sum(map(len, copies.values()))
    return {
        "block_size": block_size,
        "num_cached_blocks": num_cached_blocks,
        "bytes": num_cached_blocks * bytes_per_block,
        "truncated": truncated,
        "nodes": nodes,
    }


def _of(copies: Copies, block_hash: bytes) -> CachedPrefix:
    cached = copies[block_hash][0].cached
    assert cached is not None
    return cached


def _parent(copies: Copies, block_hash: bytes) -> bytes | None:
    """The block before, if it is cached. Truncated hashes collide; the depth keeps the tree free of circles."""
    cached = _of(copies, block_hash)
    parent = cached.parent_hash
    if parent is None or parent not in copies or _of(copies, parent).depth != cached.depth - 1:
        return None
    return parent


def _run_from(first: bytes, copies: Copies, children: Mapping[bytes | None, Sequence[bytes]]) -> list[bytes]:
    """`first` and what follows it, as long as nothing branches and it is the same owners'."""
    run = [first]
    kind = _owners(copies[first]), _of(copies, first).public
    while len(following := children.get(run[-1], ())) == 1:
        if (_owners(copies[following[0]]), _of(copies, following[0]).public) != kind:
            break
        run.append(following[0])
    return run


def _owners(blocks: Sequence[Block]) -> frozenset[str]:
    found = [block.cached for block in blocks if block.cached is not None]
    return frozenset(owner or "unnamed" for cached in found for owner in (cached.owner, *cached.users))


def _idle(blocks: Sequence[Block], now: float) -> float:
    """Seconds since one of these blocks was last held."""
    return min(0.0 if b.ref_cnt else now - b.cached.last_use for b in blocks if b.cached is not None)


def _describe(
    run: Sequence[bytes], copies: Copies, now: float, block_size: int, bytes_per_block: int
) -> dict[str, Any]:
    blocks = [block for block_hash in run for block in copies[block_hash]]
    cached = [block.cached for block in blocks if block.cached is not None]
    return {
        "depth_blocks": cached[0].depth,
        "num_blocks": len(run),
        "num_tokens": len(run) * block_size,
        "bytes": len(blocks) * bytes_per_block,
        "owners": sorted(_owners(copies[run[0]]))[:MAX_USERS],
        "public": cached[0].public,
        "hits": max(one.hits for one in cached),
        "age_s": round(max(now - one.cached_at for one in cached), 3),
        "idle_s": round(_idle(blocks, now), 3),
        "referenced_blocks": sum(block.ref_cnt > 0 for block in blocks),
        "copies": len(blocks) - len(run),
    }
