"""`kvoncall isolation`: which server is probed, what is printed, and the exit code.

"embedded" starts an engine of its own with the flags given, probes it and stops it; every other server is probed
where it runs. Codes: 0 no leak, 1 leak shown, 3 inconclusive; 2 when the probe stopped early without showing a leak.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import gemma
from engine.config import EngineConfig
from engine.supervisor import EngineSupervisor
from probe.commands.output import log_dir, open_store
from probe.isolation.client import ProbeError
from probe.isolation.options import IsolationOptions
from probe.isolation.probe import run_isolation
from probe.isolation.record import record
from probe.isolation.result import IsolationResult
from probe.isolation.round import Progress
from probe.quality.command import EMBEDDED, GEMMA_FLAGS
from probe.quality.lab import START_TIMEOUT_S, TARGET
from probe.store import Store
from probe.targets import api_key_from, find_server

CODES = {"no leak": 0, "leak shown": 1, "inconclusive": 3}
STOPPED = 2
_ENGINE_NAME = "isolation"


@dataclass(frozen=True)
class Outcome:
    """What was found, and the exit code."""

    result: IsolationResult
    code: int


@dataclass(frozen=True)
class _Server:
    """`target`: what the round is stored under."""

    target: str
    url: str
    model: str | None
    api_key: str | None


def options_of(options: argparse.Namespace) -> IsolationOptions:
    """The round the command line asks for; raises `ProbeError`."""
    checks = tuple(word.strip() for word in options.checks.split(",") if word.strip())
    return IsolationOptions(
        checks=(options.variant,) if options.variant else checks,
        probes=options.probes,
        tenants_by=options.tenants_by,
        salted=options.salted,
        chat=options.chat,
        prefix_tokens=options.prefix_tokens,
        timeout_s=options.timeout,
    )


def run(options: argparse.Namespace, report: Progress) -> Outcome:
    """One round, kept in the store. Raises `ProbeError`, `ConfigError`, `EngineStartError` and `StoreError`."""
    asked = options_of(options)
    with open_store(options) as store, _server(store, options, log_dir(options), report) as server:
        result = run_isolation(
            server.url, asked, report, target=server.target, model=server.model, api_key=server.api_key
        )
        record(store, server.target, result)
    stopped = result.error is not None and result.verdict != "leak shown"
    return Outcome(result, STOPPED if stopped else CODES[result.verdict])


def text(result: IsolationResult) -> str:
    """The result for people."""
    seconds = result.ended_at - result.started_at
    lines = [result.sentence, ""]
    lines += [f"  {check.check:20} {check.verdict:13} {check.sentence}" for check in result.checks]
    engine = f", {result.engine}" if result.engine else ""
    scope = f", scope {result.scope}" if result.scope else ""
    failed = f", {result.requests_failed} failed" if result.requests_failed else ""
    budget = result.budget["requests"]
    lines += ["", f"  {result.target} ({result.model}{engine}{scope})"]
    lines += [f"  {result.requests_sent:,} of at most {budget:,} requests in {seconds:.0f} s{failed}"]
    return "\n".join(lines)


@contextmanager
def _server(store: Store, options: argparse.Namespace, log_dir: Path, report: Progress) -> Iterator[_Server]:
    if options.target == EMBEDDED:
        flags = _flags(options, report)
        api_key = EngineConfig.from_args(flags).api_key
        supervisor = EngineSupervisor(flags, log_dir=log_dir, name=_ENGINE_NAME)
        try:
            supervisor.start(timeout_s=START_TIMEOUT_S)
            yield _Server(TARGET, str(supervisor.base_url), None, api_key)
        finally:
            supervisor.stop()
        return
    if options.engine_flags or options.scope:
        raise ProbeError("--engine-flags and --scope need --target embedded: a running server keeps its flags")
    name, url = find_server(store, options.target)
    yield _Server(name, url, options.model or None, api_key_from(options.api_key_env))


def _flags(options: argparse.Namespace, report: Progress) -> list[str]:
    try:
        flags = shlex.split(options.engine_flags)
    except ValueError as error:
        raise ProbeError(f"--engine-flags cannot be read: {error}") from None
    if options.scope:
        flags += ["--prefix-cache-scope", options.scope]
    if options.model == gemma.NAME:
        report(gemma.NOTICE)
        flags = [*GEMMA_FLAGS.split(), *flags]
    return [*flags, "--model", options.model] if options.model else flags
