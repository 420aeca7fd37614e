"""What may go wrong with a change, and how that shows: one sentence a flag, under vLLM's name of it."""

from __future__ import annotations

from typing import Any

_RISKS = {
    "--gpu-memory-utilization": "memory that no profile sees (fragments, libraries, other processes) may no longer "
    "fit: the engine then dies of an allocation, most likely in the first large step",
    "--kv-cache-memory-bytes": "the size is taken as given: too large, and the first large step runs out of memory",
    "--num-gpu-blocks-override": "the pool then follows the profile, which differs by some percent between starts",
    "--max-num-seqs": "too low, and the GPU idles while requests queue; watch throughput beside the queue",
    "--max-num-batched-tokens": "the activation peak and the length of a step move with it; both show only under load",
    "--max-model-len": "clients that send longer prompts get an error; tell them first",
    "--max-num-queued-reqs": "clients that do not retry elsewhere see errors at peaks",
    "--kv-cache-dtype": "answers may change: measure quality on your own prompts, long ones above all, before traffic",
    "--kv-cache-dtype-skip-layers": "layers left out keep more bytes: the pool holds less",
    "--calculate-kv-scales": "scales come from the first requests; unusual ones clip later keys",
    "--block-size": "a backend may round it or refuse to start; cached blocks of before are gone",
    "--enable-prefix-caching": "hits make times depend on what others asked: isolate tenants by salt",
    "--prefix-caching-hash-algo": "none for the answers; the cache starts empty",
    "--kv-offloading-size": "pinned host memory: too much, and the host kills processes",
    "--enforce-eager": "graph capture takes memory that may be missing: it shows at start",
    "--enable-chunked-prefill": "a prompt that exceeds a step is refused without it",
    "--watermark": "too high, and long prompts are admitted late or never",
    "--long-prefill-token-threshold": "prompts beyond it take more steps: their first token comes later",
    "--tensor-parallel-size": "every step waits for the links between GPUs: without NVLink it may get slower",
    "--disable-log-stats": "none known",
    "--show-hidden-metrics-for-version": "dashboards that rest on it break at the next upgrade",
    "--schedule-conservativeness": "too high, and the GPU idles while requests queue",
    "--hicache-size": "pinned host memory on every rank: too much, and the host kills processes",
    "--hicache-ratio": "pinned host memory on every rank: too much, and the host kills processes",
    "--enable-hierarchical-cache": "pinned host memory on every rank, and traffic on PCIe beside the requests'",
    "--swap-space": "none: nothing reads it",
    "--enable-metrics": "none known",
    "--scheduler-reserve-full-isl": "a prompt is admitted in part, and may be preempted before its end",
    "--prefix-match-unit": "young code for hybrid models: watch answers and hits after the change",
}
_REMOVED = "what relied on its value falls back to the default"
_UNKNOWN = "not known: try it on one replica first"


def risk_of(flag: str, to: Any) -> str:
    """What may go wrong when the flag, under vLLM's name, is set (or, to None, taken away)."""
    return _RISKS.get(flag, _REMOVED if to is None else _UNKNOWN)
