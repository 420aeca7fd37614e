"""Starting weights that shorten the wait for the circuit that looks facts up.

From plain random weights our trials of this size sat on a plateau (answering with any value told) for as long as
they ran, up to 1,275 steps: looking a key up takes two layers that are useless without each other. So two heads
in each of the first two layers start as an induction circuit (Olsson et al. 2022) in the rough; everything else is
random, and all weights are trained:

- layer 0, query heads 0 and 1 attend one and two tokens back, by RoPE phases;
- layer 1, query heads 0 and 1 look for the place where head 1 fetched what head 0 fetched here, in the rotary
  pairs that hardly turn: so the ">" of `?ax>` attends to the ";" of `ax=37;`, where head 0 has fetched `=37`.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from engine.testbed.export import llama_config

_EMBEDDING_STD = 0.1
_COMMON = 4.0  # every embedding's first component, in units of the standard deviation: a constant heads can use
_PEAKS = (10.0, 6.0, 6.0, 4.0, 3.0)  # logit a positional head gains from each of its fastest rotary pairs
_FIRST_SLOW_PAIR = 7  # rotary pairs from here on turn by less than 1 over the context
_MATCH = 5.0  # gain of the heads that compare


def initial_model(seed: int) -> LlamaForCausalLM:
    """A model with the starting weights that belong to `seed`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                scale = 0.35 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.normal_(0.0, scale * weight.shape[1] ** -0.5)
        embedding = model.model.embed_tokens.weight.normal_(0.0, _EMBEDDING_STD)
        embedding[:, 0] = _COMMON * _EMBEDDING_STD
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = 0.0  # what is common to all tokens says nothing
        _attend_back(model, query_heads=(0, 1), distances=(1, 2))
        _match_fetched(model, query_heads=(0, 1))
    return model


def _match_fetched(model: LlamaForCausalLM, query_heads: tuple[int, ...]) -> None:
    """Heads of layer 1 (all of KV head 0) attend where the token two back is the one that is one back here."""
    fetch, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    size, half = match.head_dim, match.head_dim // 2
    slow = torch.cat((torch.arange(_FIRST_SLOW_PAIR, half), torch.arange(half + _FIRST_SLOW_PAIR, size)))
    one_back, two_back = (fetch.o_proj.weight[:, first : first + len(slow)].T for first in (0, size))
    match.q_proj.weight[: size * len(query_heads)] = 0.0
    for head in query_heads:
        match.q_proj.weight[head * size + slow] = _MATCH * one_back
    match.k_proj.weight[:size] = 0.0
    match.k_proj.weight[slow] = _MATCH * two_back


def _attend_back(model: LlamaForCausalLM, query_heads: tuple[int, ...], distances: tuple[int, ...]) -> None:
    """Make heads of layer 0 (all of KV head 0) attend `distances` tokens back, whatever the tokens are."""
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    frequencies = model.model.rotary_emb.inv_freq[: len(_PEAKS)]
    # what the common component becomes after RMSNorm: about _COMMON, over the root mean square of a token
    constant = _COMMON / (1 + _COMMON**2 / attention.q_proj.in_features) ** 0.5
    size = (torch.tensor(_PEAKS) * attention.head_dim**0.5).sqrt() / constant
    pairs = torch.arange(len(_PEAKS))
    keys = attention.k_proj.weight[: attention.head_dim].mul_(0.1)
    keys[:, 0] = 0.0
    keys[pairs, 0] = size
    for head, distance in zip(query_heads, distances, strict=True):
        queries = attention.q_proj.weight[head * attention.head_dim : (head + 1) * attention.head_dim].mul_(0.1)
        queries[:, 0] = 0.0
        # q at position p meets k at p - distance in phase: turn q back by `distance` steps
        queries[pairs, 0] = size * torch.cos(frequencies * distance)
        queries[pairs + half, 0] = -size * torch.sin(frequencies * distance)
