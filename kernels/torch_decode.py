"""Decodes with torch operators: dense batches of tiles, in pieces whose keys or values stay in the CPU's cache.

Scores of all tiles, softmax across each sequence's tiles, then values by weight. Quantized codes are multiplied as
they are: a key's scale and minimum are applied to its score, a value's to its weight. Open blocks, in
full precision, are attended to apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention import AttentionOptions
from kernels.formats import Grouping
from kernels.kv_cache import LayerKVCache, PagedVectors
from kernels.torch_gather import LOWER, gather_numbers, gather_open, paired, token_params, unpaired
from kernels.torch_plan import Decodes, OpenBlocks
from kernels.torch_tiles import TilePlan, tile_plan


def decode(
    q: Tensor,
    cache: LayerKVCache,
    decodes: Decodes,
    options: AttentionOptions,
    attention_mass: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of the decodes: q float32 [num_tokens, num_q_heads, head_dim], result in out, alike.

    Queries and results are rotated where keys and values are stored rotated.
    """
    plan = tile_plan(decodes)
    num_q_heads, head_dim = q.shape[1:]
    group = num_q_heads // cache.num_kv_heads
    scores = _scores(q * options.scale, cache.key, plan)
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    if (hidden := plan.hidden_entries(num_q_heads)) is not None:
        scores.view(-1).index_fill_(0, hidden, float("-inf"))
    weights = scores.view(-1, num_q_heads, plan.tile_tokens)
    share_softmax(weights, softmax_of_tiles(weights), plan)
    if attention_mass is not None:
        _add_mass(attention_mass, weights.view(-1, cache.num_kv_heads, group, plan.tile_tokens).sum(2), plan)
    attended = _weighted_sum(scores, cache.value, plan).view(-1, num_q_heads, head_dim)
    out.index_add_(0, plan.tile_queries, attended)


def softmax_of_tiles(scores: Tensor) -> Tensor:
    """Softmax of each row of scores [tiles, heads, tile_tokens], in place; returns its logsumexp [tiles, heads]."""
    highest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return highest.sub_(scores.amax(-1).log_())  # the largest weight is 1 / sum(exp(score - highest))


def share_softmax(values: Tensor, log_sums: Tensor, plan: TilePlan) -> None:
    """Multiply values [tiles, heads, n] by each tile's share of its sequence's softmax, from the tiles' logsumexp."""
    if plan.tile_seq is None:
        return
    shape = (plan.seqs.shape[0], log_sums.shape[1])
    index = plan.tile_seq[:, None].expand_as(log_sums)
    highest = log_sums.new_full(shape, float("-inf")).scatter_reduce_(0, index, log_sums, "amax")
    shares = (log_sums - highest.index_select(0, plan.tile_seq)).exp_()
    sums = shares.new_zeros(shape).index_add_(0, plan.tile_seq, shares)
    values.mul_(shares.div_(sums.index_select(0, plan.tile_seq))[:, :, None])


def _scores(q: Tensor, part: PagedVectors, plan: TilePlan) -> Tensor:
    """[tiles * num_kv_heads, group, tile_tokens] of queries [num_tokens, num_q_heads, head_dim], already scaled."""
    group, head_dim = q.shape[1] // plan.block_rows.shape[1], q.shape[2]
    params = token_params(part, plan.block_rows)
    if params.factor != 1.0:
        q = q * params.factor
    by_number = paired(q, part.fmt, 1 / LOWER).index_select(0, plan.tile_queries).view(-1, group, head_dim)
    scores = q.new_empty((*by_number.shape[:2], plan.tile_tokens))
    for rows, keys in _tiles(part, plan, clean=False):
        torch.bmm(by_number[rows], keys.transpose(1, 2), out=scores[rows])
    if params.scale is not None:
        scores.mul_(params.scale.reshape(scores.shape[0], 1, -1))
    if params.low is not None:
        sums = q.sum(-1).index_select(0, plan.tile_queries).view(-1, group, 1)
        scores.addcmul_(params.low.reshape(scores.shape[0], 1, -1), sums)
    if plan.open_blocks is not None:
        keys = gather_open(part, plan.open_blocks)
        queries = q.index_select(0, plan.tile_queries).view(-1, group, head_dim).index_select(0, plan.open_tiles)
        open_scores = torch.bmm(queries, keys.transpose(1, 2)).view(-1, plan.block_size)
        scores.view(-1, plan.block_size).index_copy_(0, plan.open_rows(group), open_scores)
    return scores


