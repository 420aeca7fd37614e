"""The Starlette application: routes, API key, exception handlers."""

from __future__ import annotations

import os
import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from engine.api.chat import create_chat_completion
from engine.api.completions import create_completion
from engine.api.debug import debug_blocks, debug_engine, debug_requests, debug_scheduler
from engine.api.errors import APIError, as_api_error
from engine.api.models import list_models, load_lora_adapter, show_model, unload_lora_adapter, update_weights
from engine.api.prefix import (
    add_public_prefix,
    clear_public_prefixes,
    debug_prefix,
    list_public_prefixes,
    reset_prefix_cache,
)
from engine.api.serving import Serving, serving_of
from engine.api.tokens import detokenize, tokenize
from engine.api.version import VERSION
from engine.async_engine import ClientGone, EngineDead, RequestRefused
from engine.scheduler import QueueFull

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
STATS_TIMEOUT_S = 0.5  # a scrape waits no longer for a step to end; it then shows the last published state

# Monitoring stays open, as in vLLM; inference and whatever changes the engine needs the key.
OPEN_PREFIXES = ("/health", "/metrics", "/version", "/debug/")


def create_app(serving: Serving) -> Starlette:
    """The application that serves one engine."""
    routes = [
        Route("/health", health),
        Route("/version", show_version),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
        Route("/v1/models/{model:path}", show_model),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/update_weights_from_disk", update_weights, methods=["POST"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/prefix_cache/public", list_public_prefixes),
        Route("/prefix_cache/public", add_public_prefix, methods=["POST"]),
        Route("/prefix_cache/public", clear_public_prefixes, methods=["DELETE"]),
        Route("/debug/engine", debug_engine),
        Route("/debug/blocks", debug_blocks),
        Route("/debug/prefix", debug_prefix),
        Route("/debug/requests", debug_requests),
        Route("/debug/scheduler", debug_scheduler),
    ]
    kinds = (APIError, QueueFull, RequestRefused, EngineDead, ClientGone, HTTPException, Exception)
    handlers: dict[type[Exception], ExceptionHandler] = dict.fromkeys(kinds, handle_error)
    middleware = []
    if serving.llm.config.api_key:
        middleware.append(Middleware(ApiKeyMiddleware, api_key=serving.llm.config.api_key))
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
    app.state.serving = serving
    return app


class ApiKeyMiddleware:
    """401 without `Authorization: Bearer <key>`, except for monitoring."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(OPEN_PREFIXES):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                refusal = APIError(
                    401,
                    "Incorrect or missing API key; send it as Authorization: Bearer KEY.",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def handle_error(request: Request, error: Exception) -> Response:
    """Tells the client in OpenAI's shape; what is not a client's error is also logged by the server."""
    if isinstance(error, MemoryError):
        serving_of(request).engine.die(error)
    return as_api_error(error).response()


async def health(request: Request) -> Response:
    """GET /health: 200 while the engine thread lives, 503 afterwards. The pid tells whose answer it is."""
    alive = serving_of(request).engine.is_alive
    return Response(status_code=200 if alive else 503, headers={"X-Engine-Pid": str(os.getpid())})


async def show_version(_: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": VERSION, "engine": "kvoncall"})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    serving = serving_of(request)
    await serving.engine.refresh_stats(STATS_TIMEOUT_S)
    return Response(serving.metrics.exposition(), headers={"Content-Type": PROMETHEUS_TEXT})
