"""Lint of flags that do not go together, and of formats the hardware does not take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from runbooks.flags import EMBEDDED
from runbooks.hardware import E5M2, storage_only, why_not_block_size, why_not_on
from runbooks.lint.rules import LintFinding, Subject

_ARGS = "vllm/engine/arg_utils.py"
_NATIVE = (EMBEDDED, "vllm")  # engines whose flags are vLLM's

# Fields of KVTransferConfig in some version; any other is ignored up to 0.15.1 and refused from 0.16.0 on.
_TRANSFER_FIELDS = frozenset(
    (
        "kv_connector",
        "kv_role",
        "engine_id",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "kv_load_failure_policy",
        "kv_buffer_device",
        "kv_buffer_size",
        "kv_rank",
        "kv_parallel_size",
        "kv_ip",
        "kv_port",
        "enable_permute_local_kv",
    )
)


def step_budget(subject: Subject) -> Iterator[LintFinding]:
    """The token budget of a step against sequences and context."""
    if subject.engine not in _NATIVE:
        return
    tokens = subject.number("--max-num-batched-tokens", written=True)
    seqs = subject.number("--max-num-seqs", written=True)
    if tokens is not None and seqs is not None and tokens < seqs:
        yield LintFinding(
            "budget-below-seqs",
            "error",
            "--max-num-batched-tokens",
            f"{tokens:,.0f} tokens a step cannot give each of {seqs:,.0f} sequences one token",
            f"--max-num-batched-tokens {seqs:.0f} or more, or --max-num-seqs {tokens:.0f}",
            "vllm/config/scheduler.py",
            "kv-does-not-fit",
        )
    if subject.is_on("--enable-chunked-prefill") is False and subject.value("--enable-chunked-prefill") is not None:
        yield from _unchunked(subject, tokens)


def _unchunked(subject: Subject, tokens: float | None) -> Iterator[LintFinding]:
    length = subject.max_model_len or subject.number("--max-model-len", written=True)
    if length is not None and tokens is not None and length <= tokens:
        return
    has = f"{tokens:,.0f}" if tokens is not None else "the default number of"
    limit = f"a prompt may have {length:,.0f}" if length is not None else "prompts may be longer"
    yield LintFinding(
        "unchunked-long-prompts",
        "error" if length is not None and tokens is not None else "warn",
        "--enable-chunked-prefill",
        f"without chunked prefill a prompt must fit one step of {has} tokens, and {limit}: the server refuses "
        "to start, or long prompts stop every answer that runs",
        "leave chunked prefill on, or raise --max-num-batched-tokens to --max-model-len",
        "vllm/config/scheduler.py",
        "itl-slo-burn",
    )


def pool_size(subject: Subject) -> Iterator[LintFinding]:
    """Several flags that each decide the size of the pool."""
    if subject.engine not in _NATIVE:
        return
    fixed, override = subject.value("--kv-cache-memory-bytes"), subject.value("--num-gpu-blocks-override")
    if fixed is not None and subject.find("--gpu-memory-utilization") is not None:
        yield LintFinding(
            "utilization-overridden",
            "warn",
            "--gpu-memory-utilization",
            f"--kv-cache-memory-bytes {fixed} sizes the pool: --gpu-memory-utilization does not, and nothing checks "
            "that weights and activations still fit",
            "one of the two",
            "vllm/config/cache.py",
            "oom",
        )
    if override is not None:
        yield LintFinding(
            "blocks-overridden",
            "info",
            "--num-gpu-blocks-override",
            f"the pool has {override} blocks whatever memory there is: a flag for tests",
            "leave it out",
            "vllm/config/cache.py",
            "kv-saturated",
        )
    gib = subject.number("--cpu-offload-gb", written=True)
    if gib:
        yield LintFinding(
            "offloads-weights",
            "info",
            "--cpu-offload-gb",
            f"{gib:g} GiB of weights go to host memory, no KV cache; each step pays for it",
            "--kv-offloading-size for a host tier of KV",
            "vllm/config/cache.py",
            "oom",
        )


def context(subject: Subject) -> Iterator[LintFinding]:
    """The longest request against blocks and pool."""
    length = subject.max_model_len or subject.number("--max-model-len", written=True)
    block = subject.block_size or subject.number("--block-size", written=True)
    if length and block and block > length and subject.caches_prefixes is not False:
        yield LintFinding(
            "prefix-cache-inert",
            "warn",
            "--block-size",
            f"only whole blocks are cached, and a block of {block:,.0f} tokens is longer than any request of "
            f"{length:,.0f}: the prefix cache never hits",
            "--max-model-len of two blocks or more, or a smaller block",
            "vllm#48401",
            "prefix-cache-inert",
        )
    if length and subject.kv_tokens and length > subject.kv_tokens:
        yield LintFinding(
            "longer-than-pool",
            "error",
            "--max-model-len",
            f"a request may have {length:,.0f} tokens and the pool holds {subject.kv_tokens:,}: one that long is never "
            "admitted, or preempted for ever, and may block those behind it",
            f"--max-model-len {subject.kv_tokens}",
            "vllm#39734, vllm#52530",
            "head-of-line-block",
        )
    if block and (
        why := why_not_block_size(
            int(block), attention_backend=subject.attention_backend, engine=subject.engine, version=subject.version
        )
    ):
        yield LintFinding(
            "block-size-unsupported",
            "error",
            "--block-size",
            why,
            "leave --block-size out",
            "vllm/v1/attention/backends",
            "kv-dtype-unsupported",
        )


def kv_dtype(subject: Subject) -> Iterator[LintFinding]:
    """The cache's format against GPU, backend and checkpoint."""
    value = subject.in_force("--kv-cache-dtype")
    if value is None or value == "auto":
        return
    sm = subject.gpu.compute_capability if subject.gpu is not None else None
    checkpoint, backend = subject.checkpoint_quantization or None, subject.attention_backend

    def why_not(name: str) -> str | None:
        return why_not_on(
            sm,
            name,
            checkpoint_quantization=checkpoint,
            attention_backend=backend,
            engine=subject.engine,
            version=subject.version,
        )

    if why := why_not(str(value)):
        other = next(
            (name for name in ("fp8_e4m3" if value == E5M2 else E5M2, "auto") if why_not(name) is None), "auto"
        )
        yield LintFinding(
            "kv-dtype-unsupported",
            "error",
            "--kv-cache-dtype",
            why,
            f"--kv-cache-dtype {other}",
            "vllm#26431, vllm#8409",
            "kv-dtype-unsupported",
        )
    elif storage_only(sm, value):
        yield LintFinding(
            "storage-only",
            "info",
            "--kv-cache-dtype",
            f"{value} is kept as storage on this GPU: half the bytes, no faster arithmetic; measure quality",
            "",
            "vllm#24577, vllm#26431",
            "kv-quality-drop",
        )


