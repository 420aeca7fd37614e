"""What a server needs beside weights and KV: an estimate of its activations, sampling buffers, graphs and the rest.

Engines measure these in a profile run; a plan cannot, so this module counts the largest tensors alive at once. The
counts fit public logs: 2.07 and 2.99 GiB at 20,000 and 29,000 tokens for Llama-3.1-8B (vllm#10517: 2.06 and 2.99
here), 2.53 GiB at 40,000 tokens on two ranks (vllm#11251: 2.52), 1.26 GiB of sampling for 256 requests and 128,256
tokens of vocabulary (vllm#10511: 1.22), 7.4 GiB of all together for gpt-oss-120b (vllm#23278: 6.8). Constants that
are fitted, not derived, are named here and nowhere else. State --activation-gib to replace them by a log's figure.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from engine.memory.semantics import Semantics
from engine.memory.shape import ModelShape
from engine.memory.units import gib

_MIB = 1 << 20
_GIB = 1 << 30
_WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}

SAMPLER_COPIES = {"v0": 10.0, "v1_sort": 8.5, "v1": 4.5}  # buffers of num_seqs x vocab x 4 bytes alive at once
_SORTLESS_SINCE = (0, 17)  # vLLM: top-k and top-p without sorting the vocabulary
CACHED_FORWARD, CACHED_COPIES = 1.3, 5.0  # torch keeps freed blocks: 1.10 and 1.71 GiB reserved (vllm#9003)
GRAPH_MIB_PER_LAYER = 0.3  # fitted: 24 MiB a graph at 64 layers (vllm#50780), 0.36 GiB for 16 graphs
# "nccl_device" by vllm#10511 (1.79 GiB more on two ranks); "device" fitted to the six models of vllm#4454
NON_TORCH_MIB = {"alone": 200, "ranks": 350, "v1_ranks": 1000, "device": 350, "context": 300, "nccl_device": 1800}
_MOE_CHUNK = 32768  # tokens that fused experts take at once


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU, and how they were found."""

    bytes: int
    how: str


@dataclass(frozen=True)
class Overheads:
    activation: Estimate
    logits: Estimate
    graphs: Estimate
    non_torch: Estimate


def overheads(deployment: Deployment, semantics: Semantics, stage_layers: int) -> Overheads:
    """Estimates for a resolved deployment; stated figures win. Raises `ConfigError` where the model is too unknown."""
    forward, logits = _torch_peak(deployment, semantics, stage_layers)
    graphs = _stated(deployment.cuda_graph_bytes, "stated") or _graphs(deployment, semantics, stage_layers)
    non_torch = _stated(deployment.non_torch_bytes, "stated") or _non_torch(deployment, semantics)
    return Overheads(forward, logits, graphs, non_torch)


def _stated(value: int | None, how: str) -> Estimate | None:
    return None if value is None else Estimate(value, how)


def _torch_peak(deployment: Deployment, semantics: Semantics, stage_layers: int) -> tuple[Estimate, Estimate]:
    if deployment.activation_bytes is not None:
        return Estimate(deployment.activation_bytes, "stated"), Estimate(0, "within the stated activation peak")
    forward = forward_peak(deployment)
    sampler = sampler_peak(deployment, semantics)
    if semantics.profile in ("device", "device_total"):
        held = _held_by_collectives(deployment, semantics, stage_layers)
        cached = int(forward.bytes * CACHED_FORWARD) + held
        how = f"{forward.how}, x {CACHED_FORWARD} for blocks that torch keeps"
        if held:
            how += f"; {gib(held)} that collectives kept until the step's end"
        share = CACHED_COPIES / SAMPLER_COPIES["v0"]
        return Estimate(cached, how), Estimate(int(sampler.bytes * share), f"{sampler.how}, half of it in those blocks")
    extra = max(0, sampler.bytes - forward.bytes)
    reuse = "more than the activations, which are freed by then" if extra else "in memory the activations have freed"
    return forward, Estimate(extra, f"{sampler.how}: {reuse}")


