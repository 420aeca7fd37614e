"""Which way a flag must not be moved for a runbook, and why: published advice that makes things worse among it.

Flags have vLLM's names; the gate translates those of other engines.
"""

from __future__ import annotations

from typing import Any

from runbooks.kv_dtypes import takes_more_bits

LOWER, HIGHER = -1, 1

_LESS_POOL = "wrong direction: it makes the KV pool smaller, and preemption comes from a pool that is too small"
_MORE_PREEMPT = "wrong direction: more sequences at once compete for the same blocks and preempt each other more"
_LESS_OUTSIDE = "wrong direction: it leaves less memory outside the budget"
_LESS_CACHE = "wrong direction: a smaller pool keeps fewer cached blocks"
_LESS_ADMITTED = "wrong direction: less room is then reserved for answers, and more requests lose their blocks"
_FEWER_FITS = "wrong direction: the pool gets smaller, and one request does not fit it as it is"
_LARGER_STEP = "wrong direction: a larger step leaves less for the pool"
_LONGER = "wrong direction: longer requests are retracted at more cost"
_MORE_RESUMED = "wrong direction: more resumed requests hold part of the pool"
_MORE_HOST = "wrong direction: the host's memory is what ran out"
_LONGER_STEP = "wrong direction: every running answer waits for the whole step, and a larger one takes longer"

