"""One round of the isolation probe against one server: look at it, state the budget, run the checks, conclude.

Black-box: everything is asked through the OpenAI API; what else a server tells of itself (`/debug/engine`, `/version`)
only fits the prompts to it. All text and all ids are made up here; nothing of a user's is read or sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from probe.isolation import canary, salt, side_channel
from probe.isolation.client import IsolationClient, ProbeError
from probe.isolation.options import IsolationOptions, Setting, fitted_facts, fitted_prefix, plan_budget
from probe.isolation.result import CheckResult, IsolationResult, conclude
from probe.isolation.round import Progress, Round
from probe.isolation.twins import Kind
from probe.quality.client import EndpointDown, EndpointRefused, QualityClient
from probe.quality.server import Server, describe

_RUN: dict[str, Callable[[Round], Awaitable[list[CheckResult]]]] = {
    "leak-canary": canary.run,
    "side-channel": side_channel.run,
    "cache-salt": salt.run,
}


def run_isolation(
    base_url: str,
    options: IsolationOptions,
    progress: Progress | None = None,
    *,
    target: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> IsolationResult:
    """Runs the checks asked for, one request at a time, within the budget that `progress` is told first.

    `target`: the name the result carries (default: the address). `model`: one of the server's (default: its first).
    `cancelled` is asked between probes. Blocks; starts an event loop of its own. A server that fails midway ends the
    round: the result says why and keeps what was found. Raises `ProbeError` when nothing could be asked.
    """
    return asyncio.run(_carry_out(base_url, options, progress, target, model, api_key, cancelled))


async def _carry_out(
    base_url: str,
    options: IsolationOptions,
    progress: Progress | None,
    target: str | None,
    model: str | None,
    api_key: str | None,
    cancelled: Callable[[], bool] | None,
) -> IsolationResult:
    started_at = time.time()
    base_url = base_url.rstrip("/").removesuffix("/metrics")  # a target's address may be that of its metrics
    server = await _look(base_url, api_key)
    if model is not None:
        server = replace(server, model=model)
    setting = _setting(server, options)
    budget = plan_budget(options, setting)
    client = IsolationClient(
        base_url,
        server.model,
        api_key=api_key,
        timeout_s=options.timeout_s,
        request_limit=budget.requests,
    )
    async with client:
        round_ = Round(client, options, setting, progress=progress, cancelled=cancelled)
        round_.report(f"isolation probe of {client.base_url} ({client.model}): {budget.sentence}")
        checks = await _run_checks(round_)
    verdict, sentence = conclude(checks, round_.stopped)
    version = f" {server.facts['version']}" if "version" in server.facts else ""
    return IsolationResult(
        target=target or client.base_url,
        base_url=client.base_url,
        model=client.model,
        engine=f"{server.facts['engine']}{version}" if "engine" in server.facts else None,
        scope=(server.facts.get("flags") or {}).get("--prefix-cache-scope"),
        checks=tuple(checks),
        verdict=verdict,
        sentence=sentence,
        requests_sent=client.requests_sent,
        requests_failed=round_.failed,
        budget=budget.to_dict(),
        options=options.to_dict(),
        callers=round_.callers,
        started_at=started_at,
        ended_at=time.time(),
        error=round_.stopped,
    )


async def _look(base_url: str, api_key: str | None) -> Server:
    async with QualityClient(base_url, api_key=api_key, patience_s=0.0) as client:
        try:
            return await describe(client)
        except (EndpointDown, EndpointRefused) as error:
            raise ProbeError(str(error)) from None


def _setting(server: Server, options: IsolationOptions) -> Setting:
    kind: Kind = "testbed" if server.suite_kind == "testbed" else "plain"
    vocab_size = (server.facts.get("dims") or {}).get("vocab_size")
    return Setting(
        kind,
        fitted_prefix(options, server.max_model_len),
        vocab_size if isinstance(vocab_size, int) and not options.chat else None,
        fitted_facts(kind, server.max_model_len),
    )


async def _run_checks(round_: Round) -> list[CheckResult]:
    """The checks in their order; once the round is stopped, the rest is not run."""
    if set(round_.options.checks) - {"leak-canary"}:
        await round_.calibrate()
    checks: list[CheckResult] = []
    for name in round_.options.checks:
        if round_.over():
            break
        found = await _RUN[name](round_)
        if round_.over():
            found = [_cut_short(check) for check in found]
        checks += found
        for check in found:
            round_.report(f"{check.check}: {check.verdict}; {check.sentence}")
    if round_.stopped is not None and not any(check.probes for check in checks):
        raise ProbeError(round_.stopped)
    return checks


def _cut_short(check: CheckResult) -> CheckResult:
    """What was seen of a check that did not reach its end: a leak stands, silence does not."""
    if check.verdict != "no leak":
        return check
    return replace(check, verdict="inconclusive", sentence=f"{check.sentence}, when the round was stopped")
