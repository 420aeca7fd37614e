"""What the prefix cache knows of cached blocks: their names, who computed and used them, which were dropped lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.block_hash import BlockIdentity, BlockKeys, Witness
from engine.request import Request

if TYPE_CHECKING:
    from engine.block_pool import Block

MAX_USERS = 8  # owners remembered of one block
MAX_OWNERS = 20  # owners shown by name


@dataclass(slots=True)
class CachedPrefix:
    """What is known of a cached block's content: the last block of a prefix of `depth` + 1 blocks.

    content_hash: its hash had everybody shared, see `engine.block_hash`. identity: whose it truly is, and witness what
    it truly stands for, if tokens are compared. owner: the label of who computed it; users: of who else used it,
    at most MAX_USERS. public: everybody may share it. Times are seconds of the pool's clock; last_use is when its last
    holder gave it back.
    """

    block_hash: bytes
    parent_hash: bytes | None = None
    content_hash: bytes = b""
    depth: int = 0
    identity: BlockIdentity | None = None
    witness: Witness | None = None
    owner: str = ""
    public: bool = False
    cached_at: float = 0.0
    last_use: float = 0.0
    hits: int = 0
    users: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Request, keys: BlockKeys, index: int, now: float) -> CachedPrefix:
        """Of block `index` of a request, as it becomes full and computed."""
        return cls(
            keys.hashes[index],
            keys.hashes[index - 1] if index else None,
            keys.content_hashes[index],
            index,
            keys.identity_of(index),
            keys.witnesses[index] if keys.witnesses else None,
            request.identity.owner,
            index < keys.num_public_blocks,
            now,
            now,
        )

    def use(self, owner: str) -> None:
        """Books a hit by a request of this owner."""
        self.hits += 1
        if owner != self.owner and owner not in self.users and len(self.users) < MAX_USERS - 1:
            self.users = (*self.users, owner)


class _Table:
    """Hash -> the blocks that have it, oldest first.

    Nearly always it is one block, which is kept without a list around it: lists would be a tenth of the bookkeeping.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[bytes, Block | list[Block]] = {}

    def first(self, name: bytes) -> Block | None:
        """The oldest block of this name."""
        found = self._found.get(name)
        return found[0] if isinstance(found, list) else found

    def get(self, name: bytes) -> Sequence[Block]:
        found = self._found.get(name)
        if found is None:
            return ()
        return found if isinstance(found, list) else (found,)

    def add(self, name: bytes, block: Block) -> None:
        found = self._found.setdefault(name, block)
        if found is not block:
            self._found[name] = [*found, block] if isinstance(found, list) else [found, block]

    def remove(self, name: bytes, block: Block) -> None:
        found = self._found[name]
        if isinstance(found, list):
            left = [other for other in found if other is not block]
            self._found[name] = left if len(left) > 1 else left[0]
        else:
            del self._found[name]

    def clear(self) -> None:
        self._found.clear()


class PrefixIndex:
    """Cached blocks by hash and by content, and how many each owner has.

    Blocks with equal content may coexist: when two requests compute the same prefix side by side, both copies
    are indexed, because block tables only ever grow at the end and neither request can swap its copy.
    """

    __slots__ = ("_by_content", "_by_hash", "_num_blocks_of")

    def __init__(self) -> None:
        self._by_hash = _Table()
        self._by_content = _Table()  # of blocks whose hash is not already that of their content
        self._num_blocks_of: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(self._num_blocks_of.values())

    def first(self, block_hash: bytes) -> Block | None:
        """The oldest block of this name."""
        return self._by_hash.first(block_hash)

    def copies(self, block_hash: bytes) -> Sequence[Block]:
        """The blocks of this name, oldest first."""
        return self._by_hash.get(block_hash)

    def blocks_with_content(self, content_hash: bytes) -> list[Block]:
        """The blocks, in whatever namespace, that hold this content."""
        return [*self._by_hash.get(content_hash), *self._by_content.get(content_hash)]

    def add(self, block: Block, cached: CachedPrefix) -> None:
        self._by_hash.add(cached.block_hash, block)
        if cached.content_hash and cached.content_hash != cached.block_hash:
            self._by_content.add(cached.content_hash, block)
        self._num_blocks_of[cached.owner] = self._num_blocks_of.get(cached.owner, 0) + 1

    def remove(self, block: Block, cached: CachedPrefix) -> None:
        self._by_hash.remove(cached.block_hash, block)
        if cached.content_hash and cached.content_hash != cached.block_hash:
            self._by_content.remove(cached.content_hash, block)
        left = self._num_blocks_of[cached.owner] - 1
        if left:
            self._num_blocks_of[cached.owner] = left
        else:
            del self._num_blocks_of[cached.owner]

    def clear(self) -> None:
        self._by_hash.clear()
        self._by_content.clear()
        self._num_blocks_of.clear()

    def num_blocks_by_owner(self) -> dict[str, int]:
        """Cached blocks of the MAX_OWNERS owners that have most; "other" is the rest, "unnamed" has no label."""
        counts = dict(self._num_blocks_of)
        named = {"unnamed": unnamed} if (unnamed := counts.pop("", 0)) else {}
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        named.update(ranked[:MAX_OWNERS])
        if len(ranked) > MAX_OWNERS:
            named["other"] = sum(count for _, count in ranked[MAX_OWNERS:])
        return named


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
