"""Log-likelihood measures of windows of text: perplexity, KL divergence and top-1 agreement with a baseline.

A window's item has `data` {"logprobs": [float], "top": [[[token id, logprob], ...]], "turns": [int] | None}: the
model's log probability (natural) of each judged token and its TOP most likely tokens at that place.
KL(baseline || run) is taken over the tokens both runs told, everything else folded into one: by the data
processing inequality this never exceeds the true KL, so it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probe.store import QualityItem

TEXT = "text"
"""The task of a window's item."""
TOP = 20
"""Alternatives asked for: OpenAI's and vLLM's limit."""
_LEAST = 1e-6  # probability below which rounding decides


@dataclass(frozen=True)
class Token:
    """What a run told at one place: the judged token's logprob, and (token id, logprob) of the likeliest ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    turn: int | None


def window_data(
    entries: Sequence[Mapping[str, Mapping[str, Any]]], token_ids: Sequence[int], turns: Sequence[int] | None
) -> dict[str, Any]:
    """`data` of a window from entries of `prompt_logprobs` ({token id: {"logprob", "rank"}}) and the judged tokens."""
    logprobs, top = [], []
    for entry, judged in zip(entries, token_ids, strict=True):
        logprobs.append(round(float(entry[str(judged)]["logprob"]), 5))
        ranked = sorted((int(told["rank"]), int(token), float(told["logprob"])) for token, told in entry.items())
        top.append([[token, round(logprob, 5)] for _, token, logprob in ranked[:TOP]])
    return {"logprobs": logprobs, "top": top, "turns": None if turns is None else list(turns)}


def likelihood(
    items: Iterable[QualityItem], baseline_items: Iterable[QualityItem] | None = None
) -> dict[str, Any] | None:
    """{"tokens", "perplexity", "mean_kl", "top1_agreement", "by_turn"}; None without windows.

    mean_kl (nats, a lower bound) and top1_agreement are None without the same windows of a baseline.
    """
    tokens = {item.key: _tokens(item) for item in items if item.task == TEXT}
    if not any(tokens.values()):
        return None
    before = {item.key: _tokens(item) for item in baseline_items or () if item.task == TEXT}
    flat = [token for window in tokens.values() for token in window]
    pairs = [pair for key, window in tokens.items() for pair in zip(before.get(key, ()), window, strict=False)]
    turns = sorted({token.turn for token in flat if token.turn is not None})
    by_turn = []
    for turn in turns:
        count = sum(token.turn == turn for token in flat)
        by_turn.append({"turn": turn, **_agreement([p for p in pairs if p[1].turn == turn]), "tokens": count})
    mean = sum(token.logprob for token in flat) / len(flat)
    return {
        "tokens": len(flat),
        "perplexity": math.exp(min(-mean, 700.0)),
        **_agreement(pairs),
        "by_turn": by_turn,
    }


def _agreement(pairs: Sequence[tuple[Token, Token]]) -> dict[str, float | None]:
    if not pairs:
        return {"mean_kl": None, "top1_agreement": None}
    same = sum(before.top[0][0] == after.top[0][0] for before, after in pairs)
    return {"mean_kl": sum(kl(b, a) for b, a in pairs) / len(pairs), "top1_agreement": same / len(pairs)}


def kl(before: Token, after: Token) -> float:
    """Lower bound of KL(before || after) in nats, from the tokens both told and the rest as one."""
    told = dict(after.top)
    shared = [(math.exp(logprob), math.exp(told[token])) for token, logprob in before.top if token in told]
    rest = (1 - sum(p for p, _ in shared), 1 - sum(q for _, q in shared))
    terms = [p * math.log(p / max(q, _LEAST)) for p, q in (*shared, rest) if p > _LEAST]
    return max(0.0, sum(terms))


def _tokens(item: QualityItem) -> list[Token]:
    turns = item.data.get("turns") or [None] * len(item.data["logprobs"])
    rows = zip(item.data["logprobs"], item.data["top"], turns, strict=True)
    return [Token(logprob, tuple((int(t), float(p)) for t, p in top), turn) for logprob, top, turn in rows]
