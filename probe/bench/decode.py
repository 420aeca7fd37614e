"""Decode throughput of the embedded engine against `transformers`, and through HTTP against another server.

The same ragged batch of real testbed conversations, greedy, the same number of new tokens for every request.
The two sides take turns, warm-up excluded; medians and their ratio are reported.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import SamplingParams
from engine.supervisor import EngineSupervisor
from engine.tokenizer import Tokenizer
from probe.bench import Report

NUM_REQUESTS = 32
NEW_TOKENS = 128
PROMPT_TOKENS = (32, 512)  # shortest and longest prompt
ROUNDS = 3


def ragged_prompts(vocabulary: range, *, seed: int = 0) -> list[list[int]]:
    """`NUM_REQUESTS` prompts of uniformly drawn lengths and tokens; nothing is shared between them."""
    rng = random.Random(seed)
    return [rng.choices(vocabulary, k=rng.randint(*PROMPT_TOKENS)) for _ in range(NUM_REQUESTS)]


def bench_decode(model: str, *, report: Report) -> dict[str, Any]:
    """Tokens per second of both sides in this process, their ratio, and where the engine's time goes.

    Decoding alone is what remains after a run of one token (prompts and first token) is taken off.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = EngineConfig(model=model, max_num_seqs=NUM_REQUESTS, enable_prefix_caching=False)
    engine = LLMEngine(config)
    reference: Any = AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32).eval()
    prompts = ragged_prompts(range(4, engine.dims.vocab_size), seed=1)
    sides: dict[str, Callable[[int], float]] = {
        "engine": lambda new_tokens: _time_engine(engine, prompts, new_tokens),
        "transformers": lambda new_tokens: _time_transformers(reference, prompts, new_tokens),
    }
    total: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(ROUNDS + 1):
        for name, seconds in sides.items():
            first, all_tokens = seconds(1), seconds(NEW_TOKENS)
            if round_:  # the first round warms up
                total[name].append(NUM_REQUESTS * NEW_TOKENS / all_tokens)
                decode[name].append(NUM_REQUESTS * (NEW_TOKENS - 1) / (all_tokens - first))
                report(f"round {round_}: {name} {decode[name][-1]:.0f} tok/s, {total[name][-1]:.0f} with the prompts")
    return {
        "requests": NUM_REQUESTS,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens_per_request": NEW_TOKENS,
        "threads": torch.get_num_threads(),
        **_compare("decode", decode["engine"], decode["transformers"]),
        **_compare("with_prompts", total["engine"], total["transformers"]),
        "engine_time_by_part": _time_by_part(engine, prompts),
    }


def _compare(what: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Medians of both sides in tokens per second, and the ratio round by round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        f"{what}_engine_tokens_per_s": round(statistics.median(ours)),
        f"{what}_transformers_tokens_per_s": round(statistics.median(theirs)),
        f"{what}_ratio": round(statistics.median(ratios), 2),
        f"{what}_ratio_min_max": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def _run_engine(engine: LLMEngine, prompts: list[list[int]], new_tokens: int) -> None:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"bench-{index}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()


def _time_engine(engine: LLMEngine, prompts: list[list[int]], new_tokens: int) -> float:
    started = time.perf_counter()
    _run_engine(engine, prompts, new_tokens)
    return time.perf_counter() - started


def _time_transformers(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    import torch

    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):  # left padding, as generate() wants it
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    elapsed = time.perf_counter() - started
    if output.shape[1] != width + new_tokens:
        raise RuntimeError(f"transformers made {output.shape[1] - width} tokens a request, not {new_tokens}")
    return elapsed


def _time_by_part(engine: LLMEngine, prompts: list[list[int]]) -> dict[str, str]:
    """One more run with a stopwatch around the parts of a step; shares of the whole run."""
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

        return wrapper

    import engine.models.decoder as decoder

    patched: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "update_from_output", "update"),
        (engine.runner, "execute", "runner"),
        (decoder, "paged_attention", "attention"),
        (decoder, "reshape_and_cache", "cache write"),
    ]
    originals = [getattr(owner, attribute) for owner, attribute, _ in patched]
    for (owner, attribute, name), original in zip(patched, originals, strict=True):
        setattr(owner, attribute, timed(name, original))
    begin = time.perf_counter()
    try:
        _run_engine(engine, prompts, NEW_TOKENS)
    finally:
        for (owner, attribute, _), original in zip(patched, originals, strict=True):
            setattr(owner, attribute, original)
    total = time.perf_counter() - begin
    seconds["model without attention"] = seconds.pop("runner") - seconds["attention"] - seconds["cache write"]
    seconds["output and the rest"] = total - sum(seconds.values())
    return {name: f"{value / total:.1%}" for name, value in sorted(seconds.items(), key=lambda item: -item[1])}


def bench_http(model: str, against: str, *, report: Report) -> dict[str, Any]:
    """Tokens per second through HTTP: our server and the server at `against` (same model), taking turns."""
    config = EngineConfig(model=model, max_num_seqs=NUM_REQUESTS, enable_prefix_caching=False)
    vocabulary = range(4, Tokenizer(config.model_dir).vocab_size)
    rates: dict[str, list[float]] = {"kvoncall": [], "other": []}
    with tempfile.TemporaryDirectory() as folder:
        supervisor = EngineSupervisor(config.to_args(), log_dir=Path(folder), name="bench")
        supervisor.start()
        base_url = supervisor.base_url
        assert base_url is not None  # it is running
        try:
            for round_ in range(ROUNDS + 1):
                prompts = ragged_prompts(vocabulary, seed=round_)  # fresh ones, so that no prefix cache helps
                for name, url in (("kvoncall", base_url), ("other", against.rstrip("/"))):
                    rate = asyncio.run(_http_tokens_per_s(url, prompts))
                    report(f"round {round_}{' (warm-up)' if round_ == 0 else ''}: {name} {rate:.0f} tok/s through HTTP")
                    if round_:
                        rates[name].append(rate)
        finally:
            supervisor.stop()
    return {
        "kvoncall_tokens_per_s": round(statistics.median(rates["kvoncall"])),
        "other_tokens_per_s": round(statistics.median(rates["other"])),
        "ratio": round(statistics.median(a / b for a, b in zip(rates["kvoncall"], rates["other"], strict=True)), 2),
    }


async def _http_tokens_per_s(url: str, prompts: list[list[int]]) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        name = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def one(prompt: list[int]) -> int:
            body = {"model": name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            response = (await client.post("/v1/completions", json=body)).raise_for_status()
            return int(response.json()["usage"]["completion_tokens"])

        started = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        elapsed = time.perf_counter() - started
    if any(count != NEW_TOKENS for count in counts):
        raise RuntimeError(f"{url} made {sum(counts)} tokens, not {NEW_TOKENS} for each of {len(prompts)} requests")
    return sum(counts) / elapsed
