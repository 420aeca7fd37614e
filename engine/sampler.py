"""Chooses the next token of every sequence of a step from its logits.

A batch in which everybody is greedy and nobody asks for logprobs is one argmax. Otherwise rows are handled
together: temperature, top-k and top-p in one sort, then a draw by the exponential race (argmax of p / e with
e ~ Exp(1), which samples from p). A seeded request draws its e from a generator of its own, so its tokens do
not depend on who shares the batch. Logprobs are those of the model, before temperature and filters, as vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability (natural) of a token and the most likely ones at its place, best first.

    rank: 1 for the most likely token. top: (token_id, logprob), as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class SamplingState:
    """What one request brings to the sampler over its life; `None` instead of it means plain greedy."""

    params: SamplingParams
    generator: torch.Generator | None
    output_token_ids: list[int]  # the request's own growing list
    suppressed: list[int] = field(default_factory=list)  # token ids forbidden until min_tokens are out

    @classmethod
    def of(cls, request: Request, device: torch.device) -> SamplingState | None:
        """The state of a request, or `None` when argmax is all it needs."""
        params = request.params
        if params.temperature == 0 and params.logprobs is None and params.min_tokens == 0:
            return None
        generator = None
        if params.seed is not None and params.temperature > 0:
            generator = torch.Generator(device).manual_seed(params.seed)
        suppressed: list[int] = []
        if params.min_tokens:
            suppressed = list(request.stop_token_ids)
            if request.eos_token_id is not None and not params.ignore_eos:
                suppressed.append(request.eos_token_id)
        return cls(params, generator, request.output_token_ids, suppressed)


class Sampler:
    """Samples batches. Requests without a seed share one generator seeded with `--seed`."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def sample(
        self, logits: Tensor, states: Sequence[SamplingState | None]
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Token ids for logits [N, vocab], and logprobs where asked for (`None` when nobody asks)."""
        if not any(states):
            greedy: list[int] = logits.argmax(dim=-1).tolist()
            return greedy, None
        raw = logits
        logits = _suppress_stops(logits, states)
        chosen = logits.argmax(dim=-1)
        rows = [i for i, state in enumerate(states) if state is not None and state.params.temperature > 0]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            active = [state for state in states if state is not None and state.params.temperature > 0]
            chosen[index] = self._draw(logits.index_select(0, index).float(), active)
        tokens: list[int] = chosen.tolist()
        counts = [None if state is None else state.params.logprobs for state in states]
        if all(count is None for count in counts):
            return tokens, None
        return tokens, token_logprobs(raw, tokens, counts)

    def _draw(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """One token per row of float32 logits [N, vocab] at the row's temperature, top-k and top-p."""
        params = [state.params for state in states]
        temperature = torch.tensor([p.temperature for p in params], device=logits.device)
        logits = logits / temperature.unsqueeze(1).clamp_min(1e-5)
        if any(p.top_k for p in params) or any(p.top_p < 1 for p in params):
            logits = _keep_most_likely(logits, [p.top_k for p in params], [p.top_p for p in params])
        race = torch.empty_like(logits).exponential_(generator=self._generator)
        for row, state in enumerate(states):
            if state.generator is not None:
                race[row].exponential_(generator=state.generator)
        return logits.softmax(dim=-1).div_(race).argmax(dim=-1)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Logprobs of given tokens under logits [N, vocab]; row i lists counts[i] alternatives, `None` skips it."""
    wanted = [i for i, count in enumerate(counts) if count is not None]
    found: list[TokenLogprobs | None] = [None] * len(counts)
    if not wanted:
        return found
    logprobs = logits[wanted].float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor([[token_ids[i]] for i in wanted], device=logits.device))
    ranks = (logprobs > own).sum(dim=-1).add_(1).tolist()
    most = min(max(count or 0 for count in counts), logits.shape[-1])
    top = logprobs.topk(most, dim=-1)
    rows = zip(wanted, own.squeeze(1).tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    for i, logprob, rank, ids, values in rows:
        alternatives = tuple(zip(ids, values, strict=True))[: counts[i]]
        found[i] = TokenLogprobs(token_ids[i], logprob, rank, alternatives)
    return found


def _suppress_stops(logits: Tensor, states: Sequence[SamplingState | None]) -> Tensor:
    """Logits in which nobody who still owes `min_tokens` can end; the given ones stay as they are."""
    rows: list[int] = []
    columns: list[int] = []
    for row, state in enumerate(states):
        if state is not None and state.suppressed and len(state.output_token_ids) < state.params.min_tokens:
            rows += [row] * len(state.suppressed)
            columns += state.suppressed
    if not rows:
        return logits
    logits = logits.clone()
    logits[rows, columns] = float("-inf")
    return logits


def _keep_most_likely(logits: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Logits with everything outside top-k, then outside top-p of what is left, at minus infinity.

    top_k 0 and top_p 1 keep all. At least the most likely token stays.
    """
    vocab = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    limits = torch.tensor([k or vocab for k in top_k], device=logits.device)
    ordered.masked_fill_(torch.arange(vocab, device=logits.device) >= limits.unsqueeze(1), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)  # mass of the tokens more likely than this one
    mass = torch.tensor(top_p, device=logits.device).unsqueeze(1)
    outside = (before >= mass) & (mass < 1)
    outside[:, 0] = False
    ordered.masked_fill_(outside, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)
