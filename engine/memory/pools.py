"""The KV pool of every pipeline stage: its layers, their formats, and how the engine lays them out in blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.kv_formats import split_layer_words
from engine.memory.deployment import Deployment
from engine.memory.pages import (
    GROWING,
    LayerKind,
    Layout,
    Rank,
    block_size_for_exact,
    page_bytes,
    shared_pool,
    single_table,
    two_pools,
)
from engine.memory.semantics import Semantics
from engine.memory.shape import LayerGroup, ModelShape
from engine.memory.slots import canonical_format, estimate_note
from kernels.formats import KV_FORMATS

SGLANG_WINDOW_SHARE = 0.8  # --swa-full-tokens-ratio
SGLANG_STATE_SHARE = 0.9  # --mamba-full-memory-ratio: state memory over KV memory
_STATES_CACHED_SINCE = (0, 26)  # vLLM: prefix caching of recurrent models by default, which keeps two states a request
_CHUNKED_SINCE = (0, 12)  # vLLM: chunked local attention in the hybrid cache
_ALIGNED_SINCE = (0, 32)  # vLLM: blocks that suit two formats beside each other, as read there; older not read
EDGE_FORMATS = ("turboquant_", "ultraquant_")  # vLLM keeps their edge layers as the model computes, without recurrence
EDGE_LAYERS = 2  # at either end


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
    held = [_kinds(groups, deployment, deployment.shape) for groups in _spread(deployment.shape.layers, layers)]
    if deployment.draft is not None:
        draft = replace(deployment, kv_cache_dtype_skip_layers=())
        held[-1] += _kinds(deployment.draft.layers, draft, deployment.draft)
    whole = [kind for kinds in held for kind in kinds]
    stages = []
    for index, kinds in enumerate(held):
        layout = _layout(kinds, whole, deployment, semantics)
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


def _layout(held: list[LayerKind], whole: list[LayerKind], deployment: Deployment, semantics: Semantics) -> Layout:
    """The pool of a stage that holds these layers of the whole model."""
    rank = rank_of(deployment)
    block_size = deployment.block_size or 1
    if semantics.engine == "sglang" and deployment.hybrid_kv_cache:
        return two_pools(held, block_size, rank, SGLANG_WINDOW_SHARE)
    if semantics.engine != "vllm" or not semantics.v1:
        return single_table(held, block_size, rank)
    billed = _billed_as_full(whole, deployment, semantics)
    drafted = deployment.num_speculative_tokens
    held, kinds = ([_widened(_as_full(kind, billed), drafted) for kind in layers] for layers in (held, whole))
    batches = semantics.in_flight_batches + (deployment.pp - 1 if semantics.in_flight_batches > 1 else 0)
    cached = deployment.enable_prefix_caching
    if cached is None:
        attends = any(kind.group.attention not in ("recurrent", "none") for kind in kinds)
        cached = attends and semantics.version >= _STATES_CACHED_SINCE
    window_page = 0
    if semantics.version >= _ALIGNED_SINCE and _two_formats(kinds, deployment):
        exact = canonical_format("auto", deployment.shape.dtype)
        aligned = block_size_for_exact(kinds, exact, block_size, rank)
        if aligned != block_size:
            block_size = aligned
            packed = [kind for kind in kinds if kind.group.attention in GROWING and kind.kv_format != exact]
            window_page = max((page_bytes(kind, block_size, rank) for kind in packed), default=0)
    return shared_pool(
        kinds,
        held,
        block_size,
        rank,
        in_flight=batches * (deployment.max_num_batched_tokens or 0),
        state_blocks=(2 if cached and semantics.version >= (0, 15) else 1) + deployment.num_speculative_tokens,
        window_page=window_page,
    )


def _two_formats(kinds: list[LayerKind], deployment: Deployment) -> bool:
    """Whether vLLM prepares its blocks for layers that keep the model's format, whether or not one does."""
    edges = canonical_format(deployment.kv_cache_dtype, deployment.shape.dtype).startswith(EDGE_FORMATS)
    recurrent = any(kind.group.attention == "recurrent" for kind in kinds)
    return bool(deployment.kv_cache_dtype_skip_layers) or (edges and not recurrent)


def _billed_as_full(whole: list[LayerKind], deployment: Deployment, semantics: Semantics) -> tuple[str, ...]:
    """Kinds that keep every token all the same. Without the hybrid cache these are windows beside full attention."""
    found = {kind.group.attention for kind in whole}
    if not semantics.hybrid_manager:
        return ("sliding", "chunked")
    if deployment.hybrid_kv_cache:
        return ("chunked",) if semantics.version < _CHUNKED_SINCE else ()
    if "recurrent" in found and found - {"recurrent", "none"}:
        raise ConfigError(
            "--disable-hybrid-kv-cache-manager does not go with recurrent layers beside attention: leave it out"
        )
    return ("sliding", "chunked") if found & set(GROWING) else ()


def _as_full(kind: LayerKind, billed: tuple[str, ...]) -> LayerKind:
    if kind.group.attention not in billed:
        return kind
    return replace(kind, group=replace(kind.group, attention="full", window=None))


def _widened(kind: LayerKind, drafted: int) -> LayerKind:
    """With a state that has room for the inputs of speculated tokens."""
    group = kind.group
    if not drafted or not group.state_row_bytes:
        return kind
    return replace(kind, group=replace(group, state_bytes=group.state_bytes + drafted * group.state_row_bytes))


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
    """Layers by their format. Those that the flag names by index, and so keep the model's precision, are taken from all
    kinds alike, since kinds alternate."""
    main = canonical_format(deployment.kv_cache_dtype, shape.dtype)
    exact = canonical_format("auto", shape.dtype)
    names = split_layer_words(deployment.kv_cache_dtype_skip_layers)
    skipped_windows = any(name.strip().lower() in ("sliding_window", "sliding") for name in names)
    indices = {index for name in names if (index := _layer_index(name)) is not None}
    if main.startswith(EDGE_FORMATS) and len({group.attention for group in groups}) == 1:
        edge = min(EDGE_LAYERS, shape.num_layers // 2)
        indices |= {*range(edge), *range(shape.num_layers - edge, shape.num_layers)}
    total = sum(group.count for group in groups)
    named = min(total, round(len(indices) * total / max(1, shape.num_layers)))
    spread = {replace(group, count=1): group.count for group in _spread(groups, (named, total - named))[0]}
    kinds = []
    for group in groups:
        kept = spread.get(replace(group, count=1), 0)
        if skipped_windows and group.attention == "sliding":
            kept = group.count
        if group.attention in ("recurrent", "none"):
            kept = 0
        if kept:
            kinds.append(LayerKind(replace(group, count=kept), exact))
        if group.count > kept:
            kinds.append(LayerKind(replace(group, count=group.count - kept), main))
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
