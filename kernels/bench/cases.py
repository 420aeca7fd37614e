"""What the attention benchmark measures: shapes, formats, batches and contexts as data; no tensors here.

A case says how many bytes of KV cache it cannot avoid reading (codes and parameters of the tokens that at least one
query sees, each once) and how many floating-point operations its scores and weighted sums take; speed is reported
against these. Lists are in order of importance: what a time budget cuts off is their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from kernels.formats import KV_FORMATS, KVFormat

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """Attention of one layer on one device.

    scale: of the dot products. latent_rank: for MLA, the kv_lora_rank; head_dim is then rank + qk_rope_head_dim, and
    there is one KV head whose first latent_rank channels are also the value.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    latent_rank: int | None = None

    @property
    def is_mla(self) -> bool:
        return self.latent_rank is not None

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_rank is None else self.latent_rank


LLAMA_8B = Shape("Llama-3-8B 32/8 D128", 32, 8, 128, 128**-0.5)
LLAMA_70B_TP8 = Shape("Llama-3-70B TP8 8/1 D128", 8, 1, 128, 128**-0.5)
GEMMA_3_4B_LOCAL = Shape("Gemma-3-4B local 8/4 D256 window 1024", 8, 4, 256, 256**-0.5, sliding_window=1024)
MLA_128 = Shape("DeepSeek-V3 MLA 128 heads 512+64", 128, 1, 576, 192**-0.5, latent_rank=512)
MLA_16 = Shape("DeepSeek-V2-Lite MLA 16 heads 512+64", 16, 1, 576, 192**-0.5, latent_rank=512)
CPU_GQA = Shape("8/2 D64", 8, 2, 64, 64**-0.5)
GPU_SHAPES = (LLAMA_8B, LLAMA_70B_TP8, GEMMA_3_4B_LOCAL, MLA_128, MLA_16)
TINY = Shape("tiny 4/2 D32", 4, 2, 32, 32**-0.5)
TINY_WINDOW = Shape("tiny 4/2 D32 window 24", 4, 2, 32, 32**-0.5, sliding_window=24)
TINY_MLA = Shape("tiny MLA 4 heads 32+16", 4, 1, 48, 24**-0.5, latent_rank=32)


