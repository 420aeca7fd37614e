"""Which flags void or forbid a change of another: a pool sized by hand, a step too small, heads that do not divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runbooks.engine_names import SGLANG, VLLM, flag_for, vllm_flag
from runbooks.facts import TargetFacts
from runbooks.flags import version_key
from runbooks.in_force import value_in_force

UTILIZATION = "--gpu-memory-utilization"
EXPLICIT_POOL = "--kv-cache-memory-bytes"
BLOCKS_OVERRIDE = "--num-gpu-blocks-override"
CHUNKED = "--enable-chunked-prefill"
STEP, SEQS, LENGTH = "--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"
THRESHOLD = "--long-prefill-token-threshold"
OFFLOAD, CONNECTOR = "--kv-offloading-size", "--kv-transfer-config"


def why_contradicts(facts: TargetFacts, flag: str, to: Any, flags: Mapping[str, Any]) -> str | None:
    """Why another flag makes this change void or impossible; `flags` are those in force after the changes before it."""
    after = replace(facts, flags={**flags})
    name = vllm_flag(facts.engine, flag)
    return (
        _why_void(name, to, flags)
        or _why_step_and_seqs(after, name, to)
        or _why_not_chunked(after, name, to)
        or _why_heads_do_not_divide(facts, name, to)
        or _why_not_with(facts, flag, to, flags)
    )


def _why_void(name: str, to: Any, flags: Mapping[str, Any]) -> str | None:
    """A pool sized by hand is not sized by utilization; a number of blocks wins over a number of bytes."""
    if to is None:
        return None
    for hand in (BLOCKS_OVERRIDE, EXPLICIT_POOL):
        if flags.get(hand) is not None and name in (UTILIZATION, EXPLICIT_POOL) and name != hand:
            return f"will not help: {hand} is set, which replaces the sizing by {name}"
    return None


def _why_step_and_seqs(after: TargetFacts, name: str, to: Any) -> str | None:
    """Every running sequence takes a token of a step, so a step holds at least as many tokens as sequences."""
    if not isinstance(to, int) or isinstance(to, bool) or after.engine == SGLANG:
        return None
    if name == STEP:
        seqs = value_in_force(after, flag_for(after.engine, SEQS)).value
        if isinstance(seqs, int) and to < seqs:
            return f"{STEP} {to} is below {SEQS} {seqs}: running sequences could not all decode in one step"
    if name == SEQS:
        step = value_in_force(after, flag_for(after.engine, STEP)).value
        if isinstance(step, int) and to > step:
            return f"{SEQS} {to} is above {STEP} {step}: they could not all decode in one step"
    return None


def _why_not_chunked(after: TargetFacts, name: str, to: Any) -> str | None:
    """Without chunked prefill a prompt is computed in one step."""
    if after.flags.get(CHUNKED) is not False:
        return None
    if name == THRESHOLD and to:
        return f"{THRESHOLD} says how a prompt is cut, and {CHUNKED} is off"
    longest = value_in_force(after, LENGTH).value
    if name == STEP and isinstance(to, int) and isinstance(longest, int) and to < longest:
        return f"not without chunked prefill: a prompt of up to {longest} tokens must then fit a step of {to}"
    return None


def _why_heads_do_not_divide(facts: TargetFacts, name: str, to: Any) -> str | None:
    if name not in ("--tensor-parallel-size", "--tp-size") or not isinstance(to, int):
        return None
    heads = facts.shape.num_q_heads if facts.shape is not None else None
    if heads and heads % to:
        return f"{to} does not divide the model's {heads} attention heads"
    gpus, pp = facts.num_gpus, facts.pp or 1
    if gpus is not None and to * pp > gpus:
        return f"{to} x {pp} stages need {to * pp} GPUs, and there are {gpus}"
    return None


def _why_not_with(facts: TargetFacts, flag: str, to: Any, flags: Mapping[str, Any]) -> str | None:
    if flag == OFFLOAD and to is not None and flags.get(CONNECTOR) is not None:
        return f"{CONNECTOR} names a KV connector already: set the size of its host tier there"
    if flag == "--calculate-kv-scales" and to and not str(flags.get("--kv-cache-dtype", "auto")).startswith("fp8"):
        return f"{flag} computes scales of an fp8 cache, and --kv-cache-dtype is {flags.get('--kv-cache-dtype')}"
    hierarchical = ("--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio")
    if flag in hierarchical and to and flags.get("--disable-radix-cache"):
        return f"{flag} extends the radix cache, and --disable-radix-cache is set"
    if flag == "--hicache-ratio" and to and flags.get("--hicache-size"):
        return "--hicache-size is set, and replaces --hicache-ratio"
    if facts.engine == VLLM and flag == THRESHOLD and to and _before(facts, "0.8.0"):
        return f"{THRESHOLD} belongs to chunked prefill of the V1 engine, the default since 0.8.0"
    return None


def _before(facts: TargetFacts, version: str) -> bool:
    return facts.version is not None and version_key(facts.version) < version_key(version)
