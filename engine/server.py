"""`python -m engine.server FLAGS`: one engine process, from flags to exit code.

Order: parse flags, read the model's config.json, bind the port, import torch, limit the memory, load the model,
serve: whatever can be refused without torch is refused at once. Exit codes:
0 stopped, 1 an unexpected error, 2 a flag, configuration or model that cannot work, 3 the port is in use,
12 out of memory. Every refusal is one sentence on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.config import ConfigError, EngineConfig, ModelDims

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.engine import LLMEngine
    from engine.metrics import EngineMetrics

EXIT_STOPPED = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PORT = 3
EXIT_OOM = 12

GRACE_S = 3.0  # how long requests in flight may still take after SIGTERM
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none of them reuses one as it is closed
LOG_STATS_INTERVAL_S = 10.0
SWITCH_INTERVAL_S = 0.001  # the engine thread and the event loop share the interpreter

log = logging.getLogger("engine")


class PortInUse(Exception):  # noqa: N818 (an exit code of its own)
    """The address cannot be bound; the message is one sentence."""


def main(argv: Sequence[str]) -> int:
    """Runs an engine until it is told to stop; returns the exit code. Out of memory ends the process at once."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S", force=True,
    )  # fmt: skip
    try:
        config = EngineConfig.from_args(argv)
        if config.exit_with_parent:
            threading.Thread(target=_exit_at_end_of_stdin, name="parent-watch", daemon=True).start()
        return _serve(config)
    except ConfigError as error:
        return _refuse(str(error), EXIT_CONFIG)
    except PortInUse as error:
        return _refuse(str(error), EXIT_PORT)
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _refuse(sentence: str, code: int) -> int:
    print(f"kvoncall serve: {sentence}", file=sys.stderr, flush=True)
    return code


def _exit_at_end_of_stdin() -> None:
    """The parent holds the other end of stdin; when it dies, however it dies, the pipe reaches its end."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(EXIT_STOPPED)


def _serve(config: EngineConfig) -> int:
    config.resolved_max_model_len(ModelDims.from_model_dir(config.model_dir))
    sock = _bind(config.host, config.port)
    # Everything is imported before the memory limit: code is not the device's to pay for.
    import uvicorn  # noqa: F401

    import engine.api.app
    import engine.engine  # noqa: F401
    from engine.async_engine import AsyncEngine
    from engine.device import is_out_of_memory
    from engine.metrics import EngineMetrics

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server_failed = threading.Event()
    stop_serving: list[Callable[[], object]] = []

    def on_death(error: BaseException) -> None:
        if is_out_of_memory(error):
            _die_of_oom(error, config)
        log.critical("engine died: %s: %s", type(error).__name__, error, exc_info=error)
        server_failed.set()
        for stop in stop_serving:
            stop()

    metrics = EngineMetrics(config, lambda: async_engine.stats)
    async_engine = AsyncEngine(lambda: _build(config, metrics), on_death=on_death, on_rejected=metrics.on_rejected)
    try:
        llm = async_engine.start()
    except ConfigError:
        raise
    except Exception as error:
        on_death(error)
        return EXIT_ERROR
    try:
        asyncio.run(_run_http(config, async_engine, llm, metrics, sock, stop_serving))
    except MemoryError as error:
        _die_of_oom(error, config)
    finally:
        stopped = async_engine.stop()
    code = EXIT_ERROR if server_failed.is_set() else EXIT_STOPPED
    if not stopped:
        log.warning("the step in progress did not end in time; leaving it")
        logging.shutdown()
        os._exit(code)
    log.info("engine stopped")
    return code


def _die_of_oom(error: BaseException, config: EngineConfig) -> NoReturn:
    """Ends the process at once: after a failed allocation nothing in it can be relied on."""
    reason = " ".join(str(error).split()) or type(error).__name__
    with contextlib.suppress(MemoryError):
        log.critical("engine died: out of memory: %s (device memory %d bytes)", reason, config.device_memory)
    os._exit(EXIT_OOM)


def _bind(host: str, port: int) -> socket.socket:
    """Reserves the address before the model is loaded; clients are refused until `listen`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _naming_the_port(sock, host, port):
        sock.bind(address)
    return sock


@contextlib.contextmanager
def _naming_the_port(sock: socket.socket, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} on {host} is in use; stop what holds it or choose another --port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _build(config: EngineConfig, metrics: EngineMetrics) -> LLMEngine:
    """Loads the model under the memory limit. Runs in the engine thread."""
    import torch

    from engine.device import apply_memory_limit, resolve_device
    from engine.engine import LLMEngine

    started = time.monotonic()
    device = resolve_device(config)
    if device.type == "cpu":
        torch.ones(2**20).exp_()  # torch starts its threads; their stacks are not the device's to hold
        held_before = _private_bytes()
        apply_memory_limit(config.device_memory)
        memory_used = lambda: max(0, _private_bytes() - held_before)  # noqa: E731
    else:
        memory_used = _cuda_bytes_used
    llm = LLMEngine(config, observer=metrics)
    plan = llm.plan
    metrics.set_plan(plan, memory_used)
    log.info(
        "model %s ready in %.1f s on %s: %d KV blocks of %d tokens, %d tokens in all, %.2f requests of %d tokens",
        config.served_model_name, time.monotonic() - started, device, plan.num_gpu_blocks, plan.block_size,
        plan.kv_cache_size_tokens, plan.max_concurrency, plan.max_model_len,
    )  # fmt: skip
    return llm


def _private_bytes() -> int:
    """Private writable memory of this process, which `RLIMIT_DATA` limits (and its stack): see proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _cuda_bytes_used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


async def _run_http(
    config: EngineConfig,
    engine: AsyncEngine,
    llm: LLMEngine,
    metrics: EngineMetrics,
    sock: socket.socket,
    stop_serving: list[Callable[[], object]],
) -> None:
    import uvicorn

    from engine.api.app import create_app
    from engine.api.serving import Serving

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are installed below; uvicorn's would raise the signal again after a clean shutdown

    app = create_app(Serving(engine, llm, metrics, started_at=time.time()))
    server = Server(
        uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=int(GRACE_S) + 2, timeout_keep_alive=KEEP_ALIVE_S, server_header=False,
        )
    )  # fmt: skip
    loop = asyncio.get_running_loop()

    def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), MemoryError):
            engine.die(error)
        loop.default_exception_handler(context)

    loop.set_exception_handler(on_loop_error)

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True
        loop.call_later(GRACE_S, engine.abort_all)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
    stop_serving.append(lambda: loop.call_soon_threadsafe(stop))
    with _naming_the_port(sock, config.host, config.port):
        sock.listen(2048)
    log.info("listening on http://%s:%d", config.host, sock.getsockname()[1])
    logging_stats = None if config.disable_log_stats else asyncio.create_task(_log_stats(engine, metrics))
    await server.serve(sockets=[sock])
    if logging_stats is not None:
        logging_stats.cancel()


async def _log_stats(engine: AsyncEngine, metrics: EngineMetrics) -> None:
    """One line about the engine's state while it works, for whoever reads the log after a crash."""
    seen = metrics.tokens_total
    while True:
        await asyncio.sleep(LOG_STATS_INTERVAL_S)
        total, stats = metrics.tokens_total, engine.stats
        if stats is None or (total == seen and not stats.running):
            continue
        log.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV usage %.1f%%, preemptions %d",
            *((now - before) / LOG_STATS_INTERVAL_S for now, before in zip(total, seen, strict=True)),
            stats.running, stats.waiting, stats.kv_usage * 100, stats.preemptions_total,
        )  # fmt: skip
        seen = total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
