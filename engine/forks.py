"""Forks: requests that start from the block table of another one that is running.

A choice of `n` > 1, or a beam, has its leader's tokens; it takes the leader's blocks instead of computing them again.
It needs the leader's prompt computed first, so until then it is parked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.block_pool import Block
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Fork:
    """What a child may start from: the leader's blocks that hold its first `num_tokens` computed tokens.

    The last of the blocks may hold more, or be partly filled.
    """

    leader: Request
    blocks: Sequence[Block]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Content to copy before the next forward pass: block `index` of the request's table, from `source` to `target`.

    source_row_of: the request whose open block is copied too, in formats that keep open blocks; else `None`.
    All copies of a step read before any writes, and the forward pass comes after them.
    """

    request: Request
    index: int
    source: int
    target: int
    source_row_of: Request | None = None


class ParkedForks:
    """Children whose leader has not computed its prompt yet, by leader, in the order of their arrival."""

    def __init__(self) -> None:
        self._by_leader: dict[str, list[Request]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return (child for children in self._by_leader.values() for child in children)

    def park(self, child: Request, leader: Request) -> None:
        self._by_leader.setdefault(leader.request_id, []).append(child)
        self._num_requests += 1

    def take(self, leader: Request) -> list[Request]:
        """The children of a leader, which leave."""
        children = self._by_leader.pop(leader.request_id, [])
        self._num_requests -= len(children)
        return children

    def remove(self, child: Request) -> bool:
        """Forgets one child; False when it is not here."""
        leader = child.fork_of
        siblings = self._by_leader.get(leader.request_id, []) if leader is not None else []
        if leader is None or child not in siblings:
            return False
        siblings.remove(child)
        if not siblings:
            del self._by_leader[leader.request_id]
        self._num_requests -= 1
        return True
