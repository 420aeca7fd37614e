"""What engines other than vLLM call the flags and metrics that advice is made of.

vLLM's names are the ones the remedies are written in; the embedded engine has them too.
"""

from __future__ import annotations

from runbooks.flags import EMBEDDED

VLLM = "vllm"
SGLANG = "sglang"
TENSORRT_LLM = "tensorrt-llm"

_FLAGS = {SGLANG: {"--max-num-seqs": "--max-running-requests"}}
_METRICS = {
    SGLANG: {
        "vllm:num_preemptions_total": "sglang:num_retracted_requests_total",
        "vllm:num_requests_running": "sglang:num_running_reqs",
    }
}


def has_vllm_flags(engine: str) -> bool:
    """Whether the engine takes vLLM's flags, so that a value in one of them can be advised."""
    return engine in (EMBEDDED, VLLM)


def flag_for(engine: str, flag: str) -> str:
    """The engine's own flag for one of vLLM's; the same where no other is known."""
    return _FLAGS.get(engine, {}).get(flag, flag)


def metric_for(engine: str, metric: str) -> str:
    """The engine's own name of one of vLLM's metrics; the same where no other is known."""
    return _METRICS.get(engine, {}).get(metric, metric)
