"""Continuous batching: decides, step by step, which tokens of which requests are computed next.

One rule covers prefill, chunked prefill, prefix hits, decoding and resumption: a request's
`num_computed_tokens` must catch up with its `num_tokens`. Running requests are served first, in the order of
their admission, then waiting ones, within one token budget per step. When blocks run out, the last running
request (or the one of lowest priority) is preempted: its blocks go back, its tokens stay, and it is computed
again later. The oldest request is never preempted for another one and always fits the pool alone (else it was
rejected on arrival), so some request always gets on.

A request that forks from another (`fork_of`) is parked until that one has its first token or is gone, then goes to
the front of the queue and starts from the leader's blocks if it still runs.

Calls alternate: `schedule`, run the model, `update_from_output`. `add_request`, `finish` and `abort` may come at
any time between them. Not thread-safe. Decisions depend on nothing but the calls and their order.
"""

from __future__ import annotations

import time
from bisect import insort, insort_left
from collections import deque
from collections.abc import Callable, Sequence

from engine.block_pool import Block
from engine.config import ConfigError, EngineConfig
from engine.forks import Fork, ParkedForks
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduler_output import ScheduledRequest, SchedulerOutput, SchedulerStats

__all__ = ["QueueFull", "ScheduledRequest", "Scheduler", "SchedulerOutput", "SchedulerStats"]


class QueueFull(RuntimeError):  # noqa: N818 - a state of the engine the client can wait out, not a fault
    """More requests wait than `--max-num-queued-reqs` allows."""


