"""The engine's command line: every flag with its help, and how sizes are read.

Pure Python, and below `engine.config`, which owns the values and what may go together.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

from engine.cache_identity import PREFIX_SCOPES
from engine.errors import ConfigError
from kernels.formats import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from engine.config import EngineConfig

MIB = 1024**2

_UNITS = {
    "": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    # vLLM's human-readable integers: a capital letter is binary.
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}

MODEL_HELP = (
    "Hugging Face directory, GGUF file, gemma (extra `gemma`), or testbed-outliers (the testbed model rewritten to "
    "have outlier key channels; same function in full precision); default: the testbed model"
)

# The unsafe one keeps 16 bits of SHA-256: collisions are found in a moment, and come by themselves.
HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "unsafe_truncated")
PREFIX_FAULTS = ("none", "adapter_key", "image_key", "weights_key", "copy_on_write")
ENGINE_FAULTS = ("none", "stall", "block_leak", "memory_creep")

DTYPES = ("float32", "float16", "bfloat16")  # that we compute in


def parse_bytes(text: str | int) -> int:
    """Bytes from `268435456`, `256MiB`, `1G`.

    A bare capital K, M or G is binary and a bare small letter decimal, as vLLM reads
    `--kv-cache-memory-bytes`; KB/MB/GB are decimal and KiB/MiB/GiB binary in any case.
    Raises `ConfigError` on anything else.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match:
        unit = match[2] if match[2] in _UNITS else match[2].lower()
        if unit in _UNITS:
            return int(float(match[1]) * _UNITS[unit])
    raise ConfigError(f"cannot read {text!r} as a size; write bytes or a unit, for example 256MiB")


def parse_size_argument(text: str) -> int:
    """`parse_bytes` for argparse, which wants its own error type."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ", "", message)
        raise ConfigError(f"{message} (kvoncall serve --help lists the flags)")


def add_flags(parser: argparse.ArgumentParser, default: EngineConfig) -> None:
    """All flags of `EngineConfig`, with its defaults."""
    add = parser.add_argument
    add("--model", default="", metavar="PATH", help=MODEL_HELP)
    add("--served-model-name", default=default.served_model_name, help="name in the API and in metric labels")
    add("--host", default=default.host, help="address to listen on")
    add("--port", type=int, default=default.port, help="0 picks a free port")
    add("--api-key", help="require this bearer token under /v1")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="weights and activations (auto: the checkpoint's)")
    add("--max-model-len", type=int, help="context limit in tokens (default: the model's)")
    add("--max-num-seqs", type=int, default=default.max_num_seqs, help="most sequences in one step")
    add("--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, help="token budget of a step")
    add("--block-size", type=int, default=default.block_size, help="tokens in a KV block")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=default.gpu_memory_utilization,
        help="share of device memory for weights, activations and KV cache",
    )
    add(
        "--kv-cache-memory-bytes",
        type=parse_size_argument,
        metavar="SIZE",
        help="size of the KV pool; skips the sizing by profile, as in vLLM",
    )
    add("--num-gpu-blocks-override", type=int, metavar="N", help="force the number of KV blocks")
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="format of K and V (auto: as --dtype)")
    add(
        "--kv-cache-dtype-skip-layers",
        nargs="*",
        default=(),
        metavar="LAYER",
        help="layers that keep the model's own dtype: indices, or sliding_window for all that have one",
    )
    add(
        "--kv-cache-dtype-layers",
        default="",
        metavar="MAP",
        help="(ours) format by layer, for example 0-1:auto,3:int4_kivi; the others have --kv-cache-dtype",
    )
    add(
        "--calculate-kv-scales",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="scales of an fp8 KV cache from the first batch, instead of the checkpoint's or 1 (vLLM has dropped this "
        "flag: 0.7.0 to 0.27.1)",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--prefix-caching-hash-algo", default="sha256", choices=HASH_ALGOS, help="names of cached blocks")
    add(
        "--prefix-cache-verify",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="(ours) compare tokens and identity on every hit, whatever the hash says",
    )
    add(
        "--prefix-cache-ttl",
        type=float,
        metavar="SECONDS",
        help="(ours) forget cached blocks this long after their last use (default: never)",
    )
    add(
        "--prefix-cache-scope",
        default="global",
        choices=PREFIX_SCOPES,
        help="(ours) who shares cached prefixes: all but different cache_salts, one tenant, or one session",
    )
    add(
        "--prefix-cache-public",
        nargs="*",
        default=(),
        metavar="FILE",
        help="(ours) text files whose prefixes all tenants and sessions may share, as a system prompt",
    )
    add(
        "--prefix-cache-fault",
        default="none",
        choices=PREFIX_FAULTS,
        help="(ours, for replays) what the prefix cache does wrong; needs --allow-unsafe-replay",
    )
    add(
        "--engine-fault",
        default="none",
        choices=ENGINE_FAULTS,
        help="(ours, for replays) how the engine breaks: a step hangs, ended requests keep a KV block, or every step "
        "keeps memory; needs --allow-unsafe-replay",
    )
    add(
        "--enable-fork-sharing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="(ours) choices of one request (n > 1) share its prompt's blocks, the last one by copy-on-write",
    )
    add("--enable-lora", action=argparse.BooleanOptionalAction, default=False, help="serve LoRA adapters")
    add(
        "--lora-modules",
        nargs="*",
        default=(),
        metavar="NAME=PATH",
        help="adapters to load at start (PEFT directories); a request names one as its model",
    )
    add("--max-lora-rank", type=int, default=default.max_lora_rank, help="largest rank of an adapter")
    add(
        "--allow-unsafe-replay",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="(ours) unlock faults, and hashes that leak between sessions; for replays on an engine nobody uses",
    )
    add("--scheduling-policy", default="fcfs", choices=("fcfs", "priority"))
    add("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="N",
        help="cap a prompt's chunk when others also want the step (0: no cap)",
    )
    add("--watermark", type=float, default=0.0, help="share of KV blocks kept free at admission")
    add("--max-num-queued-reqs", type=int, metavar="N", help="refuse with 503 beyond this many waiting requests")
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no CUDA graphs (the embedded engine has none; accepted so that launch lines carry over)",
    )
    add("--seed", type=int, default=0)
    add(
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no periodic statistics in the log, and none of the engine's series on /metrics, as in vLLM",
    )
    add(
        "--device-memory",
        type=parse_size_argument,
        default=default.device_memory,
        metavar="SIZE",
        help="(ours) memory of the device when it is a CPU: the hard limit this process lives under",
    )
    add(
        "--exit-with-parent",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="(ours) stop when standard input reaches its end",
    )
