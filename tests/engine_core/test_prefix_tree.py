"""The prefix cache shown as a tree."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import prefix_tree
from engine.cache_identity import CacheIdentity
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams

BLOCK = 2


class Cache:
    def __init__(self) -> None:
        self.now = 0.0
        self.manager = KVCacheManager(600, BLOCK, clock=lambda: self.now)

    def serve(self, tokens: list[int], owner: str = "", namespace: str | None = None, keep: bool = False) -> Request:
        identity = CacheIdentity(() if namespace is None else (("tenant", namespace),), owner)
        request = Request("r", tokens, SamplingParams(), identity=identity)
        hits = self.manager.get_computed_blocks(request)
        self.manager.record_first_admission(request, hits)
        assert self.manager.allocate_slots(request, len(tokens) - len(hits) * BLOCK, hits)
        request.num_computed_tokens = len(tokens)
        self.manager.cache_computed_blocks(request)
        if not keep:
            self.manager.free(request)
        return request

    def tree(self) -> dict[str, Any]:
        found = self.manager.prefix_tree(bytes_per_block=100)
        assert json.loads(json.dumps(found)) == found
        return found


def test_runs_of_blocks_are_nodes_and_branches_their_children() -> None:
    cache = Cache()
    cache.serve([1, 1, 2, 2, 3, 3, 4], "a")
    cache.now = 5.0
    cache.serve([1, 1, 2, 2, 5, 5, 5], "b", keep=True)
    cache.now = 8.0
    found = cache.tree()
    shared, *branches = found["nodes"]
    assert (found["block_size"], found["num_cached_blocks"], found["bytes"], found["truncated"]) == (2, 4, 400, 0)
    assert shared == {
        "id": shared["id"], "parent": None, "depth_blocks": 0, "num_blocks": 2, "num_tokens": 4, "bytes": 200,
        "owners": ["a", "b"], "public": False, "hits": 1, "age_s": 8.0, "idle_s": 0.0, "referenced_blocks": 2,
        "copies": 0,
    }  # fmt: skip
    assert {node["parent"] for node in branches} == {shared["id"]}
    by_owner = {node["owners"][0]: node for node in branches}
    assert [by_owner[name]["idle_s"] for name in "ab"] == [8.0, 0.0]
    assert [by_owner[name]["depth_blocks"] for name in "ab"] == [2, 2]


def test_a_run_ends_where_its_owners_or_its_publicity_change() -> None:
    cache = Cache()
    cache.manager.set_public_prefixes([[1, 1]])
    cache.serve([1, 1, 2, 2, 3, 3, 4], "a", "a")
    cache.serve([1, 1, 2, 2, 9], "c", "a")  # of the same tenant
    cache.serve([1, 1, 9], "b", "b")
    nodes = cache.tree()["nodes"]
    assert [(node["owners"], node["public"], node["num_blocks"]) for node in nodes] == [
        (["a", "b", "c"], True, 1), (["a", "c"], False, 1), (["a"], False, 1)
    ]  # fmt: skip
    assert [node["parent"] for node in nodes[1:]] == [node["id"] for node in nodes[:2]]


def test_a_block_whose_parent_is_gone_is_shown_without_one_and_copies_are_counted() -> None:
    cache = Cache()
    first = Request("r", [1, 1, 2, 2, 3], SamplingParams())
    second = Request("r", [1, 1, 2, 2, 3], SamplingParams())
    for request in (first, second):  # side by side: neither finds the other's
        assert cache.manager.allocate_slots(request, 5)
        request.num_computed_tokens = 5
        cache.manager.cache_computed_blocks(request)
    (node,) = cache.tree()["nodes"]
    assert (node["num_blocks"], node["copies"], node["bytes"], node["owners"]) == (2, 2, 400, ["unnamed"])
    pool = cache.manager.block_pool
    kept = [pool.blocks[request.block_ids[1]] for request in (first, second)]
    pool.touch(kept)
    cache.manager.free(first)
    cache.manager.free(second)
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))
    (node,) = cache.tree()["nodes"]
    assert (node["parent"], node["depth_blocks"], node["num_blocks"], node["referenced_blocks"]) == (None, 1, 1, 2)


def test_only_so_many_nodes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    for number in range(5):
        cache.now = float(number)
        cache.serve([number, number, 7], f"owner-{number}")
    monkeypatch.setattr(prefix_tree, "MAX_NODES", 3)
    found = cache.tree()
    assert [node["owners"] for node in found["nodes"]] == [["owner-4"], ["owner-3"], ["owner-2"]]
    assert (found["truncated"], found["num_cached_blocks"]) == (2, 5)
