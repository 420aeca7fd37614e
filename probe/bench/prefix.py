"""Cost of naming and finding a prompt's blocks: hashing by algorithm, lookup, and what the kept hash list saves.

All sides take turns over the same prompt of 100,000 tokens; medians of the thread's CPU time are reported, which other
processes disturb less than wall time. vLLM's own block hashing takes part where `vllm` is installed, in this process
and by the function it calls for each block.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.block_hash import BlockHasher
from engine.cache_identity import ANONYMOUS, CacheIdentity
from engine.errors import ConfigError
from engine.flags import HASH_ALGOS
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, SamplingParams
from probe.bench import Report

NUM_TOKENS = 100_000
BLOCK_SIZE = 16
VOCABULARY = 150_000
ROUNDS = 9
TENANT = CacheIdentity((("tenant", "a"),), "a")
VLLM_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def bench_prefix(*, report: Report, num_tokens: int = NUM_TOKENS, rounds: int = ROUNDS) -> dict[str, Any]:
    """CPU milliseconds for the whole prompt, nanoseconds a block, and the ratio to vLLM's sha256 where there is one."""
    report(f"hashing and finding the blocks of {num_tokens:,} tokens, {rounds} rounds")
    tokens = random.Random(0).choices(range(VOCABULARY), k=num_tokens)
    num_blocks = num_tokens // BLOCK_SIZE
    sides, missing = _our_sides(tokens)
    vllm_sides, why_not = _vllm_sides(tokens)
    sides |= vllm_sides | _lookup_sides(tokens)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, seconds in sides.items():
            elapsed = seconds()
            if turn:  # the first round warms up
                times[name].append(elapsed)
    medians = {name: statistics.median(found) for name, found in times.items()}
    result: dict[str, Any] = {"tokens": num_tokens, "blocks": num_blocks, "block_size": BLOCK_SIZE}
    for name, median in medians.items():
        result[f"{name}_ms"] = round(median * 1e3, 3)
        if name.startswith(("hash", "vllm")):
            result[f"{name}_ns_per_block"] = round(median * 1e9 / num_blocks)
    if "vllm_sha256" in medians:
        result["vllm_sha256_to_ours"] = round(medians["vllm_sha256"] / medians["hash_sha256"], 2)
    return result | {"vllm": why_not or "compared", "not_installed": missing}


def _our_sides(tokens: Sequence[int]) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Hashing alone, with each algorithm whose packages are here; and the algorithms whose packages are not."""
    sides: dict[str, Callable[[], float]] = {}
    missing = []
    for algo in HASH_ALGOS:
        if algo == "unsafe_truncated":
            continue
        try:
            sides[f"hash_{algo}"] = _hashing(BlockHasher(BLOCK_SIZE, algo), tokens, ANONYMOUS)
        except ConfigError:
            missing.append(algo)
    sides["hash_sha256_with_namespace"] = _hashing(BlockHasher(BLOCK_SIZE), tokens, TENANT)
    return sides, missing


def _hashing(hasher: BlockHasher, tokens: Sequence[int], identity: CacheIdentity) -> Callable[[], float]:
    def seconds() -> float:
        request = Request("bench", tokens, SamplingParams(), identity=identity)
        start = time.thread_time()
        keys = hasher.keys_of(request)
        elapsed = time.thread_time() - start
        assert len(keys.hashes) == len(tokens) // BLOCK_SIZE
        return elapsed

    return seconds


def _lookup_sides(tokens: Sequence[int]) -> dict[str, Callable[[], float]]:
    """What admission of a prompt costs when all of it is cached: at first, and when it is looked up once more."""
    num_blocks = len(tokens) // BLOCK_SIZE
    manager = KVCacheManager(num_blocks + 3, BLOCK_SIZE)
    owner = Request("owner", tokens, SamplingParams())
    if not manager.allocate_slots(owner, len(tokens)):
        raise AssertionError("the pool is smaller than the prompt")
    owner.num_computed_tokens = len(tokens)
    manager.cache_computed_blocks(owner)
    last: list[Request] = []

    def first() -> float:
        last[:] = [Request("bench", tokens, SamplingParams())]
        return again()

    def again() -> float:
        start = time.thread_time()
        hits = manager.get_computed_blocks(last[0])
        elapsed = time.thread_time() - start
        assert len(hits) == (len(tokens) - 1) // BLOCK_SIZE
        return elapsed

    return {"hash_and_lookup": first, "lookup_again": again}


def _vllm_sides(tokens: Sequence[int]) -> tuple[dict[str, Callable[[], float]], str]:
    """vLLM's hashing by algorithm, and why it takes no part, if so."""
    try:
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_by_name = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name
    except ImportError as error:
        return {}, f"not compared: vllm cannot be imported ({error})"
    sides: dict[str, Callable[[], float]] = {}
    for algo in VLLM_ALGOS:
        try:
            function = hash_by_name(algo)
            utils.init_none_hash(function)
            sides[f"vllm_{algo}"] = _vllm_hashing(utils.hash_block_tokens, function, tokens)
            sides[f"vllm_{algo}"]()
        except (ImportError, ValueError):
            sides.pop(f"vllm_{algo}", None)  # not installed, or unknown to this version
    return sides, ""


def _vllm_hashing(
    hash_block_tokens: Callable[..., bytes], function: Callable[[Any], bytes], tokens: Sequence[int]
) -> Callable[[], float]:
    def seconds() -> float:
        start = time.thread_time()
        parent = None
        for first in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash_block_tokens(function, parent, tokens[first : first + BLOCK_SIZE], None)
        return time.thread_time() - start

    return seconds
