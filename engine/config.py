"""What an engine is started with: its flags.

Flags carry vLLM's names, so that a runbook's change applies to the embedded engine letter for letter;
`--device-memory` and `--exit-with-parent` are ours and say so. Pure Python: importing this module must
stay cheap (the app, the runbooks and the supervisor read flags without loading torch).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.cache_identity import PREFIX_SCOPES
from engine.errors import ConfigError
from engine.kv_formats import layer_kv_formats, layer_problems, split_layer_words
from engine.model_dims import ModelDims, read_hf_config
from kernels.formats import KV_CACHE_DTYPES, KVFormat

__all__ = [
    "MIB", "ConfigError", "EngineConfig", "ModelDims", "apply_changes", "build_parser", "flag_of", "parse_bytes",
    "read_hf_config",
]  # fmt: skip

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

_SHIPPED_MODELS = {"": "model", "testbed-outliers": "model_outliers"}  # --model -> directory in engine/testbed

# The unsafe one keeps 16 bits of SHA-256: collisions are found in a moment, and come by themselves.
HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "unsafe_truncated")
PREFIX_FAULTS = ("none", "adapter_key", "image_key", "weights_key", "copy_on_write")

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


@dataclass(frozen=True)
class EngineConfig:
    """All flags of one engine process. Field names are the flags' names with underscores."""

    model: str = ""  # "" = the shipped testbed model
    served_model_name: str = "testbed"
    host: str = "127.0.0.1"
    port: int = 8100
    api_key: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    kv_cache_dtype_layers: str = ""
    calculate_kv_scales: bool = False
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    prefix_cache_verify: bool = False
    prefix_cache_ttl: float | None = None
    prefix_cache_scope: str = "global"
    prefix_cache_public: tuple[str, ...] = ()
    prefix_cache_fault: str = "none"
    enable_fork_sharing: bool = True
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    max_lora_rank: int = 16
    allow_unsafe_replay: bool = False
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None
    enforce_eager: bool = False
    seed: int = 0
    disable_log_stats: bool = False
    device_memory: int = 512 * MIB
    exit_with_parent: bool = False

    def __post_init__(self) -> None:
        words = split_layer_words(self.kv_cache_dtype_skip_layers)  # one word may name several layers
        object.__setattr__(self, "kv_cache_dtype_skip_layers", words)
        for problem in self._problems():
            raise ConfigError(problem)

    def _problems(self) -> list[str]:
        found = []
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
            ("device_memory", 1),
            ("long_prefill_token_threshold", 0),
            ("max_model_len", 1),
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 2),
            ("max_num_queued_reqs", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                found.append(f"{flag_of(name)} must be at least {low}, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            found.append(f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")
        if not 0 <= self.watermark < 1:
            found.append(f"--watermark must be in [0, 1), got {self.watermark}")
        if not 0 <= self.port <= 65535:
            found.append(f"--port must be between 0 and 65535, got {self.port}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            found.append(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or running sequences could not all decode in one step"
            )
        if self.prefix_cache_ttl is not None and not 0 < self.prefix_cache_ttl < float("inf"):
            found.append(
                f"--prefix-cache-ttl must be above 0 seconds, got {self.prefix_cache_ttl:g}; leave it out to keep "
                f"blocks until their room is needed"
            )
        unsafe = [f"--prefix-caching-hash-algo {self.prefix_caching_hash_algo}"] * (
            self.prefix_caching_hash_algo == "unsafe_truncated"
        ) + [f"--prefix-cache-fault {self.prefix_cache_fault}"] * (self.prefix_cache_fault != "none")
        if unsafe and not self.allow_unsafe_replay:
            found.append(
                f"{unsafe[0]} lets sessions see each other's text; it exists to replay incidents: add "
                f"--allow-unsafe-replay on an engine that serves nobody, or choose a safe value"
            )
        return found + layer_problems(self.kv_cache_dtype_skip_layers, self.kv_cache_dtype_layers)

    @property
    def model_dir(self) -> Path:
        """The model directory or GGUF file: `--model`, or one of the shipped testbed models.

        `ConfigError` when it is `gemma` and its packages are not installed.
        """
        if self.model == "gemma":
            from engine.gemma import gemma_path  # it needs ConfigError from here

            return gemma_path()
        if self.model in _SHIPPED_MODELS:
            return Path(__file__).parent / "testbed" / _SHIPPED_MODELS[self.model]
        return Path(self.model)

    def resolved_max_model_len(self, dims: ModelDims) -> int:
        """`--max-model-len`, or the model's own limit; `ConfigError` when the flag exceeds the model's."""
        if self.max_model_len is None:
            return dims.max_position_embeddings
        if self.max_model_len > dims.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} exceeds the model's max_position_embeddings "
                f"{dims.max_position_embeddings}; lower it"
            )
        return self.max_model_len

    def resolved_dtype(self, dims: ModelDims) -> str:
        """The dtype of weights and activations: `--dtype`, or the checkpoint's; `ConfigError` for an unknown one."""
        name = dims.dtype if self.dtype == "auto" else self.dtype
        if name not in DTYPES:
            raise ConfigError(f"the checkpoint's dtype is {name}; choose one of {', '.join(DTYPES)} with --dtype")
        return name

    def layer_kv_formats(self, dims: ModelDims) -> tuple[KVFormat, ...]:
        """The format of K and V in every layer; `ConfigError` when a layer is not there or a format cannot hold it."""
        return layer_kv_formats(
            dims,
            self.resolved_dtype(dims),
            self.block_size,
            self.kv_cache_dtype,
            self.kv_cache_dtype_skip_layers,
            self.kv_cache_dtype_layers,
        )

    @classmethod
    def from_args(cls, args: Sequence[str]) -> EngineConfig:
        """Parses a command line; raises `ConfigError` with one sentence, never exits."""
        return cls(**vars(build_parser().parse_args(list(args))))

    def to_args(self) -> list[str]:
        """The command line of the flags that differ from their defaults; `from_args` gives the same config back."""
        args: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                args += _flag_words(field.name, value)
        return args

    def flag_values(self) -> dict[str, Any]:
        """Every flag with its value in force, `--max-num-seqs` style; lists as text with blanks between.

        `--api-key` only says whether it is set.
        """
        values = {flag_of(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        values = {flag: " ".join(value) if isinstance(value, tuple) else value for flag, value in values.items()}
        values["--api-key"] = "set" if self.api_key else None
        return values


def flag_of(field_name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ", "", message)
        raise ConfigError(f"{message} (kvoncall serve --help lists the flags)")


def build_parser(prog: str = "kvoncall serve") -> argparse.ArgumentParser:
    """The engine's command line. Parsing errors raise `ConfigError`; only `--help` exits."""
    parser = _Parser(prog=prog, description="Serve a model on the embedded engine.", allow_abbrev=False)
    add = parser.add_argument
    default = EngineConfig()
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
        help="(ours) unlock hashes and faults that leak between sessions; for replays on an engine nobody uses",
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
        help="no periodic statistics in the log",
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
    return parser


def parse_size_argument(text: str) -> int:
    """`parse_bytes` for argparse, which wants its own error type."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def apply_changes(args: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The command line `args` with flags set to new values (`None`: back to the default).

    A flag that takes several words has them in a list, or in text with blanks or commas between.
    Raises `ConfigError` when a flag does not exist or the result is not a valid configuration.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    values = dataclasses.asdict(EngineConfig.from_args(args))
    for flag, value in changes.items():
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in defaults:
            raise ConfigError(f"{flag} is not a flag of the embedded engine")
        if value is None:
            values[name] = defaults[name]
        else:
            values[name] = vars(build_parser().parse_args(_flag_words(name, value)))[name]
    return EngineConfig(**values).to_args()


def _flag_words(name: str, value: Any) -> list[str]:
    """The words that set one flag on a command line."""
    if isinstance(value, bool):
        return [flag_of(name) if value else "--no-" + flag_of(name)[2:]]
    if isinstance(value, list | tuple):
        return [flag_of(name), *map(str, value)]
    return [flag_of(name), str(value)]