def transfer_config(subject: Subject) -> Iterator[LintFinding]:
    """Fields of --kv-transfer-config that do not exist."""
    value = subject.value("--kv-transfer-config")
    if subject.engine != "vllm" or value is None:
        return
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        yield LintFinding(
            "value-refused",
            "error",
            "--kv-transfer-config",
            "--kv-transfer-config is not JSON",
            "a JSON object with kv_connector and kv_role",
            _ARGS,
            "flag-not-in-version",
        )
        return
    unknown = sorted(set(found) - _TRANSFER_FIELDS) if isinstance(found, Mapping) else []
    if unknown:
        ignored = subject.older_than("0.16.0")
        yield LintFinding(
            "unknown-field",
            "error",
            "--kv-transfer-config",
            f"--kv-transfer-config has no field {', '.join(unknown)}: vLLM {subject.at} "
            f"{'ignores it silently' if ignored else 'refuses to start'}",
            "kv_connector, kv_role and kv_connector_extra_config",
            "vllm/config/kv_transfer.py",
            "flag-not-in-version",
        )


def server(subject: Subject) -> Iterator[LintFinding]:
    """What a server is started with besides: its metrics, its entry point."""
    if subject.engine in _NATIVE and subject.is_on("--disable-log-stats"):
        yield LintFinding(
            "metrics-off",
            "warn",
            "--disable-log-stats",
            "the server exposes none of its own metrics: nobody can see its KV cache",
            "leave it out",
            "vllm/v1/engine/async_llm.py",
            "metrics-unknown",
        )
    if subject.engine == "sglang" and subject.given and not subject.is_on("--enable-metrics"):
        yield LintFinding(
            "metrics-off",
            "warn",
            "--enable-metrics",
            "SGLang exposes nothing without --enable-metrics",
            "--enable-metrics",
            "sglang/srt/server_args.py",
            "metrics-unknown",
        )
    entry = "vllm.entrypoints.openai.api_server"
    if subject.engine == "vllm" and entry in subject.program and not subject.older_than("0.29.0"):
        yield LintFinding(
            "old-entry-point",
            "info",
            "",
            f"python -m {entry} is deprecated since 0.29.0",
            "vllm serve MODEL",
            f"{entry}",
            "flag-not-in-version",
        )
