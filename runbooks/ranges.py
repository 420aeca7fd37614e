"""Which numbers a flag takes at all: units and ranges that engines check at start, or that make a value useless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runbooks.engine_names import vllm_flag


@dataclass(frozen=True)
class Range:
    """low < or <= value <= high; whole: no fractions. words: what is wrong with a value outside."""

    low: float
    high: float | None = None
    whole: bool = True
    open_low: bool = False
    open_high: bool = False
    unit: str = ""


_SHARE = Range(0, 1, whole=False, open_low=True, unit="a share of the GPU's memory")
_COUNT = Range(1)
_RANGES = {
    "--gpu-memory-utilization": _SHARE,
    "--watermark": Range(0, 1, whole=False, open_high=True, unit="a share of the blocks"),
    "--max-num-seqs": _COUNT,
    "--max-num-batched-tokens": _COUNT,
    "--max-model-len": _COUNT,
    "--max-num-queued-reqs": _COUNT,
    "--max-num-queued-tokens": _COUNT,
    "--num-gpu-blocks-override": Range(2),
    "--block-size": _COUNT,
    "--kv-cache-memory-bytes": _COUNT,
    "--long-prefill-token-threshold": Range(0),
    "--kv-offloading-size": Range(0, whole=False, open_low=True, unit="GiB over all ranks"),
    "--tensor-parallel-size": _COUNT,
    "--pipeline-parallel-size": _COUNT,
    "--schedule-conservativeness": Range(0, whole=False, open_low=True),
    "--hicache-ratio": Range(1, whole=False, open_low=True, unit="host over device"),
    "--hicache-size": Range(0, unit="GB on each rank"),
}


def why_out_of_range(engine: str, flag: str, value: Any) -> str | None:
    """Why no engine would start, or work, with this number; None for values that are none, or flags without a range."""
    limits = _RANGES.get(vllm_flag(engine, flag))
    if limits is None or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None if flag == "--kv-cache-memory-bytes" and isinstance(value, str) else f"{flag} takes a number"
    unit = f", {limits.unit}" if limits.unit else ""
    if limits.whole and value != int(value):
        return f"{flag} takes whole numbers{unit}, not {value}"
    if value < limits.low or (limits.open_low and value == limits.low):
        return f"{flag} must be {'above' if limits.open_low else 'at least'} {limits.low:g}{unit}, not {value}"
    if limits.high is not None and (value > limits.high or (limits.open_high and value == limits.high)):
        return f"{flag} must be {'below' if limits.open_high else 'at most'} {limits.high:g}{unit}, not {value}"
    return None
