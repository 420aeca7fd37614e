"""The LLM engine: requests in, one step at a time, outputs out.

Puts together model, memory plan, scheduler, runner and output processor, and knows nothing of HTTP or threads.
A step is: schedule, run the model, book the sampled tokens, turn them into text. Not thread-safe.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from engine.adapters import AdapterStore, ServedAdapter
from engine.cache_identity import ANONYMOUS, CacheIdentity, IdentityPolicy
from engine.config import EngineConfig, ModelDims
from engine.device import device_memory_bytes, resolve_device, resolve_dtype
from engine.faults import StepFaults
from engine.images import ImageReader
from engine.memory import MemoryPlan, bookkeeping_bytes_per_block, plan_kv_cache
from engine.models.loader import load_model
from engine.output import EngineObserver, OutputProcessor, RequestOutput, RequestTimings
from engine.profile_run import activation_peak_bytes
from engine.public_prefixes import PublicPrefixes
from engine.request import Request, RequestStatus, SamplingParams
from engine.runner import ModelRunner, RunnerOutput
from engine.sampler import TokenLogprobs
from engine.scheduler import Scheduler, SchedulerOutput, SchedulerStats
from engine.tokenizer import Tokenizer
from engine.weights import load_like, refusing_without_memory

__all__ = ["EngineObserver", "LLMEngine", "PromptTooLong", "RequestOutput", "RequestTimings", "TokenLogprobs"]

log = logging.getLogger("engine")


class PromptTooLong(ValueError):  # noqa: N818 - says what the prompt is, as QueueFull says what the queue is
    """A prompt that leaves no room for even one token within the context limit."""


class LLMEngine:
    """Loads the model of `config`, sizes and allocates the KV pool, and serves requests.

    Construction raises `ConfigError` for what the user can mend, and whatever the allocator raises when the
    device is too small. An exception out of `step` leaves the engine unusable.
    """

    def __init__(self, config: EngineConfig, *, observer: EngineObserver | None = None) -> None:
        self.config = config
        self.model_path = config.model_dir  # of the weights in use
        self.identity_policy = IdentityPolicy(config.prefix_cache_scope)
        self.dims = ModelDims.from_model_dir(config.model_dir)
        self.tokenizer = Tokenizer(config.model_dir)
        self.tokenizer.refuse_other_vocabulary(self.dims.vocab_size)
        self.image_reader = ImageReader.of(self.tokenizer)
        device = resolve_device(config)
        model = load_model(
            config.model_dir,
            self.dims,
            resolve_dtype(config, self.dims),
            device,
            max_model_len=config.resolved_max_model_len(self.dims),
        )
        self.adapters = AdapterStore(config, model, self.dims)
        self.plan: MemoryPlan = plan_kv_cache(
            config,
            self.dims,
            weights_bytes=model.weights_bytes + self.adapters.num_bytes,
            activation_peak_bytes=activation_peak_bytes(config, model, self.dims),
            device_memory_bytes=device_memory_bytes(config, device),
            bookkeeping_bytes_per_block=bookkeeping_bytes_per_block(config) if device.type == "cpu" else 0,
        )
        self.runner = ModelRunner(config, model, self.dims, self.plan)
        self.scheduler = Scheduler(
            config,
            num_gpu_blocks=self.plan.num_gpu_blocks,
            max_model_len=self.plan.max_model_len,
            keeps_open_blocks=self.runner.keeps_open_blocks,
        )
        self.public_prefixes = PublicPrefixes(self.scheduler.kv_cache_manager.set_public_prefixes)
        for path in config.prefix_cache_public:
            self.public_prefixes.add_file(path, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, observer)
        self._observer = observer
        self._faults = StepFaults(config.engine_fault)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        identity: CacheIdentity = ANONYMOUS,
        priority: int = 0,
        fork_of: str | None = None,
        model_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Queues a request; `fork_of` names the unfinished request whose blocks it may start from.

        Raises `PromptTooLong`, `QueueFull` when too many wait, and `ValueError` for a prompt that is empty or
        holds unknown tokens, an id in use, or a request larger than the whole KV pool.
        """
        self._check_prompt(prompt_token_ids)
        lora = None if identity.adapter is None else self.adapters.weights(identity.adapter)
        more_eos = self.tokenizer.eos_token_ids[1:]  # the scheduler knows one; further ones stop as a user's would
        if more_eos and not params.ignore_eos:
            params = dataclasses.replace(params, stop_token_ids=[*params.stop_token_ids, *more_eos])
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            identity=identity,
            priority=priority,
            fork_of=None if fork_of is None else self.scheduler.requests.get(fork_of),
            model_token_ids=model_token_ids,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        self.scheduler.add_request(request)
        if lora is not None:
            self.runner.adapters[request_id] = lora
        self._outputs.add(request)

    def abort_request(self, request_id: str) -> None:
        """Ends a request and gives its blocks back; does nothing when it is unknown or finished."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.runner.release(request_id)
            self._outputs.abort(request)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing done, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> ServedAdapter:
        """Takes a LoRA adapter into service while the engine runs; raises `ConfigError`."""
        with refusing_without_memory(f"the adapter in {path!r}"):
            return self.adapters.load(name, path, replace=replace)

    def update_weights(self, path: str) -> int:
        """Puts the weights at `path` (as in `--model`) in the place of the model's; returns their version.

        Everything is computed again with them: running requests keep their tokens, the prefix cache is dropped.
        Raises `ConfigError`, and changes nothing, when they are of another model or there is no memory for both.
        """
        model_path = dataclasses.replace(self.config, model=path).model_dir
        started = time.monotonic()
        model = load_like(self.runner.model, model_path, self.dims, self.config)
        preempted = self.scheduler.new_weights()
        for request in preempted:
            self.runner.preempt(request.request_id)
        self.runner.model = model
        self.model_path = model_path
        version = self.scheduler.kv_cache_manager.weights_version
        log.info(
            "weights version %d, from %r, in %.2f s: %d requests are computed again",
            version, str(model_path), time.monotonic() - started, len(preempted),
        )  # fmt: skip
        return version

    def stats(self) -> SchedulerStats:
        """State and totals of the scheduler and the KV pool."""
        return self.scheduler.stats()

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns one output for every request that got a token."""
        started = time.monotonic()
        self._faults.before_step()
        scheduled = self.scheduler.schedule()
        for request in scheduled.preempted:
            self.runner.preempt(request.request_id)
        if not scheduled.scheduled:
            return []
        result = self.runner.execute(scheduled)
        for request in self.scheduler.update_from_output(scheduled, result.sampled):
            self.runner.release(request.request_id)
        outputs = self._collect(scheduled, result)
        if self._observer is not None:
            num_prompt_tokens = sum(output.num_prompt_tokens for output in outputs if output.num_output_tokens == 1)
            elapsed = time.monotonic() - started
            self._observer.on_step(elapsed, scheduled.num_scheduled_tokens, num_prompt_tokens, len(outputs))
        return outputs

    def _collect(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[RequestOutput]:
        """Outputs of the sampled tokens; ends requests in which a stop string turned up."""
        now = time.monotonic()
        outputs: list[RequestOutput] = []
        logprobs = result.logprobs or [None] * len(result.sampled)
        for entry, token_id, token_logprobs in zip(scheduled.scheduled, result.sampled, logprobs, strict=True):
            if token_id is None:
                continue
            request = entry.request
            output = self._outputs.token(request, token_id, token_logprobs, now)
            if output.num_output_tokens == 1:
                output.prompt_logprobs = result.prompt_logprobs.get(request.request_id)
            if output.finished and request.status is RequestStatus.RUNNING:
                self.scheduler.finish(request.request_id, RequestStatus.FINISHED_STOPPED)
                self.runner.release(request.request_id)
            outputs.append(output)
        return outputs

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        limit = self.plan.max_model_len
        if len(prompt_token_ids) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(prompt_token_ids)} tokens, but the context limit of {limit} allows at most "
                f"{limit - 1} and one to generate; shorten it or raise --max-model-len"
            )
        vocab_size = self.dims.vocab_size
        if prompt_token_ids and max(prompt_token_ids) >= vocab_size:
            raise ValueError(f"token id {max(prompt_token_ids)} is outside the vocabulary of {vocab_size}")