def forward_peak(deployment: Deployment) -> Estimate:
    """Tensors of one layer at the largest batch: tokens x bytes x (3 x hidden + 3 x intermediate / tp).

    From max_num_batched_tokens, never from max_model_len. The residual, the normed input and the output; gate and up
    projections and their product. Experts take `experts_per_token` copies, in chunks; latent attention expands its
    heads when it prefills.
    """
    shape, tp = deployment.shape, deployment.tp
    tokens = deployment.max_num_batched_tokens or 0
    if shape.hidden_size is None:
        raise ConfigError(
            "without the model's hidden size no activation peak can be estimated: give a config.json, or state "
            "--activation-gib, or the KV memory with --kv-gib"
        )
    width = _WIDTH.get(shape.dtype, 2)
    hidden = 3 * shape.hidden_size
    inner = 3 * (shape.intermediate_size or 4 * shape.hidden_size) // tp
    per_token = hidden + max(inner, _attention_width(shape) // tp)
    peak = tokens * width * per_token
    how = f"{tokens:,} tokens x {width} bytes x (3 x {shape.hidden_size:,} + {per_token - hidden:,})"
    if shape.experts_per_token and (shape.moe_intermediate_size or shape.intermediate_size):
        expert = (shape.moe_intermediate_size or shape.intermediate_size or 0) // tp
        routed = shape.experts_per_token * (max(2 * expert, shape.hidden_size) + expert)
        experts = min(tokens, _MOE_CHUNK) * width * routed + tokens * width * hidden
        if experts > peak:
            peak, how = experts, f"{tokens:,} tokens x {width} bytes through {shape.experts_per_token} experts each"
    return Estimate(peak, how)


def _attention_width(shape: ModelShape) -> int:
    heads = shape.num_q_heads or 0
    widest = 0
    for group in shape.layers:
        if group.attention == "latent":
            widest = max(widest, heads * 5 * (group.v_head_dim or 128))  # q and expanded k of 192, v and output of 128
        elif group.head_dim:
            widest = max(widest, (2 * heads + 2 * group.num_kv_heads) * group.head_dim)
    return widest


def sampler_peak(deployment: Deployment, semantics: Semantics) -> Estimate:
    """Logits and the sampler's work on them: max_num_seqs x vocabulary x 4 bytes x the copies alive at once."""
    vocab = deployment.shape.vocab_size
    if vocab is None:
        return Estimate(0, "the vocabulary is not known: not counted")
    if semantics.engine == "vllm":
        key = "v0" if not semantics.v1 else "v1" if semantics.version >= _SORTLESS_SINCE else "v1_sort"
        copies = SAMPLER_COPIES[key]
    else:
        copies = 3.0
    seqs = deployment.max_num_seqs or 0
    if semantics.engine == "vllm":
        seqs = min(seqs, deployment.max_num_batched_tokens or seqs)
    return Estimate(int(seqs * vocab * 4 * copies), f"{seqs:,} requests x {vocab:,} x 4 bytes x {copies:g} copies")


def _held_by_collectives(deployment: Deployment, semantics: Semantics, stage_layers: int) -> int:
    """torch kept every all-reduced tensor until the step's end; vLLM switched that off in 0.2.6.

    Two a layer and one after the embedding, each tokens x hidden.
    """
    if not semantics.keeps_reduced_tensors or deployment.tp == 1 or semantics.profile == "torch_peak":
        return 0
    tokens, hidden = deployment.max_num_batched_tokens or 0, deployment.shape.hidden_size or 0
    return (2 * stage_layers + 1) * tokens * hidden * _WIDTH.get(deployment.shape.dtype, 2)


def capture_sizes(deployment: Deployment, semantics: Semantics) -> int:
    """Batch sizes of vLLM that get a graph each."""
    if not semantics.v1:
        return 35
    if semantics.version < (0, 11):
        return 67
    capability = deployment.gpu.compute_capability if deployment.gpu else None
    query, ceiling = 1, 512
    if semantics.version >= (0, 32):  # as read there
        query += deployment.num_speculative_tokens
        ceiling = 1024 if capability is not None and capability[0] == 10 else 512
    largest = min(2 * (deployment.max_num_seqs or 1) * query, ceiling, deployment.max_num_batched_tokens or ceiling)
    return sum(size <= largest for size in (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)))


def _graphs(deployment: Deployment, semantics: Semantics, stage_layers: int) -> Estimate:
    if deployment.enforce_eager or semantics.engine == "kvoncall":
        return Estimate(0, "no graphs")
    if semantics.engine == "vllm":
        graphs = capture_sizes(deployment, semantics)
        if semantics.version >= (0, 11):
            graphs *= 2  # piecewise, and whole for batches of decodes
    else:
        graphs = 50
    size = int(graphs * stage_layers * GRAPH_MIB_PER_LAYER * _MIB)
    return Estimate(size, f"{graphs} graphs x {stage_layers} layers x {GRAPH_MIB_PER_LAYER} MiB (rough)")


def _non_torch(deployment: Deployment, semantics: Semantics) -> Estimate:
    if semantics.engine == "kvoncall":
        return Estimate(0, "the process is the device")
    ranks = deployment.tp * deployment.pp > 1
    if semantics.profile in ("device", "device_total"):
        mib = NON_TORCH_MIB["device"] + (NON_TORCH_MIB["nccl_device"] if ranks else 0)
        mib += NON_TORCH_MIB["context"] if semantics.profile == "device_total" else 0
    elif not ranks or (semantics.engine == "vllm" and semantics.version < (0, 2, 5)):
        mib = NON_TORCH_MIB["alone"] if semantics.version >= (0, 6, 4) or semantics.engine != "vllm" else 0
    else:
        old = semantics.engine == "vllm" and not semantics.v1
        mib = NON_TORCH_MIB["ranks" if old else "v1_ranks"]
    what = "context, kernels and communication between ranks" if ranks else "context and kernels"
    return Estimate(mib * _MIB, f"{what} (estimate)")


def lora_bytes(deployment: Deployment) -> Estimate:
    """Buffers for `max_loras` adapters of `max_lora_rank`, allocated whether adapters are loaded or not."""
    rank, adapters, shape = deployment.max_lora_rank, deployment.max_loras, deployment.shape
    if not rank or not adapters:
        return Estimate(0, "none")
    if shape.hidden_size is None:
        raise ConfigError("without the model's hidden size LoRA buffers cannot be sized: give a config.json")
    heads = shape.num_q_heads or 0
    widths = [(heads * g.head_dim, g.num_kv_heads * g.head_dim, g.count) for g in shape.layers if g.head_dim]
    inner, hidden, tp = shape.intermediate_size or 4 * shape.hidden_size, shape.hidden_size, deployment.tp
    total = 0
    for queries, keys, count in widths:
        shrink = 5 * hidden + (queries + inner) // tp
        expand = (queries + 2 * keys + 2 * inner) // tp + 2 * hidden
        total += count * (shrink + expand)
    size = total * rank * adapters * 2 // deployment.pp
    return Estimate(size, f"{adapters} adapters of rank {rank} over all linear layers, 2 bytes a value")
