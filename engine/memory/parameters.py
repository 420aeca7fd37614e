"""Parameters of a decoder, counted from the sizes in its config, in the classes that quantization treats alike.

Checked against the models that `transformers` builds: within 1% for the presets (tests/engine_memory_inputs). Heads
of multi-token prediction are not counted: engines load them only as a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.memory import families
from engine.memory.hf_values import HfValues, family_of
from engine.memory.parameters_mixer import mixer_parameters
from engine.memory.parameters_mlp import mlp_parameters


@dataclass(frozen=True)
class Parameters:
    """Counts. `replicated` of them are held whole by every tensor-parallel rank, `kv_projection` by ranks that share
    a KV head; both are within the other classes. `other`: norms, routers, convolutions."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    dense: int = 0
    experts: int = 0
    shared_experts: int = 0
    other: int = 0
    vision: int = 0
    active_experts: int = 0
    replicated: int = 0
    kv_projection: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.embedding
            + self.head
            + self.attention
            + self.dense
            + self.experts
            + self.shared_experts
            + self.other
            + self.vision
        )

    @property
    def active(self) -> int:
        """Those a token passes through: of the experts only the chosen ones."""
        return self.total - self.experts + self.active_experts


def count_parameters(values: HfValues, kinds: list[str]) -> Parameters | None:
    """None where the config does not tell sizes that only weights need (vocabulary, hidden and MLP sizes)."""
    hidden, vocab = values.optional("hidden_size"), values.optional("vocab_size")
    family = family_of(values.model_type)
    if hidden is None or vocab is None or family in families.NOT_COUNTED:
        return None
    attention = dense = experts = active = shared = other = replicated = kv_projection = 0
    for index, kind in enumerate(kinds):
        mixed, whole, kv = mixer_parameters(values, kind, hidden, family, index)
        attention += mixed
        replicated += whole
        kv_projection += kv
        mlp = mlp_parameters(values, index, hidden, family)
        if mlp is None:
            return None
        dense, experts, active, shared = (
            dense + mlp.dense,
            experts + mlp.experts,
            active + mlp.active,
            shared + mlp.shared,
        )
        norms = _norms(hidden, family)
        other, replicated = other + mlp.router + norms, replicated + mlp.router + norms
    embedding, head, more = _embeddings(values, hidden, vocab, family, len(kinds))
    other += more + hidden
    return Parameters(
        embedding=embedding,
        head=head,
        attention=attention,
        dense=dense,
        experts=experts,
        shared_experts=shared,
        other=other,
        vision=_vision(values, hidden),
        active_experts=active,
        replicated=replicated + hidden,
        kv_projection=kv_projection,
    )


def tied(values: HfValues) -> bool:
    """Whether the output head is the embedding."""
    for part in (values.text, values.config):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    if family_of(values.model_type) in families.TIED:
        return True
    stated = values.defaults.get("tie_word_embeddings")
    if stated is None:
        values.assume("tie_word_embeddings is missing; the embedding is taken to be the output head too")
        return True
    return bool(stated)


def _embeddings(values: HfValues, hidden: int, vocab: int, family: str, layers: int) -> tuple[int, int, int]:
    width = values.optional("word_embed_proj_dim") or hidden
    embedding = vocab * width
    more = 2 * hidden * width if width != hidden else 0
    if family in families.LEARNED_POSITIONS:
        embedding += ((values.optional("max_position_embeddings") or 0) + (2 if family == "opt" else 0)) * hidden
    per_layer = values.optional("hidden_size_per_layer_input")
    if per_layer:  # Gemma 3n and 4: a small embedding of its own for every layer
        embedding += (values.optional("vocab_size_per_layer_input") or vocab) * layers * per_layer
        more += hidden * layers * per_layer + layers * (2 * hidden * per_layer + hidden)
    return embedding, 0 if tied(values) else vocab * hidden, more


def _norms(hidden: int, family: str) -> int:
    if family == "olmo":
        return 0
    each = 2 * hidden if family in families.NORM_BIAS else hidden
    if family in families.ONE_NORM:
        return each
    return each * (4 if family in families.FOUR_NORMS else 2)


def _vision(values: HfValues, hidden: int) -> int:
    """An estimate of the vision tower and its projector; 0 for text models."""
    vision = values.config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return 0

    def first(*names: str) -> int:
        return next(
            (int(vision[name]) for name in names if isinstance(vision.get(name), int) and 0 < vision[name] < 10**9), 0
        )

    width = first("hidden_size", "embed_dim", "width", "vt_hidden_size")
    layers = first("num_hidden_layers", "depth", "layers", "vt_num_hidden_layers")
    if not width or not layers:
        values.assume("the vision tower's size is not in the config; its weights are not counted")
        return 0
    inner = first("intermediate_size", "vt_intermediate_size") or 4 * width
    gated = 3 if "silu" in str(vision.get("hidden_act", "")) else 2
    patch = first("patch_size") or 14
    tower = layers * (4 * width * width + gated * width * inner) + 3 * patch * patch * width
    merge = first("spatial_merge_size") or 1
    projector = (
        (merge * merge * width) ** 2 + merge * merge * width * hidden if merge > 1 else width * hidden + hidden**2
    )
    values.assume(
        f"a vision tower of about {(tower + projector) / 1e6:,.0f} million parameters is counted with the weights"
    )
    return tower + projector
