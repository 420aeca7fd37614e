"""What is known of a target when advice is computed. Anything may be unknown (None); advice then says what is missing.

`from_facts` reads the embedded engine's `/debug/engine`, or the labels of vLLM's `vllm:cache_config_info`, and the
hardware and the model where they are named. Sizes in bytes (per GPU), lengths in tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import ConfigError, ModelDims, parse_bytes
from engine.memory.deployment import Gpu
from engine.memory.shape import ModelShape
from runbooks.cache_config_info import read_labels
from runbooks.engine_names import flag_for
from runbooks.flags_given import flags_given
from runbooks.hardware_facts import read_hardware
from runbooks.isolation_facts import IsolationFacts, read_isolation
from runbooks.quality_candidates import QualityCandidate, read_candidates

COMPUTE_BOUND_USAGE = 0.7  # a pool filled less than that keeps nobody waiting
SAFETY = 1.5  # what several requests may take together, over the mean of their lengths


@dataclass(frozen=True)
class TrafficFacts:
    """What the target was asked for, measured over the incident. Peaks are maxima, means are per request.

    `queue_s_mean` and `prefill_s_mean`: seconds a request waited, and seconds its prompt then took. `itl_s_p99`: the
    99th percentile of gaps between tokens; `itl_bound_s`: the objective for them. `prompt_tokens_per_s`: computed.
    `kv_usage_peak`: highest share of the pool in use; `preemptions`: requests that lost their blocks meanwhile.
    """

    peak_running: int | None = None
    peak_waiting: int | None = None
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None
    tokens_per_request_peak: int | None = None
    queue_s_mean: float | None = None
    prefill_s_mean: float | None = None
    itl_s_p99: float | None = None
    itl_bound_s: float | None = None
    prompt_tokens_per_s: float | None = None
    kv_usage_peak: float | None = None
    preemptions: int | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast prompts are computed, at least: several share a step, and the engine may have waited for some."""
        known = [self.prompt_tokens_per_s] if self.prompt_tokens_per_s else []
        if self.prompt_tokens_mean and self.prefill_s_mean:
            known.append(self.prompt_tokens_mean / self.prefill_s_mean)
        return max(known, default=None)

    @property
    def peak_demand(self) -> int | None:
        """Most requests that wanted to run at the same time."""
        if self.peak_running is None:
            return None
        return self.peak_running + (self.peak_waiting or 0)

    @property
    def compute_bound(self) -> bool:
        """Whether requests waited while much of the pool was free and none was preempted: not for want of memory."""
        waited, usage = bool(self.peak_waiting), self.kv_usage_peak
        return waited and usage is not None and usage < COMPUTE_BOUND_USAGE and not self.preemptions


@dataclass(frozen=True)
class UnreadMetric:
    """A metric that the report on a target's page says is not read: hidden or missing, and what to do about it."""

    name: str
    status: str
    todo: str = ""
    required: bool = False


@dataclass(frozen=True)
class TargetFacts:
    """One target: its engine ("kvoncall" is the embedded one), its flags in force and its measured memory.

    `flags` maps "--flag" to the value in force; a flag that is absent there is unknown, one that is None is unset.
    `activation_peak_bytes` belongs to `max_num_batched_tokens`. `oom_allocation_bytes` is the size of the allocation
    that failed, where an out-of-memory exit told it. `quality_candidates`: formats measured on this very model.
    `isolation`: what is known of a breach of the prefix cache's isolation. `other_processes_bytes`: device memory that
    processes other than the engine's hold. `unread`: what its page of metrics lacks; None where it was not looked at.
    `kv_available_bytes`: what a refused start said it had for the pool. `previous_version` and `previous_kv_tokens`:
    the engine before an upgrade, and its pool. `host_memory_bytes` and `host_other_bytes`: the host's memory, and what
    else needs it.
    """

    engine: str
    version: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    dims: ModelDims | None = None
    device_memory_bytes: int | None = None
    weights_bytes: int | None = None
    activation_peak_bytes: int | None = None
    kv_bytes_per_block: int | None = None
    kv_bytes_per_token: int | None = None
    open_blocks_bytes: int | None = None
    bookkeeping_bytes: int | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    oom_allocation_bytes: int | None = None
    traffic: TrafficFacts = TrafficFacts()
    quality_candidates: tuple[QualityCandidate, ...] = ()
    isolation: IsolationFacts | None = None
    other_processes_bytes: int | None = None
    unread: tuple[UnreadMetric, ...] | None = None
    gpu: Gpu | None = None
    num_gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    shape: ModelShape | None = None
    checkpoint_quantization: str | None = None
    attention_backend: str | None = None
    compute_capability: tuple[int, int] | None = None
    kv_available_bytes: int | None = None
    previous_version: str | None = None
    previous_kv_tokens: int | None = None
    host_memory_bytes: int | None = None
    host_other_bytes: int | None = None

    @property
    def mla(self) -> bool | None:
        """Whether the model has multi-head latent attention; None where the model is not known."""
        if self.shape is not None:
            return any(group.attention == "latent" for group in self.shape.layers)
        return None if self.dims is None else bool(self.dims.latent_width)

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep less than all tokens: then the pool's tokens depend on --max-model-len."""
        kinds = {group.attention for group in self.shape.layers} if self.shape is not None else set()
        return bool(kinds & {"sliding", "chunked", "recurrent"})

    @property
    def utilization(self) -> float | None:
        """`--gpu-memory-utilization` in force, or what the engine has in its place."""
        value = self.flags.get(flag_for(self.engine, "--gpu-memory-utilization"))
        return None if value is None else float(value)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the pool that exists now, the null block included."""
        if self.num_gpu_blocks is None or self.kv_bytes_per_block is None:
            return None
        return self.num_gpu_blocks * self.kv_bytes_per_block

    @property
    def lengths_known(self) -> bool:
        """Whether anything was measured of the requests' lengths."""
        traffic = self.traffic
        means = (traffic.prompt_tokens_mean, traffic.output_tokens_mean)
        return traffic.tokens_per_request_peak is not None or None not in means

    @property
    def request_tokens(self) -> tuple[int | None, str]:
        """Tokens one request needs at its end, and where that figure comes from."""
        traffic = self.traffic
        if traffic.tokens_per_request_peak is not None:
            return traffic.tokens_per_request_peak, "the longest request seen"
        if traffic.prompt_tokens_mean is not None and traffic.output_tokens_mean is not None:
            tokens = math.ceil((traffic.prompt_tokens_mean + traffic.output_tokens_mean) * SAFETY)
            if tokens > 0 and (self.max_model_len is None or tokens < self.max_model_len):
                return tokens, f"{SAFETY:g} times the mean of prompts and answers"
        return self.max_model_len, "--max-model-len, as no request lengths were measured"