class Scheduler:
    """Owns all unfinished requests: `running` (admission order) and `waiting` (next first)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_gpu_blocks: int,
        max_model_len: int,
        keeps_open_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_gpu_blocks` includes the null block; `clock` gives seconds for `first_scheduled_time` and expiry.

        keeps_open_blocks: whether some layer's KV format does.
        Raises `ConfigError` when prompts must be scheduled whole but the longest would exceed the step's budget.
        """
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill --max-num-batched-tokens ({config.max_num_batched_tokens}) must be at "
                f"least the context limit ({max_model_len}); raise it, lower --max-model-len, or drop "
                f"--no-enable-chunked-prefill"
            )
        self.config = config
        self.max_model_len = max_model_len
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks,
            config.block_size,
            config.enable_prefix_caching,
            hash_algo=config.prefix_caching_hash_algo,
            verify=config.prefix_cache_verify,
            ttl=config.prefix_cache_ttl,
            clock=clock,
            fault=config.prefix_cache_fault,
            fork_sharing=config.enable_fork_sharing,
            keeps_open_blocks=keeps_open_blocks,
        )
        self.waiting: deque[Request] = deque()
        self.parked = ParkedForks()  # they wait too, but not for room
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.preemptions_total = 0
        self.preempted_requests_total = 0
        self._clock = clock
        self._by_priority = config.scheduling_policy == "priority"
        self._watermark_blocks = int(config.watermark * self.kv_cache_manager.block_pool.num_usable_blocks)
        self._in_flight: SchedulerOutput | None = None

    def add_request(self, request: Request) -> None:
        """Queues a request, or parks it when it forks from one that has no token yet.

        Raises `ValueError` when it could never finish here (too long for the context or for the whole pool, or
        an id already in use) and `QueueFull` when the queue is at its limit.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        self._check_fits(request)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.num_waiting >= limit:
            raise QueueFull(f"{self.num_waiting} requests are waiting, the limit is {limit}; try again later")
        self.requests[request.request_id] = request
        leader = self._leader_of(request)
        if leader is not None and leader.num_output_tokens == 0:
            self.parked.park(request, leader)
        elif leader is not None and leader.status is RequestStatus.RUNNING:
            self._put_in_front([request])
        elif self._by_priority:
            insort(self.waiting, request, key=_priority_key)
        else:
            self.waiting.append(request)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.parked)

    def finish(self, request_id: str, status: RequestStatus) -> Request | None:
        """Ends a request from outside (abort, stop string); `None` when it is unknown or finished already.

        Between `schedule` and `update_from_output` the blocks of a scheduled request stay its own until the
        step is over, because the model may still write into them.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif not self.parked.remove(request):
            self.waiting.remove(request)
        request.status = status
        self._release_forks(request)
        in_flight = self._in_flight.scheduled if self._in_flight is not None else ()
        if not any(entry.request is request for entry in in_flight):
            self.kv_cache_manager.free(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """`finish` with FINISHED_ABORTED."""
        return self.finish(request_id, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing done, while requests hold blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def new_weights(self) -> list[Request]:
        """Makes everything be computed again, as the model's weights have changed; returns whom it preempted.

        Raises `RuntimeError` while a step is in flight.
        """
        if self._in_flight is not None:
            raise RuntimeError("new_weights() came before update_from_output() of the step in flight")
        preempted = self.running[::-1]  # the first comes back first
        self.running = []
        for request in preempted:
            self._preempt(request)
        self.kv_cache_manager.new_weights()
        return preempted

    def stats(self) -> SchedulerStats:
        """State and totals; blocks whose time to live is over are emptied first."""
        self.kv_cache_manager.sweep_expired()
        return SchedulerStats.of(
            self.kv_cache_manager,
            running=len(self.running),
            waiting=self.num_waiting,
            preemptions_total=self.preemptions_total,
            preempted_requests_total=self.preempted_requests_total,
        )

    def schedule(self) -> SchedulerOutput:
        """Chooses the tokens of the next step and allocates their slots.

        Admits nobody in a step that had to preempt. An output without tokens means there is nothing to do and
        needs no update. Raises `RuntimeError` when the previous step has not been updated.
        """
        if self._in_flight is not None:
            raise RuntimeError("schedule() came before update_from_output() of the previous step")
        self.kv_cache_manager.sweep_expired()
        output = SchedulerOutput()
        entries: list[ScheduledRequest] = []
        budget = self._schedule_running(entries, output.preempted, self.config.max_num_batched_tokens)
        if not output.preempted:
            self._schedule_waiting(entries, budget)
        decodes = [entry for entry in entries if entry.num_scheduled_tokens == 1]
        chunks = [entry for entry in entries if entry.num_scheduled_tokens != 1]
        output.scheduled = decodes + chunks
        output.num_scheduled_tokens = len(decodes) + sum(entry.num_scheduled_tokens for entry in chunks)
        output.block_copies = self.kv_cache_manager.take_block_copies()
        if entries:
            self._in_flight = output
        return output

    def update_from_output(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> list[Request]:
        """Books a step that has been computed; returns the requests it finished, in scheduling order.

        `sampled` has one entry per scheduled request, `None` where it does not sample. Requests finished from
        outside in the meantime get no token and are not returned. Raises `ValueError` when `sampled` does not
        match the output and `RuntimeError` when the output is not the step in flight.
        """
        if output is not self._in_flight:
            if not output.scheduled and not sampled:
                return []
            raise RuntimeError("update_from_output() got an output that is not the step in flight")
        if len(sampled) != len(output.scheduled):
            raise ValueError(f"{len(output.scheduled)} requests were scheduled, got {len(sampled)} samples")
        self._in_flight = None
        manager = self.kv_cache_manager
        block_size = manager.block_size
        any_parked = len(self.parked) > 0
        finished = []
        for entry, token_id in zip(output.scheduled, sampled, strict=True):
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                manager.free(request)
                continue
            num_computed = entry.num_computed_tokens + entry.num_scheduled_tokens
            request.num_computed_tokens = num_computed
            if num_computed % block_size < entry.num_scheduled_tokens:  # the step completed a block
                manager.cache_computed_blocks(request)
            if not entry.samples:
                continue
            if token_id is None:
                raise ValueError(f"{request} reached its last token but has no sample")
            request.append_output_token(token_id)
            if any_parked:
                self._release_forks(request)
            may_end = len(request.all_token_ids) >= request.max_num_tokens or token_id in request.stop_token_ids
            if may_end and _stop(request, token_id):
                finished.append(request)
        self._release(finished)
        return finished

    def _schedule_running(self, entries: list[ScheduledRequest], preempted: list[Request], budget: int) -> int:
        """Appends running requests to `entries` and victims to `preempted`; returns the budget that is left."""
        running = self.running
        allocate_slots = self.kv_cache_manager.allocate_slots
        block_size = self.kv_cache_manager.block_size
        chunk_limit = self._chunk_limit()
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_left = len(request.all_token_ids) - num_computed
            num_new = 1 if num_left == 1 else min(num_left, budget, chunk_limit)
            has_slot = num_new == 1 and num_computed % block_size  # it goes into a block that the request has begun
            while not (has_slot or allocate_slots(request, num_new)):
                victim = max(reversed(running), key=_priority_key) if self._by_priority else running[-1]
                position = running.index(victim)
                if position < index:  # only by priority: the victim has a place in this step already
                    index -= 1
                    budget += _drop_entry(entries, victim)
                del running[position]
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                entries.append(ScheduledRequest(request, num_new, num_computed, num_new == num_left))
                budget -= num_new
                index += 1
        return budget

    def _schedule_waiting(self, entries: list[ScheduledRequest], budget: int) -> None:
        """Admits waiting requests in order until one does not fit: nobody overtakes the head of the queue."""
        manager = self.kv_cache_manager
        chunk_limit = self._chunk_limit()
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hits, fork = self._find_start(request)
            num_left = request.num_tokens - (len(hits) * manager.block_size if fork is None else fork.num_tokens)
            if num_left > budget and not self.config.enable_chunked_prefill:
                break
            # With nothing running, waiting for the reserve would be waiting for ever.
            reserved_blocks = self._watermark_blocks if self.running else 0
            if not manager.can_admit(request, hits, reserved_blocks, fork):
                break
            if request.first_scheduled_time is None:
                request.first_scheduled_time = self._clock()
                if fork is None:
                    manager.record_first_admission(request, hits)
                else:
                    manager.record_fork(request, fork)
            num_new = min(num_left, budget, chunk_limit)
            if not manager.allocate_slots(request, num_new, hits, fork):
                raise AssertionError(f"{request} was admitted but its first chunk does not fit")
            self.waiting.popleft()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.fork_of = None  # or chains of forks would be kept alive
            entries.append(ScheduledRequest(request, num_new, request.num_computed_tokens, num_new == num_left))
            budget -= num_new

    def _find_start(self, request: Request) -> tuple[list[Block], Fork | None]:
        """What a waiting request need not compute: its hits or, if that is more, what its running leader has."""
        manager = self.kv_cache_manager
        hits = manager.get_computed_blocks(request)
        leader = request.fork_of
        if leader is None or leader.status is not RequestStatus.RUNNING:
            return hits, None
        fork = manager.fork(leader, request)
        if fork is None or fork.num_tokens <= len(hits) * manager.block_size:
            return hits, None
        return [], fork

    def _leader_of(self, request: Request) -> Request | None:
        """The unfinished request whose blocks this one may start from."""
        leader = request.fork_of
        if leader is None or not self.config.enable_fork_sharing:
            return None
        return leader if self.requests.get(leader.request_id) is leader else None

    def _release_forks(self, leader: Request) -> None:
        """Lets the children of a leader, which has its first token or is gone, compete for room."""
        self._put_in_front(self.parked.take(leader))

    def _put_in_front(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            if self._by_priority:
                insort_left(self.waiting, request, key=_priority_key)
            else:
                self.waiting.appendleft(request)

    def _chunk_limit(self) -> int:
        """The most tokens one request may take in a step: a long prompt is held back only when others want it."""
        config = self.config
        shared = len(self.running) + self.num_waiting > 1
        if config.enable_chunked_prefill and config.long_prefill_token_threshold and shared:
            return config.long_prefill_token_threshold
        return config.max_num_batched_tokens

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks; it will be computed again from its tokens, output included."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.preemptions_total += 1
        self.preempted_requests_total += request.num_preemptions == 0
        request.num_preemptions += 1
        self._put_in_front([request])

    def _release(self, finished: list[Request]) -> None:
        if not finished:
            return
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        for request in finished:
            del self.requests[request.request_id]
            if self.config.engine_fault == "block_leak":
                del request.block_ids[:1]  # nobody gives it back
            self.kv_cache_manager.free(request)
            self._release_forks(request)

    def _check_fits(self, request: Request) -> None:
        prompt, limit = request.num_prompt_tokens, self.max_model_len
        if prompt >= limit:
            raise ValueError(
                f"the prompt has {prompt} tokens; with a context limit of {limit} it may have at most {limit - 1}"
            )
        # The last token is only returned, never computed, so it needs no slot.
        most = request.max_num_tokens - 1
        slots = self.kv_cache_manager.block_pool.num_usable_blocks * self.config.block_size
        if most > slots:
            raise ValueError(
                f"the request may grow to {most} tokens but the whole KV cache holds {slots}; "
                f"lower max_tokens, shorten the prompt, or give the engine more KV blocks"
            )


def _priority_key(request: Request) -> tuple[int, float]:
    """Who is served first: lower priority value, then earlier arrival. Among equals the last is served last."""
    return request.priority, request.arrival_time


def _stop(request: Request, token_id: int) -> bool:
    """Ends a request whose newest token is a stop token or its last one; False when `min_tokens` forbids it."""
    params = request.params
    if token_id in request.stop_token_ids and request.num_output_tokens >= params.min_tokens:
        request.status = RequestStatus.FINISHED_STOPPED
        is_eos = token_id == request.eos_token_id and not params.ignore_eos
        request.stop_reason = None if is_eos else token_id
        return True
    if request.num_tokens >= request.max_num_tokens:
        request.status = RequestStatus.FINISHED_LENGTH
        return True
    return False


def _drop_entry(entries: list[ScheduledRequest], victim: Request) -> int:
    """Removes the victim's part in this step; returns its tokens (0 if it had none)."""
    for position, entry in enumerate(entries):
        if entry.request is victim:
            del entries[position]
            return entry.num_scheduled_tokens
    return 0
