"""`streamlit run app` finds this file: the ASGI app with what runs besides its pages.

The lifespan opens the process-wide `app.runtime` (store, monitor, embedded engine) before the first request and
closes it when the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import streamlit as st

from app.api import ROUTES
from app.runtime import Runtime, set_runtime
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


app = st.App(
    "main.py",
    lifespan=lifespan,
    routes=ROUTES,
    on_script_error=on_script_error,
)