# These have a form of their own in a dict of facts.
_READ_BELOW = (
    "dims", "traffic", "quality_candidates", "isolation", "unread", "gpu", "num_gpus", "tp", "pp", "shape",
    "checkpoint_quantization", "attention_backend", "compute_capability",
)  # fmt: skip


def from_facts(facts: Mapping[str, Any]) -> TargetFacts:
    """Reads a dict of facts: `/debug/engine` (has "plan"), or cache_config_info labels; unknown keys are ignored.

    Field names of `TargetFacts` among the keys fill what those do not tell; "traffic" is a dict of `TrafficFacts`,
    "quality_candidates" a list of dicts of `QualityCandidate`, "isolation" a dict of `IsolationFacts`, "coverage" the
    report on a target's page, whose "rows" have "canonical", "status", "todo" and "required", "gpu" a `Gpu`, its fields
    or a preset's name, "shape" a `ModelShape`, "model_config" a Hugging Face configuration.
    """
    read = _from_debug_engine(facts) if _plan_of(facts) else read_labels(facts, _flags_of(facts), _dims_of(facts))
    for name in (f.name for f in dataclasses.fields(TargetFacts)):
        if read.get(name) is None and facts.get(name) is not None and name not in _READ_BELOW:
            read[name] = facts[name]
    read.update(read_hardware(facts, read["flags"]))
    if read.get("device_memory_bytes") is None and read["gpu"] is not None:
        read["device_memory_bytes"] = read["gpu"].memory_bytes
    if read.get("kv_bytes_per_block") is None and read.get("kv_bytes_per_token") and read.get("block_size"):
        read["kv_bytes_per_block"] = read["kv_bytes_per_token"] * read["block_size"]
    traffic = facts.get("traffic")
    if isinstance(traffic, Mapping):
        known = {f.name for f in dataclasses.fields(TrafficFacts)}
        read["traffic"] = TrafficFacts(**{k: v for k, v in traffic.items() if k in known})
    read["quality_candidates"] = read_candidates(facts.get("quality_candidates") or ())
    read["isolation"] = read_isolation(facts.get("isolation"))
    read["unread"] = _unread(facts.get("coverage"))
    return TargetFacts(**read)


def _unread(report: Any) -> tuple[UnreadMetric, ...] | None:
    rows = report.get("rows") if isinstance(report, Mapping) else None
    if not isinstance(rows, list | tuple):
        return None
    return tuple(
        UnreadMetric(str(row["canonical"]), row["status"], str(row.get("todo") or ""), bool(row.get("required")))
        for row in rows
        if row.get("status") in ("hidden", "missing")
    )


def _plan_of(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for key in ("plan", "memory_plan", "memory"):
        if isinstance(facts.get(key), Mapping):
            plan: Mapping[str, Any] = facts[key]
            return plan
    return None


def _from_debug_engine(facts: Mapping[str, Any]) -> dict[str, Any]:
    plan = _plan_of(facts) or {}
    flags = _flags_of(facts)
    read: dict[str, Any] = {
        "engine": str(facts.get("engine", "kvoncall")),
        "version": facts.get("version"),
        "flags": flags,
        "dims": _dims_of(facts),
        "max_num_seqs": flags.get("--max-num-seqs"),
        "max_num_batched_tokens": flags.get("--max-num-batched-tokens"),
    }
    for key in (
        "device_memory_bytes",
        "weights_bytes",
        "activation_peak_bytes",
        "kv_bytes_per_block",
        "kv_bytes_per_token",
        "open_blocks_bytes",
        "bookkeeping_bytes",
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "max_model_len",
    ):
        read[key] = plan.get(key)
    return read


def _dims_of(facts: Mapping[str, Any]) -> ModelDims | None:
    dims = facts.get("dims")
    if isinstance(dims, ModelDims):
        return dims
    return ModelDims(**dims) if isinstance(dims, Mapping) else None


def _flags_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Flags in force, told under "flags" or "config" as a mapping or a launch command."""
    engine = str(facts.get("engine") or ("kvoncall" if _plan_of(facts) else "vllm"))
    for key in ("flags", "config"):
        if facts.get(key):
            return flags_given(facts[key], engine, facts.get("version"))
    return {}


def bytes_of(value: Any) -> int | None:
    """A size flag's value as bytes, or None when unset or unreadable."""
    if value is None:
        return None
    try:
        return parse_bytes(value if isinstance(value, int) else str(value))
    except ConfigError:
        return None
