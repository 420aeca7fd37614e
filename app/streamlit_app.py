"""`streamlit run app` finds this file: the ASGI app with what runs besides its pages.

The lifespan opens the process-wide `app.runtime` (store, monitor, embedded engine) before the first request and
closes it when the server stops; /healthz answers load balancers and scripts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import streamlit as st
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.runtime import AppError, Runtime, get_runtime, set_runtime
from app.ui.guard import on_script_error


@asynccontextmanager
async def lifespan(_: st.App) -> AsyncIterator[dict[str, Any]]:
    """Opens and closes the runtime."""
    runtime = await asyncio.to_thread(Runtime.from_env)
    set_runtime(runtime)
    try:
        yield {}
    finally:
        set_runtime(None)
        await asyncio.to_thread(runtime.close)


async def healthz(_: Request) -> JSONResponse:
    """200 while the store is open and the monitor ticks (here or in another process), 503 with a reason else."""
    try:
        health = await asyncio.to_thread(get_runtime().health)
    except AppError as error:
        return JSONResponse({"status": "down", "reason": str(error)}, status_code=503)
    return JSONResponse({"status": "ok", "time": time.time(), **health})


app = st.App(
    "main.py",
    lifespan=lifespan,
    routes=[Route("/healthz", healthz)],
    on_script_error=on_script_error,
)
