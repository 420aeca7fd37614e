"""Checks of the model as it is served: what a token takes, how it is divided, how long requests may be."""

from __future__ import annotations

from collections.abc import Mapping

from runbooks.knowledge.attention import kind_of
from runbooks.knowledge.checklist_asked import (
    DONE,
    NO_MODEL,
    NO_PLAN,
    NO_TARGET,
    NO_TRAFFIC,
    NOT_HERE,
    OPEN,
    Answer,
    Asked,
    Check,
    unknown,
)

_LONGER = 4  # times the longest request seen: a limit that nobody uses
_WEIGHTS_SHARE, _KV_SHARE = 0.6, 0.2


def _attention(asked: Asked) -> Answer:
    group, shape = asked.kv_group(), asked.shape
    found = asked.facts.kv_bytes_per_token if asked.facts is not None else None
    if found is None and asked.plan is not None:
        found = asked.plan.kv_bytes_per_token
    if group is None or shape is None or not found:
        return NO_MODEL
    return Answer(DONE, "done", {"kind": kind_of(group, shape.num_q_heads or 0), "bytes": found})


def _heads_divide(asked: Asked) -> Answer:
    group, tp = asked.kv_group(), asked.tp
    if group is None:
        return NO_MODEL
    if tp == 1:
        return Answer(DONE, "one")
    if group.attention == "latent":
        return Answer(OPEN, "latent", {"tp": tp})
    heads = group.num_kv_heads
    if heads >= tp:
        return Answer(DONE, "done", {"heads": heads, "tp": tp, "each": heads // tp})
    return Answer(OPEN, "open", {"heads": heads, "tp": tp, "copies": tp // max(1, heads)})


def _context_limit(asked: Asked) -> Answer:
    if asked.facts is None:
        return NO_TARGET
    limit, seen = asked.facts.max_model_len, asked.facts.traffic.tokens_per_request_peak
    if limit is None:
        return unknown("the limit in force", "当前上限")
    if seen is None:
        return NO_TRAFFIC
    key = "open" if limit > _LONGER * seen else "done"
    return Answer(OPEN if key == "open" else DONE, key, {"limit": limit, "seen": seen, "times": limit / max(1, seen)})


def _weights_share(asked: Asked) -> Answer:
    found = asked.plan
    total = sum(part.bytes for part in found.parts) if found is not None else 0
    if found is None or not total:
        return NO_PLAN
    share, kv = found.part("weights") / total, max(0, found.kv_cache_bytes) / total
    tight = share > _WEIGHTS_SHARE and kv < _KV_SHARE
    return Answer(OPEN if tight else DONE, "open" if tight else "done", {"share": share, "kv": kv})


def _window_layers(asked: Asked) -> Answer:
    if asked.shape is None:
        return NO_MODEL
    groups = [group for group in asked.shape.layers if group.attention in ("sliding", "chunked") and group.window]
    if not groups:
        return Answer(NOT_HERE, "none")
    figures = {"count": sum(group.count for group in groups), "window": groups[0].window}
    off = asked.in_force("--disable-hybrid-kv-cache-manager").value
    if asked.plan is not None and not asked.plan.deployment.hybrid_kv_cache:
        off = True
    return Answer(OPEN if off else DONE, "open" if off else "done", figures)


CHECKS: Mapping[str, Check] = {
    "attention-kind": _attention,
    "heads-divide": _heads_divide,
    "context-limit": _context_limit,
    "weights-share": _weights_share,
    "window-layers": _window_layers,
}
