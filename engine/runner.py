"""Executes a scheduled step: turns requests into tensors, runs the model, samples.

Owns the KV caches, one a layer, and for every request that holds blocks a row of a persistent block table, which
grows with the request instead of being rebuilt. In formats that keep open blocks the row is also the place of the
block the request is filling; computing starts, and after a preemption starts again, at the start of a block, so
nothing is left of a row's former request, unless a fork starts within a block: then its leader's row is copied.
`preempt` gives the row up and keeps the request's random state; `release`
forgets the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig, ModelDims
from engine.device import resolve_dtype
from engine.forks import BlockCopy
from engine.kv_scales import UNSCALED, LayerScales, fp8_scales
from engine.memory import MemoryPlan
from engine.models.interface import CausalLM
from engine.models.lora import LoRABatch, LoRAWeights
from engine.request import Request
from engine.sampler import Sampler, SamplingState, TokenLogprobs, token_logprobs
from engine.scheduler import ScheduledRequest, SchedulerOutput
from kernels.attention import AttentionMetadata
from kernels.kv_cache import LayerKVCache, allocate_kv_cache, copy_blocks, copy_open_rows

log = logging.getLogger("engine")

PROMPT_LOGPROBS_LOGITS = 2**23  # logits held at once for prompt_logprobs, however long the prompt


@dataclass(slots=True)
class RunnerOutput:
    """What a step produced; lists have one entry per scheduled request.

    sampled: the next token, `None` for a chunk that does not reach the last token.
    logprobs: of the sampled tokens, or `None` when nobody asked.
    prompt_logprobs: request id -> one entry per prompt token (the first is `None`), when its prompt is complete.
    """

    sampled: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]


@dataclass(slots=True)
class _State:
    """What is kept of a request between steps. row: its place in the block table, -1 while it holds no blocks."""

    sampling: SamplingState | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    row: int = -1
    num_blocks: int = 0  # of the request's block ids, how many are in the table


class ModelRunner:
    """Runs one model. Passes on what torch raises when memory runs out; the caches are then no longer valid."""

    def __init__(self, config: EngineConfig, model: CausalLM, dims: ModelDims, plan: MemoryPlan) -> None:
        self.model = model
        self.block_size = plan.block_size
        self.sampler = Sampler(model.device, config.seed)
        self.kv_caches = allocate_kv_caches(config, dims, plan.num_gpu_blocks, model.device, model.kv_scales)
        self._calculates_scales = config.calculate_kv_scales
        self._awaits_scales = any(scales.source == "pending" for scales in self.kv_scales())
        self.keeps_open_blocks = any(f.keeps_open_blocks for f in config.layer_kv_formats(dims))
        if config.calculate_kv_scales and not self._awaits_scales:
            log.warning("--calculate-kv-scales changes nothing: no layer's KV cache is fp8")
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self._block_table = np.zeros((config.max_num_seqs, max_blocks), dtype=np.int32)
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._states: dict[str, _State] = {}
        self._logits_rows = prompt_logprobs_rows(dims.vocab_size)
        self.adapters: dict[str, LoRAWeights] = {}  # request id -> weights, of the requests that have an adapter

    def kv_scales(self) -> list[LayerScales]:
        """Scales in force of the layers whose cache is fp8."""
        return fp8_scales(self.kv_caches, self.model.kv_scales, self._calculates_scales)

    def preempt(self, request_id: str) -> None:
        """Gives up the row of a request that lost its blocks; does nothing when it has none."""
        state = self._states.get(request_id)
        if state is not None and state.row >= 0:
            self._free_rows.append(state.row)
            state.row, state.num_blocks = -1, 0

    def release(self, request_id: str) -> None:
        """Forgets a request; does nothing when it is unknown."""
        self.preempt(request_id)
        self._states.pop(request_id, None)
        self.adapters.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Computes a step: writes K and V of its tokens and samples for the requests that are complete."""
        scheduled = output.scheduled
        states = [self._states.get(entry.request.request_id) or self._new_state(entry.request) for entry in scheduled]
        if output.block_copies:
            self._copy_blocks(output.block_copies)
        input_ids, positions, metadata = self._build_batch(scheduled, states)
        hidden = self.model.forward(input_ids, positions, self.kv_caches, metadata, self._lora_batch(scheduled))
        if self._awaits_scales:
            self._awaits_scales = False
            scales = ", ".join(f"{s.layer}: {s.k_scale:.3g} {s.v_scale:.3g}" for s in self.kv_scales())
            log.info("KV scales taken from the first batch of %d tokens, layer: K V: %s", len(input_ids), scales)
        prompt_logprobs = self._prompt_logprobs(scheduled, states, hidden)
        sampled, logprobs = self._sample(scheduled, states, hidden, metadata)
        return RunnerOutput(sampled, logprobs, prompt_logprobs)

    def _lora_batch(self, scheduled: Sequence[ScheduledRequest]) -> LoRABatch | None:
        if not self.adapters:
            return None
        parts = [(entry.num_scheduled_tokens, self.adapters.get(entry.request.request_id)) for entry in scheduled]
        return LoRABatch.of(parts, self.model.device)

    def _new_state(self, request: Request) -> _State:
        wants_prompt = request.params.prompt_logprobs is not None
        state = _State(
            sampling=SamplingState.of(request, self.model.device),
            prompt_logprobs=[None] * request.num_prompt_tokens if wants_prompt else None,
        )
        self._states[request.request_id] = state
        return state

    def _add_blocks(self, state: _State, block_ids: list[int]) -> None:
        if state.row < 0:
            state.row = self._free_rows.pop()
            self._block_table[state.row] = 0
        self._block_table[state.row, state.num_blocks : len(block_ids)] = block_ids[state.num_blocks :]
        state.num_blocks = len(block_ids)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy on write: fills the blocks that forks got in the place of their leaders' last ones, and open rows."""
        rows: list[tuple[int, int]] = []
        for copy in copies:
            if copy.source_row_of is not None:
                state = self._states[copy.request.request_id]
                self._add_blocks(state, copy.request.block_ids)
                rows.append((self._states[copy.source_row_of.request_id].row, state.row))
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        paged = [cache for cache in self.kv_caches if isinstance(cache, LayerKVCache)]
        copy_blocks(paged, sources, targets)
        copy_open_rows(paged, [source for source, _ in rows], [target for _, target in rows])
        for cache in self.kv_caches:
            if isinstance(cache, Tensor):  # the latents of multi-head latent attention
                cache[targets] = cache[sources]

    def _build_batch(
        self, scheduled: Sequence[ScheduledRequest], states: Sequence[_State]
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """input_ids int64 [T], positions int64 [T] and the attention metadata of a step."""
        tokens: list[int] = []
        context: list[int] = []
        lengths: list[int] = []
        for entry, state in zip(scheduled, states, strict=True):
            request, start, length = entry.request, entry.num_computed_tokens, entry.num_scheduled_tokens
            if state.num_blocks != len(request.block_ids):
                self._add_blocks(state, request.block_ids)
            if length == 1:
                tokens.append(request.model_token_ids[start])
            else:
                tokens += request.model_token_ids[start : start + length]
            context.append(start)
            lengths.append(length)
        query_lens = np.array(lengths, dtype=np.int32)
        seq_lens = np.array(context, dtype=np.int32)
        num_decodes = lengths.count(1)
        if num_decodes == len(lengths):
            sequence = np.arange(num_decodes)
            positions = seq_lens.astype(np.int64)
        else:
            ends = np.cumsum(query_lens)
            sequence = np.repeat(np.arange(len(lengths)), query_lens)
            positions = np.arange(len(tokens)) + np.repeat(seq_lens - (ends - query_lens), query_lens)
        seq_lens += query_lens
        max_seq_len = int(seq_lens.max())
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        rows = np.array([state.row for state in states], dtype=np.int32)
        used = self._block_table[rows, : -(-max_seq_len // self.block_size)]
        block, offset = np.divmod(positions, self.block_size)
        slots = used[sequence, block].astype(np.int64) * self.block_size + offset
        metadata = AttentionMetadata(
            query_start_loc=self._tensor(starts),
            seq_lens=self._tensor(seq_lens),
            block_table=self._tensor(used),
            slot_mapping=self._tensor(slots),
            max_query_len=max(lengths),
            max_seq_len=max_seq_len,
            num_decodes=num_decodes,
            open_rows=self._tensor(rows) if self.keeps_open_blocks else None,
        )
        return self._tensor(np.array(tokens, dtype=np.int64)), self._tensor(positions), metadata

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _sample(
        self,
        scheduled: Sequence[ScheduledRequest],
        states: Sequence[_State],
        hidden: Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[list[int | None], list[TokenLogprobs | None] | None]:
        samples = [i for i, entry in enumerate(scheduled) if entry.samples]
        sampled: list[int | None] = [None] * len(scheduled)
        if not samples:
            return sampled, None
        if len(samples) < hidden.shape[0]:
            ends = metadata.query_start_loc[1:].index_select(0, torch.tensor(samples, device=hidden.device))
            hidden = hidden.index_select(0, ends - 1)
        tokens, found = self.sampler.sample(self.model.compute_logits(hidden), [states[i].sampling for i in samples])
        if len(samples) == len(scheduled):
            return list(tokens), found
        for i, token in zip(samples, tokens, strict=True):
            sampled[i] = token
        if found is None:
            return sampled, None
        logprobs: list[TokenLogprobs | None] = [None] * len(scheduled)
        for i, entry in zip(samples, found, strict=True):
            logprobs[i] = entry
        return sampled, logprobs

    def _prompt_logprobs(
        self, scheduled: Sequence[ScheduledRequest], states: Sequence[_State], hidden: Tensor
    ) -> dict[str, list[TokenLogprobs | None]]:
        """Fills in the prompt logprobs this step makes known; returns those that are now complete."""
        complete: dict[str, list[TokenLogprobs | None]] = {}
        offset = 0  # of the request's first token in the batch
        for entry, state in zip(scheduled, states, strict=True):
            request, start, length = entry.request, entry.num_computed_tokens, entry.num_scheduled_tokens
            if state.prompt_logprobs is not None:
                # The token at position p predicts the one at p + 1, as long as that is still prompt.
                end = min(start + length, request.num_prompt_tokens - 1)
                for first in range(start, end, self._logits_rows):
                    last = min(first + self._logits_rows, end)
                    logits = self.model.compute_logits(hidden[offset + first - start : offset + last - start])
                    targets = request.prompt_token_ids[first + 1 : last + 1]
                    counts = [request.params.prompt_logprobs] * len(targets)
                    state.prompt_logprobs[first + 1 : last + 1] = token_logprobs(logits, targets, counts)
                if entry.samples:
                    complete[request.request_id] = state.prompt_logprobs
                    state.prompt_logprobs = None
            offset += length
        return complete


def prompt_logprobs_rows(vocab_size: int) -> int:
    """How many prompt tokens are judged at once."""
    return max(1, min(256, PROMPT_LOGPROBS_LOGITS // vocab_size))


def allocate_kv_caches(
    config: EngineConfig,
    dims: ModelDims,
    num_blocks: int,
    device: torch.device,
    kv_scales: Mapping[int, tuple[float, float]],
) -> list[LayerKVCache] | list[Tensor]:
    """The KV pool, one cache a layer in the layer's format, and a row of open blocks for every sequence of a step.

    Multi-head latent attention has tensors [num_blocks, block_size, latent width]. kv_scales: layer -> scales of K and
    V in the checkpoint; they and calculated ones are for fp8 only.
    """
    formats = config.layer_kv_formats(dims)
    if dims.latent_width:
        shape = (num_blocks, config.block_size, dims.latent_width)
        # Zeroed by hand: memory is only promised until it is touched.
        return [torch.empty(shape, dtype=getattr(torch, f.name), device=device).zero_() for f in formats]
    scales = [kv_scales.get(i, UNSCALED) if f.scaled else UNSCALED for i, f in enumerate(formats)]
    return [
        allocate_kv_cache(
            kv_format,
            num_blocks,
            dims.num_kv_heads,
            config.block_size,
            dims.head_dim,
            device=device,
            open_dtype=resolve_dtype(config, dims),
            num_open_rows=config.max_num_seqs,
            k_scale=k_scale,
            v_scale=v_scale,
            calculate_scales=config.calculate_kv_scales,
        )
        for kv_format, (k_scale, v_scale) in zip(formats, scales, strict=True)
    ]