def _weighted_sum(weights: Tensor, part: PagedVectors, plan: TilePlan) -> Tensor:
    """[tiles * num_kv_heads, group, head_dim] of weights [tiles * num_kv_heads, group, tile_tokens]; changes them.

    Slots without a token may hold NaN, which times a weight of zero is NaN: parameters and values are cleaned of it.
    Of formats that keep open blocks, values must have parameters by token.
    """
    params = token_params(part, plan.block_rows)
    attended_open = None
    if plan.open_blocks is not None:
        attended_open = _open_sum(weights, part, plan.open_blocks, plan)
    low_sum = None
    if params.low is not None:
        low_sum = torch.bmm(weights, _clean(params.low, plan).transpose(1, 2))
    if params.scale is not None:
        weights.mul_(_clean(params.scale, plan))
    attended = weights.new_empty((*weights.shape[:2], part.codes.shape[3] * part.fmt.elements_per_code))
    for rows, values in _tiles(part, plan, clean=part.fmt.grouping is not Grouping.TOKEN):
        torch.bmm(weights[rows], values, out=attended[rows])
    attended = unpaired(attended, part.fmt)
    if params.factor != 1.0:
        attended.mul_(params.factor)
    if low_sum is not None:
        attended.add_(low_sum)
    if attended_open is not None:
        attended.index_add_(0, plan.open_tiles, attended_open)
    return attended


def _open_sum(weights: Tensor, part: PagedVectors, open_blocks: OpenBlocks, plan: TilePlan) -> Tensor:
    """[open blocks, group, head_dim]: the values of open blocks by weight."""
    group = weights.shape[1]
    open_weights = weights.view(-1, plan.block_size).index_select(0, plan.open_rows(group))
    values = gather_open(part, open_blocks)
    values.view(-1, values.shape[2]).index_fill_(0, plan.open_empty, 0.0)
    return torch.bmm(open_weights.view(-1, group, plan.block_size), values)


def _clean(params: Tensor, plan: TilePlan) -> Tensor:
    """params [tiles * num_kv_heads * tile_blocks, block_size] as [tiles * num_kv_heads, 1, tile_tokens].

    Zero where hidden and for open blocks.
    """
    if plan.open_blocks is not None:
        params.index_fill_(0, plan.open_blocks.target, 0.0)
    params = params.reshape(-1)
    if (hidden := plan.hidden_entries(plan.block_rows.shape[1])) is not None:
        params.index_fill_(0, hidden, 0.0)
    return params.view(-1, 1, plan.tile_tokens)


def _tiles(part: PagedVectors, plan: TilePlan, *, clean: bool) -> Iterator[tuple[slice, Tensor]]:
    """Piece by piece: rows of [tiles * num_kv_heads] and their numbers [rows, tile_tokens, head_dim].

    clean: zeros in place of tokens that no query sees. The next piece overwrites the numbers.
    """
    num_kv_heads = plan.block_rows.shape[1]
    for piece in plan.pieces:
        block_rows = plan.block_rows[piece.first : piece.last].flatten()
        numbers = gather_numbers(part, block_rows, plan.scratch)
        numbers = numbers.view(-1, numbers.shape[2])
        if clean and piece.hidden is not None:
            numbers.index_fill_(0, piece.hidden, 0.0)
        yield (
            slice(piece.first * num_kv_heads, piece.last * num_kv_heads),
            numbers.view(-1, plan.tile_tokens, numbers.shape[1]),
        )


def _add_mass(attention_mass: Tensor, weights: Tensor, plan: TilePlan) -> None:
    """weights: [tiles, num_kv_heads, tile_tokens], zero where hidden."""
    where = (plan.tile_queries[:, None, None], torch.arange(weights.shape[1])[:, None], plan.positions[:, None])
    attention_mass.index_put_(where, weights, accumulate=True)