@dataclass(frozen=True)
class BenchCase:
    """One measurement.

    kind: "decode" (one query token a sequence), "prefill" (query_len of them after a cached prefix) or "write"
    (reshape_and_cache of query_len tokens a sequence, which are all it has: whole blocks). dtype: of queries, new keys
    and values. context: tokens of a sequence, its query tokens included. skewed: lengths follow Zipf's law with the
    same total instead of all being `context`.
    """

    kind: str
    shape: Shape
    kv_format: str
    dtype: str
    batch: int
    context: int
    query_len: int = 1
    skewed: bool = False

    @property
    def name(self) -> str:
        what = f"{self.batch} x {self.context}" if self.kind == "decode" else f"{self.batch} x {self.query_len} on"
        if self.kind != "decode":
            what += f" {self.context - self.query_len}"
        return f"{self.kind} {what}{' skewed' if self.skewed else ''}, {self.shape.name}, {self.kv_format}"

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.kv_format]

    @property
    def block_size(self) -> int:
        """16 as in vLLM; 32 where a block is the quantization group of the keys, as in the KIVI paper."""
        return 32 if self.format.keeps_open_blocks else 16

    def seq_lens(self) -> list[int]:
        """Tokens of each sequence, the longest first when skewed; never fewer than its query tokens."""
        if not self.skewed:
            return [self.context] * self.batch
        weights = [1 / rank for rank in range(1, self.batch + 1)]
        total = self.batch * self.context
        return [max(self.query_len, int(total * weight / sum(weights))) for weight in weights]

    def num_blocks(self) -> int:
        """Blocks that hold the sequences' tokens; nothing is shared between sequences."""
        return sum(-(-length // self.block_size) for length in self.seq_lens())

    def visible_tokens(self) -> list[int]:
        """For each sequence, the tokens that at least one of its queries sees."""
        window = self.shape.sliding_window
        lens = self.seq_lens()
        return lens if window is None else [min(length, window + self.query_len - 1) for length in lens]

    def token_bytes(self) -> float:
        """Bytes of one token in the pool, all KV heads, parameters included."""
        if self.shape.is_mla:
            return self.shape.head_dim * BYTES[self.kv_format]
        block_head = self.format.bytes_per_block_head(self.shape.head_dim, self.block_size)
        return block_head * self.shape.num_kv_heads / self.block_size

    def pool_bytes(self) -> int:
        """Bytes of the blocks that hold the sequences."""
        return int(self.num_blocks() * self.block_size * self.token_bytes())

    def kv_bytes(self) -> int:
        """Bytes of KV cache that attention must read: every visible token once, open ones in full precision.

        For "write": key and value read, and what the format stores of them written.
        """
        shape = self.shape
        full = 2 * shape.num_kv_heads * shape.head_dim * BYTES[self.dtype]
        if shape.is_mla:
            full = shape.head_dim * BYTES[self.dtype]
        if self.kind == "write":
            return int(self.batch * self.query_len * (full + self.token_bytes()))
        still_open = [n % self.block_size if self.format.keeps_open_blocks else 0 for n in self.seq_lens()]
        visible = self.visible_tokens()
        in_pool = sum(seen - min(seen, rest) for seen, rest in zip(visible, still_open, strict=True))
        return int(in_pool * self.token_bytes() + (sum(visible) - in_pool) * full)

    def flops(self) -> int:
        """Multiplications and additions of q k^T and p v over the visible (query, key) pairs; 0 for "write"."""
        if self.kind == "write":
            return 0
        window = self.shape.sliding_window
        pairs = 0
        for length in self.seq_lens():
            seen = range(length - self.query_len + 1, length + 1)
            pairs += sum(seen) if window is None else sum(min(n, window) for n in seen)
        return 2 * pairs * self.shape.num_q_heads * (self.shape.head_dim + self.shape.value_dim)


# Quantized caches are read with fp16 queries: its tolerance is the tighter one.
MAIN_FORMATS = ("bfloat16", "fp8_e4m3", "int8_per_token_head", "int4_per_token_head", "int4_kivi")
GPU_FORMATS = (*MAIN_FORMATS, "float16", "fp8_e5m2", "int4_symmetric", "int8k_int4v")
DECODE_GRID = tuple(product((1, 16, 64, 256), (1024, 4096, 16384, 65536)))  # batch, context
PREFILL_GRID = tuple((8192 // q, q, prefix) for q in (512, 2048) for prefix in (0, 4096, 32768))
_CORE_DECODE = ((64, 4096), (16, 16384))
_CORE_PREFILL = ((4, 2048, 4096),)


def gpu_cases(*, quick: bool = False) -> list[BenchCase]:
    """The core cases of every shape and format, the grid of the main formats, that of the others."""
    if quick:
        return list(_sweep((LLAMA_8B, MLA_16), GPU_FORMATS, ((4, 1024),), ((2, 512, 512),), extras=True))
    cases = [
        *_sweep(GPU_SHAPES, GPU_FORMATS, _CORE_DECODE, _CORE_PREFILL, extras=False),
        *_sweep(GPU_SHAPES, MAIN_FORMATS, DECODE_GRID, PREFILL_GRID, extras=True),
        *_sweep(GPU_SHAPES, GPU_FORMATS, DECODE_GRID, PREFILL_GRID, extras=True),
    ]
    return list(dict.fromkeys(cases))


def _sweep(
    shapes: Iterable[Shape],
    formats: Sequence[str],
    decode: Iterable[tuple[int, int]],
    prefill: Iterable[tuple[int, int, int]],
    *,
    extras: bool,
) -> Iterator[BenchCase]:
    """Cases of one shape and format lie together. extras: also skewed lengths and cache writes."""
    for shape in shapes:
        for kv_format in ("bfloat16",) if shape.is_mla else formats:
            dtype = kv_format if kv_format in BYTES else "float16"
            for batch, context in decode:
                yield BenchCase("decode", shape, kv_format, dtype, batch, context)
            for batch, query_len, prefix in prefill:
                yield BenchCase("prefill", shape, kv_format, dtype, batch, prefix + query_len, query_len)
            if extras:
                yield BenchCase("decode", shape, kv_format, dtype, 32, 4096, skewed=True)
                yield BenchCase("write", shape, kv_format, dtype, 16, 512, 512)


def cpu_cases(*, quick: bool = False) -> list[BenchCase]:
    """The torch backend: fp32 queries, every format it stores; the fp32 cache first, which others are compared with."""
    formats = ["float32", *(name for name in GPU_FORMATS if name in ("float16", "bfloat16") or name not in BYTES)]
    gqa, windowed, mla = (TINY, TINY_WINDOW, TINY_MLA) if quick else (CPU_GQA, None, MLA_16)
    batch, context = (3, 64) if quick else (32, 1024)
    query_len = 16 if quick else 256
    cases = [BenchCase("decode", gqa, name, "float32", batch, context) for name in formats]
    cases += [
        BenchCase("decode", mla, "float32", "float32", batch if quick else 8, context),
        BenchCase("prefill", mla, "float32", "float32", 1, context if quick else 512, query_len // 2),
        BenchCase("write", mla, "float32", "float32", batch, 64, 64),
    ]
    cases += [BenchCase("prefill", gqa, name, "float32", 2, context, query_len) for name in formats]
    cases += [BenchCase("write", gqa, name, "float32", batch, 64, 64) for name in formats]
    if windowed is not None:
        cases += [BenchCase("decode", windowed, name, "float32", batch, context, skewed=True) for name in formats]
    return cases


def grouped(cases: Iterable[BenchCase]) -> list[list[BenchCase]]:
    """Runs of neighbouring cases that can share one pool: the same shape, format and dtype."""
    return [list(run) for _, run in groupby(cases, key=lambda case: (case.shape, case.kv_format, case.dtype))]