# (runbook, flag) -> (direction that is wrong; why it is wrong)
WRONG_WAY: dict[tuple[str, str], tuple[int, str]] = {
    ("eviction-storm", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("eviction-storm", "--kv-cache-memory-bytes"): (LOWER, "wrong direction: a smaller pool preempts more"),
    ("eviction-storm", "--num-gpu-blocks-override"): (LOWER, "wrong direction: fewer blocks preempt more"),
    ("eviction-storm", "--max-num-seqs"): (HIGHER, _MORE_PREEMPT),
    ("eviction-storm", "--watermark"): (LOWER, "wrong direction: fewer blocks kept free at admission preempt more"),
    ("preemption-livelock", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("preemption-livelock", "--kv-cache-memory-bytes"): (LOWER, "wrong direction: a smaller pool preempts more"),
    ("preemption-livelock", "--num-gpu-blocks-override"): (LOWER, "wrong direction: fewer blocks preempt more"),
    ("preemption-livelock", "--max-num-seqs"): (HIGHER, _MORE_PREEMPT),
    ("preemption-livelock", "--max-model-len"): (HIGHER, "wrong direction: longer requests fit the pool even less"),
    ("preemption-livelock", "--watermark"): (
        LOWER,
        "wrong direction: fewer blocks kept free at admission preempt more",
    ),
    ("cache-thrash", "--gpu-memory-utilization"): (LOWER, _LESS_CACHE),
    ("cache-thrash", "--kv-cache-memory-bytes"): (LOWER, _LESS_CACHE),
    ("cache-thrash", "--num-gpu-blocks-override"): (LOWER, _LESS_CACHE),
    ("cache-thrash", "--kv-offloading-size"): (LOWER, "wrong direction: the host tier then keeps less"),
    ("cache-thrash", "--max-num-seqs"): (
        HIGHER,
        "wrong direction: running requests take the blocks the cache lives in",
    ),
    ("kv-saturated", "--gpu-memory-utilization"): (LOWER, "wrong direction: it makes the full pool smaller"),
    ("kv-saturated", "--max-num-seqs"): (HIGHER, "will not help: the pool is full, more sequences cannot be admitted"),
    ("head-of-line-block", "--gpu-memory-utilization"): (LOWER, "wrong direction: the head then fits even later"),
    ("head-of-line-block", "--max-model-len"): (HIGHER, "wrong direction: longer prompts block the queue longer"),
    ("head-of-line-block", "--max-num-seqs"): (LOWER, "wrong direction: fewer places make the queue wait longer"),
    ("head-of-line-block", "--watermark"): (HIGHER, "wrong direction: the more blocks admission keeps free, the later"),
    ("engine-stall", "--max-model-len"): (HIGHER, "wrong direction: longer prompts can be admitted even less"),
    ("prefix-hit-collapse", "--gpu-memory-utilization"): (LOWER, _LESS_CACHE),
    ("prefix-hit-collapse", "--kv-cache-memory-bytes"): (LOWER, _LESS_CACHE),
    ("ttft-slo-burn", "--gpu-memory-utilization"): (LOWER, "wrong direction: fewer requests fit, more wait"),
    ("ttft-slo-burn", "--max-num-seqs"): (LOWER, "wrong direction: fewer places make the queue wait longer"),
    ("ttft-slo-burn", "--max-num-queued-reqs"): (HIGHER, "wrong direction: a longer queue waits longer"),
    ("ttft-slo-burn", "--max-num-batched-tokens"): (LOWER, "wrong direction: a prompt then takes more steps"),
    ("itl-slo-burn", "--max-num-batched-tokens"): (HIGHER, _LONGER_STEP),
    ("itl-slo-burn", "--max-num-seqs"): (HIGHER, _LONGER_STEP),
    ("gpu-memory-creep", "--gpu-memory-utilization"): (HIGHER, _LESS_OUTSIDE),
    ("gpu-memory-creep", "--kv-cache-memory-bytes"): (HIGHER, _LESS_OUTSIDE),
    ("oom", "--gpu-memory-utilization"): (HIGHER, _LESS_OUTSIDE),
    ("oom", "--kv-cache-memory-bytes"): (HIGHER, "wrong direction: a larger pool leaves less memory for activations"),
    ("oom", "--num-gpu-blocks-override"): (HIGHER, "wrong direction: a larger pool leaves less memory for activations"),
    ("oom", "--max-num-batched-tokens"): (
        HIGHER,
        "wrong direction: the activation peak grows with the tokens of a step",
    ),
    ("oom", "--max-num-seqs"): (HIGHER, "wrong direction: more sequences at once need more memory"),
    ("oom", "--tensor-parallel-size"): (LOWER, "wrong direction: fewer GPUs hold larger shares of the weights each"),
    ("eviction-storm", "--schedule-conservativeness"): (LOWER, _LESS_ADMITTED),
    ("eviction-storm", "--max-model-len"): (HIGHER, "wrong direction: longer requests take more blocks each"),
    ("preemption-livelock", "--schedule-conservativeness"): (LOWER, _LESS_ADMITTED),
    ("head-of-line-block", "--schedule-conservativeness"): (
        HIGHER,
        "wrong direction: admission gets more careful, and the head waits longer",
    ),
    ("kv-saturated", "--kv-cache-memory-bytes"): (LOWER, "wrong direction: it makes the full pool smaller"),
    ("kv-saturated", "--num-gpu-blocks-override"): (LOWER, "wrong direction: it makes the full pool smaller"),
    ("kv-does-not-fit", "--gpu-memory-utilization"): (LOWER, _FEWER_FITS),
    ("kv-does-not-fit", "--kv-cache-memory-bytes"): (LOWER, _FEWER_FITS),
    ("kv-does-not-fit", "--num-gpu-blocks-override"): (LOWER, _FEWER_FITS),
    ("kv-does-not-fit", "--max-model-len"): (HIGHER, "wrong direction: a longer request needs more pool"),
    ("kv-does-not-fit", "--max-num-batched-tokens"): (
        HIGHER,
        _LARGER_STEP,
    ),
    ("kv-does-not-fit", "--max-num-seqs"): (HIGHER, "wrong direction: a larger batch leaves less for the pool"),
    ("kv-does-not-fit", "--tensor-parallel-size"): (LOWER, "wrong direction: fewer GPUs hold larger shares each"),
    ("shared-gpu-memory", "--gpu-memory-utilization"): (HIGHER, "wrong direction: the neighbour's memory is taken too"),
    ("shared-gpu-memory", "--kv-cache-memory-bytes"): (HIGHER, "wrong direction: the neighbour's memory is taken too"),
    ("upgrade-less-kv", "--max-model-len"): (HIGHER, "wrong direction: a longer request needs more pool"),
    ("upgrade-less-kv", "--max-num-batched-tokens"): (
        HIGHER,
        _LARGER_STEP,
    ),
    ("upgrade-less-kv", "--max-num-seqs"): (HIGHER, "wrong direction: a larger batch leaves less for the pool"),
    ("offload-host-memory", "--kv-offloading-size"): (HIGHER, _MORE_HOST),
    ("offload-host-memory", "--hicache-size"): (HIGHER, _MORE_HOST),
    ("offload-host-memory", "--hicache-ratio"): (HIGHER, _MORE_HOST),
    ("offload-host-memory", "--swap-space"): (HIGHER, _MORE_HOST),
    ("prefix-cache-inert", "--block-size"): (HIGHER, "wrong direction: only whole blocks are found, longer ones less"),
    ("prefix-cache-inert", "--prefix-match-unit"): (HIGHER, "wrong direction: a coarser unit finds less"),
    ("slow-after-retraction", "--max-num-seqs"): (HIGHER, _MORE_PREEMPT),
    ("slow-after-retraction", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("slow-after-retraction", "--schedule-conservativeness"): (LOWER, _LESS_ADMITTED),
    ("slow-after-retraction", "--max-model-len"): (
        HIGHER,
        _LONGER,
    ),
    ("offload-resume-deadlock", "--max-num-seqs"): (
        HIGHER,
        _MORE_RESUMED,
    ),
    ("slow-after-retraction", "--kv-cache-memory-bytes"): (LOWER, _LESS_POOL),
    ("slow-after-retraction", "--num-gpu-blocks-override"): (LOWER, _LESS_POOL),
    ("offload-resume-deadlock", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("offload-resume-deadlock", "--kv-cache-memory-bytes"): (LOWER, _LESS_POOL),
    ("offload-resume-deadlock", "--num-gpu-blocks-override"): (LOWER, _LESS_POOL),
}

_NO_CACHE = "wrong direction: without the prefix cache nothing is found at all"
_EAGER = "wrong direction: without graphs every kernel is launched on its own, and steps get longer"
_ATOMIC = "wrong direction: whole prompts then come between two tokens"
# (runbook, flag) -> (values that are wrong; why)
WRONG_VALUES: dict[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("cache-thrash", "--enable-prefix-caching"): ((False,), _NO_CACHE),
    ("prefix-hit-collapse", "--enable-prefix-caching"): ((False,), _NO_CACHE),
    ("prefix-cache-inert", "--enable-prefix-caching"): ((False,), _NO_CACHE),
    ("ttft-slo-burn", "--enable-prefix-caching"): ((False,), _NO_CACHE),
    ("ttft-slo-burn", "--enforce-eager"): ((True,), _EAGER),
    ("itl-slo-burn", "--enforce-eager"): ((True,), _EAGER),
    ("itl-slo-burn", "--enable-chunked-prefill"): ((False,), _ATOMIC),
    ("metrics-unknown", "--disable-log-stats"): ((True,), "wrong direction: it takes the engine's series away"),
}
# Where the pool is too small, a format of more bits makes it hold less.
POOL_TOO_SMALL = (
    "cache-thrash", "eviction-storm", "kv-does-not-fit", "kv-saturated", "offload-resume-deadlock",
    "preemption-livelock", "slow-after-retraction", "upgrade-less-kv",
)  # fmt: skip


def why_wrong_way(runbook: str, flag: str, now: Any, to: Any) -> str | None:
    """Why moving a flag from `now` to `to` points the wrong way for a runbook; None: it does not, or nobody knows.

    flag: vLLM's name. now, to: values, bytes for sizes; None where one is not known.
    """
    wrong = WRONG_WAY.get((runbook, flag))
    if wrong is not None and _number(now) and _number(to):
        direction, reason = wrong
        if (to > now) == (direction > 0) and to != now:
            return reason
    values = WRONG_VALUES.get((runbook, flag))
    if values is not None and any(to is value for value in values[0]):
        return values[1]
    if flag == "--kv-cache-dtype" and runbook in POOL_TOO_SMALL and takes_more_bits(now, to):
        return f"wrong direction: {to} takes more bytes a token than {now}, and the pool holds less"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
