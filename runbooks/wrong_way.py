"""Which way a flag must not be moved for a runbook, and why: published advice that makes things worse among it."""

from __future__ import annotations

LOWER, HIGHER = -1, 1

_LESS_POOL = "wrong direction: it makes the KV pool smaller, and preemption comes from a pool that is too small"
_MORE_PREEMPT = "wrong direction: more sequences at once compete for the same blocks and preempt each other more"
_LESS_OUTSIDE = "wrong direction: it leaves less memory outside the budget"
_LESS_CACHE = "wrong direction: a smaller pool keeps fewer cached blocks"
_LONGER_STEP = "wrong direction: every running answer waits for the whole step, and a larger one takes longer"

# (runbook, flag) -> (direction that is wrong; why it is wrong)
WRONG_WAY: dict[tuple[str, str], tuple[int, str]] = {
    ("eviction-storm", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("eviction-storm", "--kv-cache-memory-bytes"): (LOWER, "wrong direction: a smaller pool preempts more"),
    ("eviction-storm", "--num-gpu-blocks-override"): (LOWER, "wrong direction: fewer blocks preempt more"),
    ("eviction-storm", "--max-num-seqs"): (HIGHER, _MORE_PREEMPT),
    ("eviction-storm", "--max-running-requests"): (HIGHER, _MORE_PREEMPT),
    ("eviction-storm", "--watermark"): (LOWER, "wrong direction: fewer blocks kept free at admission preempt more"),
    ("preemption-livelock", "--gpu-memory-utilization"): (LOWER, _LESS_POOL),
    ("preemption-livelock", "--kv-cache-memory-bytes"): (LOWER, "wrong direction: a smaller pool preempts more"),
    ("preemption-livelock", "--num-gpu-blocks-override"): (LOWER, "wrong direction: fewer blocks preempt more"),
    ("preemption-livelock", "--max-num-seqs"): (HIGHER, _MORE_PREEMPT),
    ("preemption-livelock", "--max-running-requests"): (HIGHER, _MORE_PREEMPT),
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
}
