"""Whether a backend's result may be timed at all: sampled rows against the float64 oracle.

The oracle takes minutes for a whole case, so a few query rows and heads are cut out into a case of their own on the
CPU: each sampled row becomes a sequence of one query that ends where that row stands.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionMetadata
from kernels.bench.inputs import Inputs
from kernels.kv_cache import LayerKVCache, PagedVectors, read_blocks
from kernels.oracle import mla_attention_float64, paged_attention_float64
from kernels.quantize import quantize, rotate

# Relative error (norm of the difference over norm of the oracle's) that a result may have: the wider of what the
# queries' dtype and the cache's allow (softmax weights may be rounded to either).
TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
QUANTIZED_TOLERANCE = 2e-3  # of a quantized cache, whose rounding is the oracle's too
WRITE_TOLERANCE = 2e-2  # stored and re-read against `kernels.quantize`: some codes at a tie differ by one
LONG_CONTEXT = 16384  # beyond it fewer rows and heads are sampled: each takes the oracle long enough


@dataclass(frozen=True)
class Verdict:
    """error: relative to the oracle, the worst sampled row's. quantization_error: "write" only, of N(0, 1) vectors."""

    error: float
    tolerance: float
    quantization_error: float | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance  # NaN is not


def tolerance(inputs: Inputs) -> float:
    case = inputs.case
    if case.kind == "write":
        return WRITE_TOLERANCE
    return max(TOLERANCE[case.dtype], TOLERANCE.get(case.kv_format, QUANTIZED_TOLERANCE))


class Reference:
    """The oracle's rows of one case, made once and compared with every side's result."""

    def __init__(self, inputs: Inputs, samples: int | None = None) -> None:
        self.inputs = inputs
        self.tolerance = tolerance(inputs)
        if inputs.case.kind == "write":
            return
        shape = inputs.case.shape
        kv_head = random.Random(inputs.case.name).randrange(shape.num_kv_heads)
        group = shape.num_q_heads // shape.num_kv_heads
        long = inputs.case.context > LONG_CONTEXT
        self.heads = sorted({kv_head * group, (kv_head + 1) * group - 1})[-1 if long else 0 :]
        rows = sample_rows(inputs, samples or (2 if long else 3))
        self.expected = expected_rows(inputs, rows, kv_head, self.heads)
        self.tokens = [inputs.case.query_len * seq + query for seq, query in rows]

    def check(self, output: Tensor) -> Verdict:
        """Of what the case's call gave; one value that is not finite makes the error infinite."""
        if self.inputs.case.kind == "write":
            return _check_write(self.inputs)
        if not bool(torch.isfinite(output).all()):
            return Verdict(float("inf"), self.tolerance)
        got = output[self.tokens][:, self.heads].double().cpu()
        errors = (got - self.expected).flatten(1).norm(dim=1) / self.expected.flatten(1).norm(dim=1)
        return Verdict(float(errors.max()), self.tolerance)


def sample_rows(inputs: Inputs, samples: int) -> list[tuple[int, int]]:
    """(sequence, query) pairs: the very last query, the first sequence's first, and random ones."""
    case = inputs.case
    rng = random.Random(case.name)
    rows = [(case.batch - 1, case.query_len - 1), (0, 0)]
    rows += [(rng.randrange(case.batch), rng.randrange(case.query_len)) for _ in range(max(samples - 2, 0))]
    return list(dict.fromkeys(rows))[:samples]


