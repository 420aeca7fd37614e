"""Judges a recommended flag change by a reading of its own, apart from the catalog and the gate it is to check.

`advice_facts.json` holds flags and metrics of twenty vLLM releases (kinds, defaults, choices); tables here say what
defaults are resolved to, which direction makes each kind of trouble worse, and what a GPU cannot do.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from runbooks.facts import TargetFacts

READ: dict[str, Any] = json.loads((Path(__file__).parent / "advice_facts.json").read_text(encoding="utf-8"))
VERSIONS: list[str] = READ["versions"]
GIB = 1024**3
NAMED_METRIC = re.compile(r"vllm:[a-z_]+")

UP, DOWN = 1, -1
_POOL = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")
_SMALL_POOL = (
    "cache-thrash", "eviction-storm", "kv-does-not-fit", "kv-saturated", "offload-resume-deadlock",
    "preemption-livelock", "slow-after-retraction",
)  # fmt: skip
# runbook -> flag -> the only direction that is not harmful
ONLY: dict[str, dict[str, int]] = {
    **{runbook: dict.fromkeys(_POOL, UP) | {"--max-model-len": DOWN} for runbook in _SMALL_POOL},
    "oom": dict.fromkeys((*_POOL, "--max-num-seqs", "--max-num-batched-tokens"), DOWN),
    "gpu-memory-creep": dict.fromkeys(_POOL, DOWN),
    "shared-gpu-memory": dict.fromkeys(_POOL, DOWN),
    "itl-slo-burn": dict.fromkeys(("--max-num-seqs", "--max-num-batched-tokens"), DOWN),
    "ttft-slo-burn": {"--max-num-seqs": UP, "--max-num-batched-tokens": UP} | dict.fromkeys(_POOL, UP),
    "head-of-line-block": {"--max-num-seqs": UP, "--max-model-len": DOWN, "--watermark": DOWN},
    "engine-stall": {"--max-model-len": DOWN},
    "prefix-hit-collapse": dict.fromkeys(_POOL, UP),
    "prefix-cache-inert": {"--block-size": DOWN},
    "upgrade-less-kv": {"--max-model-len": DOWN, "--max-num-seqs": DOWN, "--max-num-batched-tokens": DOWN},
    "offload-host-memory": {"--kv-offloading-size": DOWN, "--swap-space": DOWN},
}
for _runbook in ("eviction-storm", "preemption-livelock", "kv-does-not-fit", "offload-resume-deadlock",
                 "slow-after-retraction", "cache-thrash"):  # fmt: skip
    ONLY[_runbook]["--max-num-seqs"] = DOWN
ONLY["kv-saturated"]["--max-num-seqs"] = DOWN
ONLY["kv-does-not-fit"]["--max-num-batched-tokens"] = DOWN
ONLY["preemption-livelock"]["--watermark"] = UP
ONLY["eviction-storm"]["--watermark"] = UP

_ON = {("cache-thrash", "--enable-prefix-caching"), ("prefix-hit-collapse", "--enable-prefix-caching"),
       ("prefix-cache-inert", "--enable-prefix-caching"), ("ttft-slo-burn", "--enable-prefix-caching")}  # fmt: skip
_OFF = {("itl-slo-burn", "--enforce-eager"), ("ttft-slo-burn", "--enforce-eager")}
_SIXTEEN_BITS = ("auto", "float16", "bfloat16")
_WEAK_HASHES = ("builtin", "sha256_cbor_64bit", "xxhash", "xxhash_cbor")
_WHOLE = ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--block-size", "--num-gpu-blocks-override",
          "--kv-cache-memory-bytes", "--max-num-queued-reqs", "--tensor-parallel-size",
          "--long-prefill-token-threshold")  # fmt: skip


@functools.cache
def form_of(version: str, flag: str) -> dict[str, Any] | None:
    """How the release declares the flag; None: it does not."""
    here = VERSIONS.index(version)
    if (
        flag.startswith("--disable-")
        and version == "0.33.0"
        and not READ["flags"].get(flag, [{"in": ""}])[-1]["in"].endswith(version)
    ):
        return form_of(version, flag.replace("--disable-", "--enable-", 1))  # either spelling since 0.33.0
    for row in READ["flags"].get(flag, ()):
        first, last = row["in"].split("..")
        if VERSIONS.index(first) <= here <= VERSIONS.index(last):
            form: dict[str, Any] = row
            return form
    return None


@functools.cache
def has_metric(version: str, name: str) -> bool:
    """Whether the release exposes the series; histograms under their suffixed names too."""
    for known in (name, re.sub(r"_(bucket|sum|count)$", "", name)):
        for span in READ["metrics"].get(known, ()):
            first, last = span.split("..")
            if VERSIONS.index(first) <= VERSIONS.index(version) <= VERSIONS.index(last):
                return True
    return False


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def default_in(facts: TargetFacts, flag: str) -> Any:
    """What holds where the flag is not given, resolved defaults included; None: nothing, or it depends on more."""
    version = facts.version or ""
    minor = _minor(version)
    if flag == "--max-num-seqs":
        return {True: 1024, False: 256, None: None}[_large_gpu(facts)]
    if flag == "--max-num-batched-tokens":
        if minor < (0, 8) or _large_gpu(facts) is None:
            return None
        huge = minor >= (0, 28) and (facts.device_memory_bytes or 0) >= 160 * GIB
        return 16_384 if huge else 8192 if _large_gpu(facts) else 2048
    if flag == "--enable-chunked-prefill":
        return True if minor >= (0, 8) else None  # before, it depended on the context
    if flag == "--enable-prefix-caching":
        return minor >= (0, 8)
    if flag == "--kv-offloading-backend" and minor < (0, 14):
        return None
    form = form_of(version, flag)
    return None if form is None else form.get("default")


def _large_gpu(facts: TargetFacts) -> bool | None:
    """Whether vLLM counts the GPU among the large ones when it chooses the batch."""
    if _minor(facts.version or "") < (0, 8):
        return False
    if facts.device_memory_bytes is None or facts.gpu is None:
        return None
    a100 = "a100" in facts.gpu.name.lower() and _minor(facts.version or "") >= (0, 9)
    return facts.device_memory_bytes >= 70 * GIB and not a100


def value_now(facts: TargetFacts, flag: str) -> Any:
    """The value in force: set, measured, or the default."""
    if facts.flags.get(flag) is not None:
        return facts.flags[flag]
    measured = {"--max-num-seqs": facts.max_num_seqs, "--max-num-batched-tokens": facts.max_num_batched_tokens,
                "--max-model-len": facts.max_model_len, "--block-size": facts.block_size,
                "--tensor-parallel-size": facts.tp}  # fmt: skip
    return measured[flag] if measured.get(flag) is not None else default_in(facts, flag)


def wrong_with(facts: TargetFacts, runbook: str, flag: str, to: Any, after: dict[str, Any]) -> list[str]:
    """What is wrong with setting a flag to a value (None: taking it out); `after`: flags once all changes are made."""
    version = facts.version or ""
    form, now = form_of(version, flag), value_now(facts, flag)
    if to is None:
        if facts.flags.get(flag) is None:
            return ["no-op: it is not set"]
        if runbook == "flag-not-in-version":
            fine = form is not None and (not form.get("choices") or facts.flags[flag] in form["choices"])
            return ["removed though the release takes it"] if fine else []
        if form is None:
            return ["absent"]
        default = default_in(facts, flag)
        found = ["no-op: its value is the default"] if default is not None and default == now else []
        return found + _wrong_way(runbook, flag, now, default)
    if form is None:
        return ["absent"]
    found = []
    if form.get("choices") and to not in form["choices"]:
        found.append("out of choices")
    if kind := _wrong_kind(form["kind"], flag, to):
        return found + kind
    if now is not None and now == to and type(now) is type(to):
        found.append("no-op: it is so already")
    found += _wrong_way(runbook, flag, now, to)
    found += _impossible(facts, flag, to)
    return found + _contradicted(facts, flag, to, after)


def _wrong_kind(kind: str, flag: str, to: Any) -> list[str]:
    if kind in ("bool", "bool-value"):
        return [] if isinstance(to, bool) else ["kind: takes on or off"]
    if kind == "switch":
        return [] if to is True else ["kind: can only be given"]
    if kind in ("int", "float") or flag in _WHOLE:
        if isinstance(to, bool) or not isinstance(to, int | float):
            return ["kind: takes a number"]
        if (kind == "int" or flag in _WHOLE) and int(to) != to:
            return ["kind: takes whole numbers"]
        if to < 0 or (to == 0 and flag in _WHOLE and flag != "--long-prefill-token-threshold"):
            return ["range: not above zero"]
    if flag == "--gpu-memory-utilization" and not 0 < to <= 1:
        return ["range: not a share"]
    if flag == "--watermark" and not 0 <= to < 1:
        return ["range: not a share"]
    return []


def _wrong_way(runbook: str, flag: str, now: Any, to: Any) -> list[str]:
    only = ONLY.get(runbook, {}).get(flag)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (now, to))
    if only is not None and numbers and (to - now) * only < 0:
        return [f"wrong way: {now} -> {to}"]
    if (runbook, flag) in _ON and to is False:
        return ["wrong way: off"]
    if (runbook, flag) in _OFF and to is True:
        return ["wrong way: on"]
    if flag == "--kv-cache-dtype" and runbook in _SMALL_POOL and to in _SIXTEEN_BITS and now not in _SIXTEEN_BITS:
        return ["wrong way: more bytes in a pool too small"]
    if flag == "--prefix-caching-hash-algo" and runbook == "prefix-isolation-breach" and to in _WEAK_HASHES:
        return ["wrong way: a weaker hash"]
    return []


def _impossible(facts: TargetFacts, flag: str, to: Any) -> list[str]:
    sm, backend = facts.compute_capability, (facts.attention_backend or "").lower()
    if flag == "--kv-cache-dtype":
        return _format_impossible(facts, str(to), sm, backend)
    if flag == "--block-size":
        multiple = 64 if "flashmla" in backend else 16 if "flash" in backend or "triton" in backend else 1
        if (
            to % multiple
            or ("flashinfer" in backend and to > 64)
            or (sm and _minor(facts.version or "") < (0, 8) and to > 32)
        ):
            return ["hardware: block size"]
    if flag == "--tensor-parallel-size":
        heads = facts.shape.num_q_heads if facts.shape is not None else None
        if (heads and heads % to) or (facts.num_gpus is not None and to * (facts.pp or 1) > facts.num_gpus):
            return ["hardware: heads or GPUs"]
    return []


def _format_impossible(facts: TargetFacts, to: str, sm: tuple[int, int] | None, backend: str) -> list[str]:
    latent = facts.shape is not None and any(group.attention == "latent" for group in facts.shape.layers)
    if to.endswith("_ds_mla") and facts.shape is not None and not latent:
        return ["hardware: a layout of latents"]
    if to == "fp8_e5m2" and ("fp8" in (facts.checkpoint_quantization or "") or "flash_attn" in backend):
        return ["hardware: e5m2 with an fp8 checkpoint or FlashAttention"]
    if sm is None:
        return []
    if to == "fp8_inc":
        return ["hardware: Gaudi only"]
    if to.startswith("nvfp4") and sm[0] != 10:
        return ["hardware: Blackwell only"]
    stored = "flashinfer" in backend and sm >= (8, 0) and _minor(facts.version or "") >= (0, 10)
    stored = stored and facts.version not in ("0.10.0", "0.10.1")
    e4m3 = to in ("fp8", "fp8_e4m3")
    if (e4m3 and sm < (8, 9) and not stored) or (to in ("fp8_per_token_head", "turboquant_k8v4") and sm < (8, 9)):
        return ["hardware: e4m3 before Ada"]
    if to == "fp8_ds_mla" and sm < (9, 0):
        return ["hardware: before Hopper"]
    return []


def _contradicted(facts: TargetFacts, flag: str, to: Any, after: dict[str, Any]) -> list[str]:
    then = {name: after[name] if after.get(name) is not None else value_now(facts, name)
            for name in ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len")}  # fmt: skip
    by_hand = any(after.get(hand) is not None for hand in ("--kv-cache-memory-bytes", "--num-gpu-blocks-override"))
    if flag == "--gpu-memory-utilization" and by_hand:
        return ["void: the pool is sized by hand"]
    if flag == "--kv-cache-memory-bytes" and after.get("--num-gpu-blocks-override") is not None:
        return ["void: the number of blocks is set"]
    seqs, step = then["--max-num-seqs"], then["--max-num-batched-tokens"]
    if flag in ("--max-num-seqs", "--max-num-batched-tokens") and None not in (seqs, step) and step < seqs:
        return ["impossible: a step smaller than the batch"]
    if after.get("--enable-chunked-prefill") is False and to:
        if flag == "--long-prefill-token-threshold":
            return ["void: prompts are not cut"]
        if flag == "--max-num-batched-tokens" and then["--max-model-len"] and to < then["--max-model-len"]:
            return ["impossible: a prompt must fit a step"]
    if flag == "--kv-offloading-size" and after.get("--kv-transfer-config") is not None:
        return ["impossible: two connectors"]
    return []
