"""The KV pool of every pipeline stage: its layers, their formats, and how the engine lays them out in blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.kv_formats import split_layer_words
from engine.memory.deployment import Deployment
from engine.memory.pages import LayerKind, Layout, Rank, page_bytes, shared_pool, single_table, two_pools
from engine.memory.semantics import Semantics
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.slots import canonical_format, estimate_note
from kernels.formats import KV_FORMATS

SGLANG_WINDOW_SHARE = 0.8  # --swa-full-tokens-ratio
SGLANG_STATE_SHARE = 0.9  # --mamba-full-memory-ratio: state memory over KV memory
_STATES_CACHED_SINCE = (0, 26)  # vLLM: prefix caching of recurrent models by default, which keeps two states a request
_CHUNKED_SINCE = (0, 12)  # vLLM: chunked local attention in the hybrid cache
TURBOQUANT_EDGE_LAYERS = 4  # vLLM keeps the first two and the last two layers of these formats as the model computes


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. kinds: its layers, those of the draft model on the last stage included."""

    index: int
    num_layers: int
    kinds: tuple[LayerKind, ...]
    layout: Layout
    pool_share: float  # of the KV memory that the blocks get; the rest is recurrent state
    notes: tuple[str, ...] = ()


def stages_of(deployment: Deployment, semantics: Semantics) -> list[Stage]:
    """The stages of a resolved deployment. Raises `ConfigError` for what no engine could lay out."""
    layers = deployment.stage_layers or (deployment.shape.num_layers,)
    if len(layers) != deployment.pp or sum(layers) != deployment.shape.num_layers:
        raise ConfigError(
            f"stages of {', '.join(map(str, layers))} layers do not make {deployment.pp} stages of "
            f"{deployment.shape.num_layers} layers: state one number a stage that add up"
        )
    shares = _spread(deployment.shape.layers, layers)
    stages = []
    for index, groups in enumerate(shares):
        kinds = _kinds(groups, deployment, deployment.shape)
        if deployment.draft is not None and index == deployment.pp - 1:
            draft = replace(deployment, kv_cache_dtype_skip_layers=())
            kinds += _kinds(deployment.draft.layers, draft, deployment.draft)
        layout = _layout(kinds, deployment, semantics)
        recurrent = any(kind.group.attention == "recurrent" for kind in kinds)
        share = 1 / (1 + SGLANG_STATE_SHARE) if semantics.engine == "sglang" and recurrent else 1.0
        notes = tuple(f"{kind.kv_format}: {note}" for kind in kinds if (note := estimate_note(kind.kv_format)))
        stages.append(Stage(index, layers[index], tuple(kinds), layout, share, tuple(dict.fromkeys(notes))))
    return stages