def expected_rows(inputs: Inputs, rows: list[tuple[int, int]], kv_head: int, heads: list[int]) -> Tensor:
    """The oracle's output [len(rows), len(heads), value_dim] in float64, on the CPU; heads must read kv_head."""
    case, cache, metadata = inputs.case, inputs.pool.cache, inputs.metadata
    lens, block_size = metadata.seq_lens.tolist(), case.block_size
    ends = [lens[seq] - case.query_len + query + 1 for seq, query in rows]  # keys up to the row's own
    widths = [-(-end // block_size) for end in ends]
    blocks = torch.cat([metadata.block_table[seq, :n].long() for (seq, _), n in zip(rows, widths, strict=True)])
    reduced = _decode_metadata(ends, widths)
    query = inputs.query[[case.query_len * seq + query for seq, query in rows]][:, heads].cpu()
    if isinstance(cache, Tensor):
        rank = case.shape.value_dim
        latents = cache[blocks].cpu()
        return mla_attention_float64(query[..., :rank], query[..., rank:], latents, reduced, case.shape.scale)
    open_rows = [] if metadata.open_rows is None else metadata.open_rows.tolist()
    open_of = [
        open_rows[seq] if end > lens[seq] // block_size * block_size else -1
        for (seq, _), end in zip(rows, ends, strict=True)
    ]
    last = (torch.tensor(widths).cumsum(0) - 1).tolist()
    key, value = (_cut(part, blocks, kv_head, open_of, last) for part in (cache.key, cache.value))
    small = LayerKVCache(cache.kv_format, cache.head_dim, key, value)
    return paged_attention_float64(query, small, reduced, inputs.options)[0]


def _decode_metadata(seq_lens: list[int], widths: list[int]) -> AttentionMetadata:
    """Sequences of one query each, the blocks of all of them numbered one after the other."""
    num_seqs, first = len(seq_lens), 0
    table = torch.zeros((num_seqs, max(widths)), dtype=torch.int32)
    for row, width in zip(table, widths, strict=True):
        row[:width] = torch.arange(first, first + width)
        first += width
    return AttentionMetadata(
        query_start_loc=torch.arange(num_seqs + 1).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        block_table=table,
        slot_mapping=torch.full((num_seqs,), -1),
        max_query_len=1,
        max_seq_len=max(seq_lens),
        num_decodes=num_seqs,
        open_rows=torch.arange(num_seqs).int(),
    )


def _cut(part: PagedVectors, blocks: Tensor, kv_head: int, open_of: list[int], last: list[int]) -> PagedVectors:
    """These blocks of one KV head, on the CPU.

    open_of: for each row its open row, or -1 where the block it stands in (entry last[i] of blocks) is full by now:
    then the row saw that block quantized, and its open block here holds just that.
    """
    raw = part.codes.view(torch.uint8) if part.codes.dtype.itemsize == 1 else part.codes  # torch indexes no fp8
    codes = raw[blocks, kv_head].cpu().view(part.codes.dtype)[:, None]
    params = None if part.params is None else part.params[blocks, kv_head].cpu()[:, None]
    small = PagedVectors(part.fmt, codes, params, part.scale)
    if part.open_blocks is None:
        return small
    as_stored = read_blocks(small, torch.tensor(last), torch.float64)
    for i, row in enumerate(open_of):
        if row >= 0:
            as_stored[i, 0] = part.open_blocks[row, kv_head].double().cpu()
    return PagedVectors(part.fmt, codes, params, part.scale, as_stored)


def _check_write(inputs: Inputs) -> Verdict:
    """Read the slots of a few tokens back and compare with `kernels.quantize` of the keys and values given."""
    cache, slots = inputs.pool.cache, inputs.metadata.slot_mapping
    if isinstance(cache, Tensor):
        stored = cache.flatten(0, 1)[slots].double()
        given = inputs.key.double()
        error = float((stored - given.to(cache.dtype).double()).norm() / given.norm())
        return Verdict(error, tolerance(inputs), float((stored - given).norm() / given.norm()))
    block_size = cache.block_size
    num_blocks = len(slots) // block_size  # a "write" fills whole blocks, which per-channel keys need
    first = torch.arange(0, num_blocks, max(num_blocks // 16, 1)) * block_size
    tokens = first[:, None] + torch.arange(block_size)
    blocks = (slots[first.to(slots.device)] // block_size).cpu()
    errors, losses = [], []
    for part, given in ((cache.key, inputs.key), (cache.value, inputs.value)):
        vectors = given.cpu()[tokens].transpose(1, 2)  # [blocks, heads, slots, head_dim]
        codes, params = quantize(rotate(vectors) if part.fmt.rotated else vectors, part.fmt, part.scale)
        wanted = read_blocks(PagedVectors(part.fmt, codes, params, part.scale), torch.arange(len(first)), torch.float64)
        got = _read(part, blocks)
        errors.append(float((got - wanted).norm() / wanted.norm()))
        losses.append(float((got - vectors.double()).norm() / vectors.double().norm()))
    return Verdict(max(errors), tolerance(inputs), max(losses))


def _read(part: PagedVectors, blocks: Tensor) -> Tensor:
    raw = part.codes.view(torch.uint8) if part.codes.dtype.itemsize == 1 else part.codes
    on_device = blocks.to(raw.device)
    codes = raw[on_device].cpu().view(part.codes.dtype)
    params = None if part.params is None else part.params[on_device].cpu()
    return read_blocks(PagedVectors(part.fmt, codes, params, part.scale), torch.arange(len(blocks)), torch.float64)
