"""Names of full KV blocks, and what the prefix cache remembers about itself.

A block's hash covers its own tokens, the hash of the block before it and its extra keys, so equal hashes mean
equal prefixes: the KV of a token depends on every token before it. The hash is SHA-256 over a canonical binary
encoding, the same on every machine and in every process, and collisions are out of reach for a tenant who
looks for one. A request's cache salt enters its first block only; the chain carries it to all the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from engine.request import Request

ROOT_HASH = sha256(b"kvoncall/kv-block/1").digest()  # stands in for the parent of a first block

ExtraKeys = Sequence[tuple[str, str]]


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> bytes:
    """The 32-byte name of a full block.

    Args: `parent`, the hash of the block before it, or `None` for a first block; `token_ids`, its tokens, each
    below 2**32; `extra_keys`, tagged pairs such as `("cache_salt", salt)`.

    Encoding, little-endian: parent (32 bytes) | number of tokens (u32) | tokens (u32 each) | for each extra key:
    length of the tag (u32), tag (UTF-8), length of the value (u32), value (UTF-8). All parts have a fixed or a
    stated length, so two different inputs never encode alike. Raises `ValueError` on a token that does not fit.
    """
    count = len(token_ids)
    try:
        data = (parent or ROOT_HASH) + struct.pack(f"<{count + 1}I", count, *token_ids)
    except struct.error as error:
        raise ValueError(f"a token id does not fit in 32 bits: {error}") from None
    for tag, value in extra_keys:
        for text in (tag, value):
            encoded = text.encode("utf-8", "surrogatepass")  # keeps the encoding one-to-one for any str
            data += struct.pack("<I", len(encoded)) + encoded
    return sha256(data).digest()


def request_block_hashes(request: Request, block_size: int) -> list[bytes]:
    """The hashes of all full blocks of a request's tokens so far.

    Extends `request.block_hashes` in place by the blocks that filled up since the last call and returns it;
    a hash is computed once in the life of a request, preemptions included.
    """
    hashes = request.block_hashes
    token_ids = request.all_token_ids
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else None
        extra_keys = request.identity.namespace if start == 0 else ()
        hashes.append(hash_block(parent, token_ids[start : start + block_size], extra_keys))
    return hashes


@dataclass(slots=True)
class PrefixCacheStats:
    """Totals in tokens, as vLLM counts them, over first admissions only.

    A preempted request finds its own old blocks when it comes back; counting that as a hit would show reuse
    where there is none. A request that waits for room is looked up in every step and counted once.
    """

    queries: int = 0  # prompt tokens of admitted requests
    hits: int = 0  # of these, tokens whose KV was found


class RecentEvictions:
    """The hashes of the last `capacity` evicted blocks that have not come back since.

    With `capacity` equal to the pool's blocks, a hash found here would most likely still be cached in a pool of
    twice the size. Taking a hash out counts it once: one eviction is never reported twice.
    """

    __slots__ = ("_hashes", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hashes: dict[bytes, None] = {}  # a dict keeps insertion order

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, block_hash: bytes) -> None:
        """Remembers `block_hash` as the most recent eviction and forgets the oldest one beyond the capacity."""
        self._hashes.pop(block_hash, None)
        self._hashes[block_hash] = None
        if len(self._hashes) > self.capacity:
            del self._hashes[next(iter(self._hashes))]

    def discard(self, block_hash: bytes) -> None:
        """Forgets `block_hash`: its block was computed again."""
        self._hashes.pop(block_hash, None)

    def take(self, block_hashes: Iterable[bytes]) -> int:
        """Forgets those of `block_hashes` that are remembered and returns how many they were."""
        before = len(self._hashes)
        for block_hash in block_hashes:
            self._hashes.pop(block_hash, None)
        return before - len(self._hashes)

    def clear(self) -> None:
        self._hashes.clear()
