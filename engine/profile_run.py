"""The worst steps a configuration allows, run on dummy tokens to measure the activation memory they need.

Two shapes bound it: prompts that fill the token budget from empty, and a full house of sequences at the context
limit, one of which is a prompt that takes what is left of the budget. All sequences share the blocks of one, so
the run needs next to no pool; kernels take as much workspace as they would with blocks of their own.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig, ModelDims
from engine.device import measure_activation_peak
from engine.models.interface import CausalLM
from engine.models.lora import LoRABatch
from engine.request import SamplingParams
from engine.runner import allocate_kv_caches, prompt_logprobs_rows
from engine.sampler import Sampler, SamplingState, token_logprobs
from kernels.attention import AttentionMetadata

Step = list[tuple[int, int]]  # (context_len, query_len) of each sequence; decodes first, as scheduled


def activation_peak_bytes(config: EngineConfig, model: CausalLM, dims: ModelDims) -> int:
    """Measured bytes a step needs at most beyond weights and pool: activations, logits, judging a prompt, sampling."""
    max_model_len = config.resolved_max_model_len(dims)
    caches = allocate_kv_caches(config, dims, 1 + -(-max_model_len // config.block_size), model.device, model.kv_scales)
    sampler = Sampler(model.device, config.seed)
    state = SamplingState(SamplingParams(top_p=0.9, top_k=50, logprobs=1), None, [])

    @torch.inference_mode()
    def run(step: Step) -> None:
        input_ids, positions, metadata = _dummy_batch(step, config.block_size, model.device)
        lora = None
        if config.enable_lora:
            lora = LoRABatch.widest(dims, config.max_lora_rank, len(input_ids), model.dtype, model.device)
        hidden = model.forward(input_ids, positions, caches, metadata, lora)
        judged = hidden[: prompt_logprobs_rows(dims.vocab_size)]
        token_logprobs(model.compute_logits(judged), [0] * len(judged), [1] * len(judged))
        last = metadata.query_start_loc[1:] - 1
        sampler.sample(model.compute_logits(hidden.index_select(0, last)), [state] * len(step))

    steps = (_prefill_step(config, max_model_len), _mixed_step(config, max_model_len))
    return max(measure_activation_peak(functools.partial(run, step), model.device) for step in steps)


def _prefill_step(config: EngineConfig, max_model_len: int) -> Step:
    full, rest = divmod(config.max_num_batched_tokens, max_model_len)
    lengths = ([max_model_len] * full + [rest] * bool(rest))[: config.max_num_seqs]
    return sorted(((0, length) for length in lengths), key=lambda sequence: sequence[1] > 1)


def _mixed_step(config: EngineConfig, max_model_len: int) -> Step:
    decodes = [(max_model_len - 1, 1)] * (config.max_num_seqs - 1)
    chunk = min(config.max_num_batched_tokens - len(decodes), max_model_len)
    return [*decodes, (max_model_len - chunk, chunk)]


def _dummy_batch(step: Step, block_size: int, device: torch.device) -> tuple[Tensor, Tensor, AttentionMetadata]:
    context = np.array([context_len for context_len, _ in step], dtype=np.int32)
    query = np.array([query_len for _, query_len in step], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(query))).astype(np.int32)
    positions = np.concatenate([np.arange(c, c + q) for c, q in step])
    max_seq_len = int((context + query).max())
    block_ids = np.arange(1, 1 + -(-max_seq_len // block_size), dtype=np.int32)  # block 0 is the null block
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(context + query).to(device),
        block_table=torch.from_numpy(np.tile(block_ids, (len(step), 1))).to(device),
        slot_mapping=torch.from_numpy(block_size + positions).to(device),
        max_query_len=int(query.max()),
        max_seq_len=max_seq_len,
        num_decodes=int((query == 1).sum()),
        open_rows=torch.arange(len(step), dtype=torch.int32, device=device),
    )
    input_ids = torch.zeros(len(positions), dtype=torch.int64, device=device)
    return input_ids, torch.from_numpy(positions).to(device), metadata