def rank_of(deployment: Deployment) -> Rank:
    """How a rank divides attention. With data-parallel attention only tp / dp ranks share a request's heads."""
    if not deployment.enable_dp_attention:
        return Rank(deployment.tp, deployment.dcp)
    if deployment.tp % deployment.dp:
        raise ConfigError(
            f"data-parallel attention over {deployment.dp} ranks needs a tensor-parallel size that it divides, "
            f"not {deployment.tp}"
        )
    return Rank(deployment.tp // deployment.dp, deployment.dcp)


def _layout(kinds: list[LayerKind], deployment: Deployment, semantics: Semantics) -> Layout:
    rank = rank_of(deployment)
    block_size = deployment.block_size or 1
    if semantics.engine == "sglang" and deployment.hybrid_kv_cache:
        return two_pools(kinds, block_size, rank, SGLANG_WINDOW_SHARE)
    if semantics.engine != "vllm" or not semantics.v1:
        return single_table(kinds, block_size, rank)
    if not (deployment.hybrid_kv_cache and semantics.hybrid_manager):
        kinds = [_as_full(kind) for kind in kinds]
    elif semantics.version < _CHUNKED_SINCE:
        kinds = [_as_full(kind) if kind.group.attention == "chunked" else kind for kind in kinds]
    batches = semantics.in_flight_batches + (deployment.pp - 1 if semantics.in_flight_batches > 1 else 0)
    cached = deployment.enable_prefix_caching
    if cached is None:
        cached = semantics.version >= _STATES_CACHED_SINCE
    return shared_pool(
        kinds,
        block_size,
        rank,
        in_flight=batches * (deployment.max_num_batched_tokens or 0),
        state_blocks=(2 if cached and semantics.version >= (0, 15) else 1) + deployment.num_speculative_tokens,
    )


def _as_full(kind: LayerKind) -> LayerKind:
    if kind.group.attention not in ("sliding", "chunked"):
        return kind
    return replace(kind, group=replace(kind.group, attention="full", window=None))


def _spread(groups: tuple[LayerGroup, ...], stage_layers: tuple[int, ...]) -> list[tuple[LayerGroup, ...]]:
    """Each group's layers over the stages, as evenly as their sizes allow: kinds of layers alternate in all models."""
    total = sum(stage_layers)
    shares: list[list[LayerGroup]] = [[] for _ in stage_layers]
    room = list(stage_layers)
    for position, group in enumerate(groups):
        left = group.count
        last_group = position == len(groups) - 1
        for index, size in enumerate(stage_layers):
            later = sum(room[index + 1 :])
            ideal = room[index] if last_group else round(group.count * size / total)
            count = max(left - later, min(ideal, left, room[index]))
            room[index] -= count
            left -= count
            if count:
                shares[index].append(replace(group, count=count))
    return [tuple(share) for share in shares]


def _kinds(groups: tuple[LayerGroup, ...], deployment: Deployment, shape: ModelShape) -> list[LayerKind]:
    """Layers by their format. Layers that keep the model's precision are taken where the flag names them."""
    main = canonical_format(deployment.kv_cache_dtype, shape.dtype)
    exact = canonical_format("auto", shape.dtype)
    names = split_layer_words(deployment.kv_cache_dtype_skip_layers)
    skipped_windows = any(name.strip().lower() in ("sliding_window", "sliding") for name in names)
    indices = {index for name in names if (index := _layer_index(name)) is not None}
    if main.startswith("turboquant_") and len({group.attention for group in groups}) == 1 and not indices:
        indices = set(range(min(TURBOQUANT_EDGE_LAYERS, shape.num_layers)))
    skipped = round(len(indices) * sum(group.count for group in groups) / max(1, shape.num_layers))
    kinds = []
    for group in groups:
        kept = group.count if skipped_windows and group.attention == "sliding" else min(skipped, group.count)
        if group.attention in ("recurrent", "none"):
            kept = 0
        skipped = max(0, skipped - kept)
        if kept:
            kinds.append(LayerKind(replace(group, count=kept), kept, exact))
        if group.count > kept:
            kinds.append(LayerKind(replace(group, count=group.count - kept), group.count - kept, main))
    return kinds


def _layer_index(name: str) -> int | None:
    """ "3", "model.layers.3.self_attn" -> 3."""
    for part in name.strip().split("."):
        if part.isdigit():
            return int(part)
    return None


def open_blocks_bytes(stage: Stage, deployment: Deployment) -> int:
    """The embedded engine's blocks that are not full yet, beside the pool: one a sequence, at full precision."""
    rank, block = rank_of(deployment), deployment.block_size or 1
    exact = canonical_format("auto", deployment.shape.dtype)
    open_kinds = [
        replace(kind, kv_format=exact)
        for kind in stage.kinds
        if kind.kv_format in KV_FORMATS and KV_FORMATS[kind.kv_format].keeps_open_blocks
    ]
    per_sequence = sum(kind.count * page_bytes(kind, block, rank) for kind in open_kinds)
    return (deployment.max_num_seqs or 0) * per_sequence


def kv_bytes_of(kinds: tuple[LayerKind, ...], deployment: Deployment) -> int:
    """Bytes one token takes in all of these layers, as if every one kept it (the uniform cost)."""
    rank = rank_of(deployment)
    block = deployment.block_size or 1
    paged = [kind for kind in kinds if kind.group.attention not in ("recurrent", "none")]
    return -(-sum(kind.count * page_bytes(kind, block, rank) for kind in paged) // block)
