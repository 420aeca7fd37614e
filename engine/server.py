"""`python -m engine.server FLAGS`: one engine process, from flags to exit code.

Order: parse flags, read the model's config.json, bind the port, import torch, limit the memory, load the model,
serve: whatever can be refused without torch is refused at once. Exit codes:
0 stopped, 1 an unexpected error, 2 a flag, configuration or model that cannot work, 3 the port is in use,
12 out of memory. Every refusal is one sentence on stderr.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine import gemma
from engine.config import ConfigError, EngineConfig, ModelDims

if TYPE_CHECKING:
    from engine.engine import LLMEngine
    from engine.metrics import EngineMetrics

EXIT_STOPPED = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PORT = 3
EXIT_OOM = 12

BACKLOG = 2048  # connections the kernel queues for us
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
    except KeyboardInterrupt:  # while loading; later the server handles the signal
        _exit_now(EXIT_STOPPED)


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
    if config.model == gemma.NAME:
        log.info(gemma.NOTICE)
    dims = ModelDims.from_model_dir(config.model_dir)
    config.resolved_max_model_len(dims)
    config.layer_kv_formats(dims)
    sock = _bind(config.host, config.port)
    # OpenMP threads that wait spin first: for ever is ruinous on a busy machine, not at all costs a quarter of the
    # throughput on an idle one. Read by libgomp when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # All code is imported before the memory limit: it is not the device's to hold.
    import engine.engine  # noqa: F401
    from engine.api.http import HttpServer
    from engine.async_engine import AsyncEngine
    from engine.device import is_out_of_memory
    from engine.metrics import EngineMetrics

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    failed = threading.Event()
    http = HttpServer(config)

    def on_death(error: BaseException) -> None:
        if is_out_of_memory(error):
            _die_of_oom(error, config)
        log.critical("engine died: %s: %s", type(error).__name__, error, exc_info=error)
        failed.set()
        http.stop_soon()

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
        with _naming_the_port(sock, config.host, config.port):
            sock.listen(BACKLOG)
        http.run(async_engine, llm, metrics, sock)
    except MemoryError as error:
        _die_of_oom(error, config)
    finally:
        stopped = async_engine.stop()
    code = EXIT_ERROR if failed.is_set() else EXIT_STOPPED
    if not stopped:
        log.warning("the step in progress did not end in time; leaving it")
        _exit_now(code)
    log.info("engine stopped")
    return code


def _exit_now(code: int) -> NoReturn:
    """Ends the process although the engine thread may still be inside torch, which an orderly exit would trip over."""
    logging.shutdown()
    os._exit(code)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
