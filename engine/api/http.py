"""Runs the application in uvicorn on the main thread: signals, graceful shutdown, periodic log line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from engine.api.app import create_app
from engine.api.serving import Serving
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.metrics import EngineMetrics

if TYPE_CHECKING:
    from engine.engine import LLMEngine

GRACE_S = 3.0  # how long requests in flight may still take after SIGTERM
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none of them reuses one as it is closed
LOG_STATS_INTERVAL_S = 10.0

log = logging.getLogger("engine")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # HttpServer handles them; uvicorn would raise a signal again after a clean shutdown


class HttpServer:
    """Serves one engine until SIGINT, SIGTERM or `stop_soon`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked = False

    def run(self, engine: AsyncEngine, llm: LLMEngine, metrics: EngineMetrics, sock: socket.socket) -> None:
        """Serves on a listening socket; returns when the server has shut down."""
        asyncio.run(self._run(engine, llm, metrics, sock))

    def stop_soon(self) -> None:
        """Asks for a graceful shutdown, from any thread; the second time for one that waits for nobody."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(self._stop)
        self._stop_asked = True

    async def _run(self, engine: AsyncEngine, llm: LLMEngine, metrics: EngineMetrics, sock: socket.socket) -> None:
        self._engine = engine
        app = create_app(Serving(engine, llm, metrics, started_at=time.time()))
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S) + 2,
            )
        )
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(signum, self._stop)
        if self._stop_asked:
            self._stop()
        log.info("listening on http://%s:%d", self._config.host, sock.getsockname()[1])
        logging_stats = asyncio.create_task(self._log_stats(metrics))
        await self._server.serve(sockets=[sock])
        logging_stats.cancel()

    def _stop(self) -> None:
        if self._server.should_exit:
            self._server.force_exit = True
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(GRACE_S, self._engine.abort_all)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), MemoryError):
            self._engine.die(error)
        loop.default_exception_handler(context)

    async def _log_stats(self, metrics: EngineMetrics) -> None:
        """One line about the engine's state while it works, for whoever reads the log after a crash."""
        seen = metrics.tokens_total
        while not self._config.disable_log_stats:
            await asyncio.sleep(LOG_STATS_INTERVAL_S)
            total, stats = metrics.tokens_total, self._engine.stats
            if stats is None or (total == seen and not stats.running):
                continue
            prompt, generation = (
                (now - before) / LOG_STATS_INTERVAL_S for now, before in zip(total, seen, strict=True)
            )
            log.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV usage %.1f%%, "
                "preemptions %d",
                prompt,
                generation,
                stats.running,
                stats.waiting,
                stats.kv_usage * 100,
                stats.preemptions_total,
            )
            seen = total
