"""Out of memory under long-context summarization.

The published case: Llama-3-70B summarizes documents of 128K tokens, four at a time, and dies. Scaled to the testbed:
the operator works out what N requests of the full context need in KV cache and gives exactly that with
--kv-cache-memory-bytes, which replaces the sizing by profile and with it his careful --gpu-memory-utilization. N is
what he believes the device to hold with a quarter to spare. A large --max-num-batched-tokens is to speed up the long
prompts. The engine starts, a short request passes, and the first large prefill finds no memory for its activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import MIB, EngineConfig, ModelDims
from engine.memory import NULL_BLOCKS, kv_bytes_per_block, kv_bytes_per_token
from probe.load.endpoint import Endpoint
from probe.load.generator import LoadOptions
from probe.load.traces import synthetic
from probe.replay.exercise import Bench, LoadExercise
from probe.replay.observation import Check, LoadPlan, Observation, alert_fired, alert_resolved, all_completed

SUMMARY_TOKENS = 24
EXIT_OOM = 12

LLAMA_3_70B = ModelDims("LlamaForCausalLM", 80, 64, 8, 128, 8192, 28672, 128256, 131072, "float16")


def article_figures() -> dict[str, Any]:
    """The published case recomputed: Llama-3-70B in FP16, 128K context, batch 4."""
    per_token = kv_bytes_per_token(LLAMA_3_70B, "auto")
    context, batch = 131072, 4
    per_request = per_token * context
    return {
        "case": "Llama-3-70B, summaries of 128K-token documents, batch 4, FP16 KV cache",
        "claimed_gb_per_request": 33.5,
        "claimed_gb_batch": 134,
        "kv_bytes_per_token": per_token,
        "true_gb_per_request": round(per_request / 1e9, 2),
        "true_gib_per_request": round(per_request / 1024**3, 2),
        "true_gb_batch": round(per_request * batch / 1e9, 1),
        "formula": "80 layers x 8 KV heads x 128 x 2 (K and V) x 2 B = 327,680 B a token; x 131,072 tokens",
        "computed": True,
    }


@dataclass(frozen=True)
class OutOfMemory:
    """Scenario `oom`; `model` "" is the testbed model."""

    model: str = ""
    device_memory: int = 160 * MIB
    utilization: float = 0.8  # careful, and without effect while the pool is sized by hand
    spare_share: float = 0.24  # of the device: what the operator leaves beside weights and pool
    max_num_batched_tokens: int = 8192
    time_scale: float = 0.05
    scrape_interval_s: float = 0.5
    threads: int | None = None

    id = "oom"
    title = "Out of memory: long-context summaries at a concurrency that does not fit"
    rule = "oom"
    runbook = "oom"
    hypothesis = (
        "A KV pool sized by hand for the long requests leaves no memory for the activations of their prefill: the "
        "engine starts and serves short requests, and dies when the long ones arrive together. Sized by profile, "
        "with smaller steps, the same load completes."
    )

    @property
    def article_case(self) -> Mapping[str, Any]:
        """The published case with its true figures."""
        return article_figures()

    def _requests(self) -> tuple[int, int]:
        """(requests the operator plans for, KV bytes he gives them)."""
        config = EngineConfig(model=self.model)
        dims = ModelDims.from_model_dir(config.model_dir)
        weights = sum(file.stat().st_size for file in config.model_dir.glob("*.safetensors"))
        per_block = kv_bytes_per_block(dims, "auto", config.block_size)
        per_request = -(-dims.max_position_embeddings // config.block_size) * per_block
        room = int(self.device_memory * (1 - self.spare_share)) - weights
        count = room // per_request
        return count, count * per_request + NULL_BLOCKS * per_block

    def flags(self) -> list[str]:
        """A pool for N long requests, N sequences, and a large step for their prompts."""
        count, kv_bytes = self._requests()
        return [
            *(["--model", self.model] if self.model else []),
            "--device-memory", str(self.device_memory),
            "--gpu-memory-utilization", str(self.utilization),
            "--kv-cache-memory-bytes", str(kv_bytes),
            "--max-num-seqs", str(count),
            "--max-num-batched-tokens", str(self.max_num_batched_tokens),
        ]  # fmt: skip

    def exercise(self, bench: Bench) -> LoadExercise:
        """The load below, sent twice."""
        return LoadExercise(bench, self.load)

    def load(self, endpoint: Endpoint) -> LoadPlan:
        """N documents of nearly the whole context at once, each to be summarized in a few tokens."""
        count, _ = self._requests()
        prompt = endpoint.max_model_len - SUMMARY_TOKENS
        options = LoadOptions(concurrency=count, model=endpoint.model, request_timeout_s=90, max_duration_s=90)
        documents = synthetic(
            count, prompt_tokens=prompt, max_tokens=SUMMARY_TOKENS, vocab_size=endpoint.vocab_size, name="document"
        )
        smoke = synthetic(1, prompt_tokens=32, max_tokens=8, vocab_size=endpoint.vocab_size, name="smoke")
        return LoadPlan(
            tuple(documents), options, f"{count} documents of {prompt} tokens at once, {SUMMARY_TOKENS} tokens each",
            tuple(smoke),
        )  # fmt: skip

    def reproduced(self, before: Observation) -> list[Check]:
        """The short request passed, then the process died of memory, and the alert fired."""
        exit_ = before.engine_exit or {}
        smoke_ok = before.smoke is not None and before.smoke.completed == before.smoke.total > 0
        died = exit_.get("reason") == "oom" and exit_.get("code") == EXIT_OOM
        measured = f"exit code {exit_.get('code')}, reason {exit_.get('reason')}" if exit_ else "still running"
        return [
            Check("a short request passes first", smoke_ok, "completed" if smoke_ok else "failed", "completed"),
            Check("the engine process dies of memory", died, measured, f"exit code {EXIT_OOM}, reason oom"),
            alert_fired(before, self.rule),
        ]

    def verified(self, after: Observation) -> list[Check]:
        """The same load completes, the process lives, and the alert resolved."""
        exit_ = after.engine_exit
        return [
            all_completed(after),
            Check("the engine stays up", exit_ is None, "running" if exit_ is None else dict(exit_), "running"),
            alert_resolved(after, self.rule),
        ]
