"""What attention is compared with: torch SDPA, FlexAttention, flash-attn and FlashInfer on CUDA; copies on the CPU.

The libraries' sides compute the same attention and are checked like our own before they are timed. "sdpa, gathered"
starts from the paged pool and pays for collecting its blocks; the sides called "dense" find keys and values already
collected, in the order they like best, which a paged engine could not give them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.bench.cases import LLAMA_8B, BenchCase
from kernels.bench.inputs import Inputs, make_inputs, make_pool
from kernels.kv_cache import LayerKVCache

MAX_SCORE_BYTES = 4 << 30  # SDPA materializes MLA's scores: no fused kernel takes 576 channels
FLEX_POINTS = (("decode", 64, 4096), ("decode", 16, 16384), ("prefill", 4, 2048 + 4096))  # each compiles for seconds


class UnavailableError(Exception):
    """A side that cannot take part here; the message says why."""


@dataclass(frozen=True)
class Side:
    """run: the call to time, its result [num_tokens, num_q_heads, value_dim] if checked, else anything."""

    name: str
    run: Callable[[], Any]
    checked: bool = True


def cuda_peers(inputs: Inputs) -> Iterator[tuple[str, Callable[[], Side]]]:
    """(name, how to set it up) of each peer of a bf16 case; setting up raises UnavailableError where it cannot run."""
    case = inputs.case
    if case.kv_format != "bfloat16" or case.kind == "write" or case.skewed:
        return
    yield "sdpa, gathered", lambda: _sdpa(inputs, gathered=True)
    yield "sdpa, dense", lambda: _sdpa(inputs, gathered=False)
    if case.shape == LLAMA_8B and (case.kind, case.batch, case.context) in FLEX_POINTS:
        yield "flex, dense", lambda: _flex(inputs)
    if not case.shape.is_mla:
        yield "flash-attn, dense", lambda: _flash_attn(inputs)
        yield "flashinfer, paged", lambda: _flashinfer(inputs)


def cpu_peers(inputs: Inputs) -> Iterator[tuple[str, Callable[[], Side]]]:
    """Copies of the fp32 cache's bytes, SDPA, and for other formats the fp32 path on the same shape."""
    case = inputs.case
    if case.kv_format != "float32":
        twin = replace(case, kv_format="float32")
        yield "fp32 path", lambda: Side("fp32 path", _float32_inputs(twin).run, checked=False)
        return
    if case.kind == "decode":
        source = torch.rand(case.kv_bytes() // 4)
        target = torch.zeros_like(source)
        yield "torch.clone", lambda: Side("torch.clone", source.clone, checked=False)
        yield "warm copy_", lambda: Side("warm copy_", lambda: target.copy_(source), checked=False)
    if case.kind != "write" and not case.skewed:
        yield "sdpa, gathered", lambda: _sdpa(inputs, gathered=True)


@lru_cache(maxsize=1)
def _float32_inputs(case: BenchCase) -> Inputs:
    return make_inputs(case, make_pool([case], torch.device("cpu")))


def gather(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, num_kv_heads, visible tokens, width] of sequences of one length, copied from the pool."""
    case, cache = inputs.case, inputs.pool.cache
    seen = case.visible_tokens()[0]
    first = (case.context - seen) // case.block_size
    table = inputs.metadata.block_table[:, first : -(-case.context // case.block_size)].long()
    skip = case.context - seen - first * case.block_size

    def collect(codes: Tensor) -> Tensor:
        blocks = codes[table]  # [batch, blocks, heads, slots, width]
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, skip : skip + seen]

    if isinstance(cache, LayerKVCache):
        return collect(cache.key.codes), collect(cache.value.codes)
    latents = collect(cache[:, None])
    return latents, latents[..., : case.shape.value_dim]


def _room_for_gathering(inputs: Inputs) -> None:
    """UnavailableError unless the visible keys and values fit twice more (collected, and once more in between)."""
    if inputs.query.device.type != "cuda":
        return
    torch.cuda.empty_cache()
    if 3 * inputs.case.kv_bytes() > torch.cuda.mem_get_info()[0]:
        raise UnavailableError("no memory left for gathered keys and values")


def _sdpa(inputs: Inputs, *, gathered: bool) -> Side:
    case, shape = inputs.case, inputs.case.shape
    keys = case.visible_tokens()[0]
    if shape.is_mla and case.batch * shape.num_q_heads * case.query_len * keys * 4 > MAX_SCORE_BYTES:
        raise UnavailableError("SDPA would materialize MLA's scores, more than 4 GiB")
    _room_for_gathering(inputs)
    attend = _decode_call(inputs) if case.query_len == 1 else _prefill_call(inputs, keys)
    if gathered:
        return Side("sdpa, gathered", lambda: attend(*gather(inputs)))
    key, value = (x.contiguous() for x in gather(inputs))
    return Side("sdpa, dense", lambda: attend(key, value))


def _decode_call(inputs: Inputs) -> Callable[[Tensor, Tensor], Tensor]:
    """One query a sequence: the query heads of a group are laid out as rows, so that keys are read once a group."""
    case, shape = inputs.case, inputs.case.shape
    rows = inputs.query.view(case.batch, shape.num_kv_heads, -1, shape.head_dim)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(rows, key, value, scale=shape.scale).flatten(1, 2)

    return attend


def _prefill_call(inputs: Inputs, keys: int) -> Callable[[Tensor, Tensor], Tensor]:
    from torch.nn.attention.bias import causal_lower_right

    case, shape = inputs.case, inputs.case.shape
    query = inputs.query.view(case.batch, case.query_len, shape.num_q_heads, shape.head_dim).transpose(1, 2)
    options: dict[str, Any] = {"scale": shape.scale, "enable_gqa": True}
    if shape.sliding_window is not None:
        behind = torch.arange(case.query_len)[:, None] + keys - case.query_len - torch.arange(keys)
        options["attn_mask"] = ((behind >= 0) & (behind < shape.sliding_window)).to(query.device)
    elif keys == case.query_len:
        options["is_causal"] = True
    else:
        options["attn_mask"] = causal_lower_right(case.query_len, keys)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, **options).transpose(1, 2).flatten(0, 1)

    return attend


def _flex(inputs: Inputs) -> Side:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, shape = inputs.case, inputs.case.shape
    _room_for_gathering(inputs)
    key, value = (x.contiguous() for x in gather(inputs))
    query = inputs.query.view(case.batch, case.query_len, shape.num_q_heads, shape.head_dim).transpose(1, 2)
    query = query.contiguous()
    mask = None
    if case.query_len > 1:
        ahead = case.context - case.query_len

        def causal(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q + ahead >= kv

        mask = create_block_mask(causal, None, None, case.query_len, case.context, device=str(query.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        out: Tensor = compiled(query, key, value, block_mask=mask, scale=shape.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return Side("flex, dense", run)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UnavailableError(f"{name} is not installed") from None


def _flash_attn(inputs: Inputs) -> Side:
    """Over dense keys: flash-attn pages only in blocks of 256 tokens."""
    library = _imported("flash_attn")
    case, shape = inputs.case, inputs.case.shape
    _room_for_gathering(inputs)
    key, value = (x.transpose(1, 2).contiguous() for x in gather(inputs))
    query = inputs.query.view(case.batch, case.query_len, shape.num_q_heads, shape.head_dim)
    window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)

    def run() -> Tensor:
        out: Tensor = library.flash_attn_with_kvcache(
            query, key, value, cache_seqlens=key.shape[1], softmax_scale=shape.scale, causal=True, window_size=window
        )
        return out.flatten(0, 1)

    return Side("flash-attn, dense", run)


def _flashinfer(inputs: Inputs) -> Side:
    library = _imported("flashinfer")
    case, shape, cache = inputs.case, inputs.case.shape, inputs.pool.cache
    assert isinstance(cache, LayerKVCache)
    pages = -(-case.context // case.block_size)
    device = inputs.query.device
    indptr = (torch.arange(case.batch + 1) * pages).int().to(device)
    indices = inputs.metadata.block_table[:, :pages].flatten()
    last = torch.full((case.batch,), case.context - (pages - 1) * case.block_size, dtype=torch.int32, device=device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, case.block_size)
    window = -1 if shape.sliding_window is None else shape.sliding_window - 1
    options: dict[str, Any] = {"sm_scale": shape.scale, "window_left": window, "q_data_type": inputs.query.dtype}
    if case.query_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, kv_data_type=inputs.query.dtype, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        queries = inputs.metadata.query_start_loc
        wrapper.plan(queries, indptr, indices, last, *heads, causal=True, **options)
    return Side("flashinfer, paged", lambda: wrapper.run(inputs.query, (cache.key.codes, cache.value.codes)))
