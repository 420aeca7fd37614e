"""Runs EleutherAI's lm-eval harness against a server, when the user has it installed, and stores its figures.

The harness is no dependency of ours. It runs in a process of its own with `local-completions`; the tasks' data are
the user's. Scores by likelihood (such as MMLU's) need a server whose completions honour `echo` with `logprobs`, and a
tokenizer for the harness (`-- --model_args …`); scores by generation (GSM8K, HumanEval) need neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probe.quality.client import EndpointDown, EndpointRefused, QualityClient
from probe.quality.run import Progress
from probe.quality.score import summarize
from probe.quality.server import Server, describe
from probe.quality.suite import QualityError
from probe.store import QualityRun, Store

LABEL = "lm-eval"


def run_lm_eval(
    store: Store,
    base_url: str,
    tasks: str,
    args: Sequence[str] = (),
    *,
    target: str,
    api_key: str | None = None,
    progress: Progress | None = None,
) -> QualityRun:
    """Runs the harness with `--tasks tasks` and the user's `args` (which win); its output goes to our stderr.

    The run's result has the harness's `results` and sample counts under "lm_eval". Raises `QualityError` when the
    harness is missing or fails.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise QualityError(
            "lm-eval is not installed in this environment; `pip install 'lm-eval[api]'` adds it, then run this again"
        )
    server = asyncio.run(_described(base_url, api_key))
    suite = {"kind": "lm-eval", "tasks": tasks, "args": list(args)}
    key = hashlib.sha256(json.dumps(suite, sort_keys=True).encode()).hexdigest()
    run = store.quality.start(target, LABEL, server.model, suite, key, server.facts)
    if progress is not None:
        progress(f"{LABEL}: {tasks} on {server.model}")
    try:
        with tempfile.TemporaryDirectory(prefix="kvoncall-lm-eval-") as folder:
            found = _harness(base_url, server.model, tasks, args, Path(folder), api_key)
    except BaseException as error:
        store.quality.finish(run.id, "incomplete", None, str(error) or type(error).__name__)
        raise
    result = {**summarize([]), "lm_eval": {key: found.get(key) for key in ("results", "n-samples", "config")}}
    return store.quality.finish(run.id, "done", result)


def _harness(
    base_url: str, model: str, tasks: str, args: Sequence[str], folder: Path, api_key: str | None
) -> dict[str, Any]:
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    model_args = f"model={model},base_url={url},num_concurrent=4,tokenizer_backend=None,tokenized_requests=False"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model_args]
    command += ["--tasks", tasks, "--output_path", str(folder), *args]
    environment = dict(os.environ) | ({"OPENAI_API_KEY": api_key} if api_key else {})
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False)
    if done.returncode:
        raise QualityError(f"lm-eval ended with code {done.returncode}; its own words are above")
    files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    try:
        found = json.loads(files[-1].read_text(encoding="utf-8")) if files else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("results"), dict):
        raise QualityError("lm-eval ended without a results file; see its own words above")
    return found


async def _described(base_url: str, api_key: str | None) -> Server:
    async with QualityClient(base_url, api_key=api_key, patience_s=0.0) as client:
        try:
            return await describe(client)
        except (EndpointDown, EndpointRefused) as error:
            raise QualityError(str(error)) from None
