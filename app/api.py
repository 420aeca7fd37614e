"""What programs ask of the app over HTTP: is it healthy, and take these alerts of somebody else's Alertmanager."""

from __future__ import annotations

import asyncio
import hmac
import os
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.runtime import AppError, get_runtime
from probe.export.own_metrics import exposition
from probe.notify.alertmanager import MAX_BYTES, PayloadError, parse_alertmanager
from probe.store import StoreError

WEBHOOK_TOKEN = "KVONCALL_WEBHOOK_TOKEN"


async def healthz(_: Request) -> JSONResponse:
    """200 while the store is open and the monitor ticks (here or in another process), 503 with a reason else."""
    try:
        health = await asyncio.to_thread(get_runtime().health)
    except AppError as error:
        return JSONResponse({"status": "down", "reason": str(error)}, status_code=503)
    return JSONResponse({"status": "ok", "time": time.time(), **health})


async def alertmanager(request: Request) -> JSONResponse:
    """Alertmanager's webhook, payload version 4; with KVONCALL_WEBHOOK_TOKEN set, a bearer token is asked for.

    Saving an alert twice changes nothing, so a sender may try again.
    """
    token = os.environ.get(WEBHOOK_TOKEN)
    given = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return JSONResponse({"error": "Send the bearer token that the app was started with."}, status_code=401)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            return JSONResponse({"error": f"The payload is larger than {MAX_BYTES // 1024} KiB."}, status_code=413)
    try:
        alerts = parse_alertmanager(bytes(body))
        store = get_runtime().store
        await asyncio.to_thread(store.imported.save, alerts)
    except PayloadError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    except (AppError, StoreError) as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    return JSONResponse({"received": len(alerts)})


async def metrics(request: Request) -> Response:
    """kvoncall's own metrics for Prometheus, in the format it asks for."""
    try:
        runtime = get_runtime()
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(exposition, runtime.store, runtime.monitor, accept)
    except (AppError, StoreError) as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    return Response(body, media_type=content_type)


ROUTES = [
    Route("/metrics", metrics),
    Route("/healthz", healthz),
    Route("/api/alertmanager", alertmanager, methods=["POST"]),
]
