"""`/debug/*`: what the app shows of an engine. Each view is taken between two steps, so it is consistent."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.api.serving import serving_of
from engine.api.version import VERSION

if TYPE_CHECKING:
    from engine.engine import LLMEngine

BLOCK_STATES = ("free", "cached", "used", "shared")  # by the code in `/debug/blocks`


async def debug_engine(request: Request) -> Response:
    """GET /debug/engine: flags in force, model dimensions, memory plan, fp8 scales, statistics."""
    serving = serving_of(request)
    llm = serving.llm
    stats = await serving.engine.call(lambda engine: engine.stats())
    return JSONResponse(
        {
            "engine": "kvoncall",
            "version": VERSION,
            "pid": os.getpid(),
            "model": serving.model_name,
            "started_at": serving.started_at,
            "uptime_seconds": time.time() - serving.started_at,
            "flags": llm.config.flag_values(),
            "dims": dataclasses.asdict(llm.dims),
            "memory_plan": llm.plan.to_dict(),
            "kv_scales": [dataclasses.asdict(scales) for scales in llm.runner.kv_scales()],
            "device_memory_used_bytes": serving.metrics.memory_used(),
            "stats": dataclasses.asdict(stats),
        }
    )


async def debug_blocks(request: Request) -> Response:
    """GET /debug/blocks: one state code a usable block, in block order from block 1 (block 0 is the null block)."""
    serving = serving_of(request)
    plan = serving.llm.plan
    states = await serving.engine.call(lambda engine: engine.scheduler.kv_cache_manager.block_pool.snapshot())
    return JSONResponse(
        {
            "num_blocks": plan.num_gpu_blocks,
            "block_size": plan.block_size,
            "state_names": BLOCK_STATES,
            "states": states,
        }
    )


async def debug_requests(request: Request) -> Response:
    """GET /debug/requests: running requests in batch order, then waiting ones in queue order."""
    return JSONResponse({"requests": await serving_of(request).engine.call(_request_views)})


async def debug_scheduler(request: Request) -> Response:
    """GET /debug/scheduler: statistics and the last steps."""
    serving = serving_of(request)

    def view(engine: LLMEngine) -> dict[str, Any]:
        steps = [dataclasses.asdict(step) for step in serving.metrics.last_steps]
        return {"stats": dataclasses.asdict(engine.stats()), "last_steps": steps}

    return JSONResponse(await serving.engine.call(view))


def _request_views(engine: LLMEngine) -> list[dict[str, Any]]:
    now = time.monotonic()
    scheduler = engine.scheduler
    return [
        {
            "request_id": request.request_id,
            "status": request.status.value,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": len(request.output_token_ids),
            "max_tokens": request.params.max_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_blocks": len(request.block_ids),
            "num_preemptions": request.num_preemptions,
            "priority": request.priority,
            "isolated": bool(request.identity.namespace),
            "age_seconds": now - request.arrival_time,
        }
        for request in (*scheduler.running, *scheduler.waiting, *scheduler.parked)
    ]
