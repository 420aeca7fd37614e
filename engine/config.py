"""What an engine is started with: its flags, and the dimensions of its model.

Flags carry vLLM's names, so that a runbook's change applies to the embedded engine letter for letter;
`--device-memory` and `--exit-with-parent` are ours and say so. Pure Python: importing this module must
stay cheap (the app, the runbooks and the supervisor read flags without loading torch).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kernels.formats import KV_CACHE_DTYPES, KVFormat, resolve_kv_format

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

MODEL_HELP = "Hugging Face directory, GGUF file, or gemma (extra `gemma`); default: the testbed model"

DTYPES = ("float32", "float16", "bfloat16")  # that we compute in


class ConfigError(ValueError):
    """A flag, a value or a model directory that cannot work; the message is one sentence for the user."""


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
class ModelDims:
    """The dimensions of a decoder that decide its KV cache, read from a Hugging Face `config.json`.

    kv_lora_rank, qk_rope_head_dim: of multi-head latent attention, 0 for models without it; they alone decide its
    KV bytes. Layers with a sliding window keep all blocks of a sequence for now, so windows do not matter here.
    """

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0

    @property
    def latent_width(self) -> int:
        """Values that multi-head latent attention caches of a token in a layer; 0 for models with K and V heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Reads the dict of a `config.json`; raises `ConfigError` naming the key that is missing or wrong."""

        def integer(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
            return value

        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ConfigError("config.json: architectures is missing; it names the model class to load")
        num_q_heads = integer("num_attention_heads")
        num_kv_heads = integer("num_key_value_heads", num_q_heads)
        if num_q_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads ({num_q_heads}) is not a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        hidden_size = integer("hidden_size")
        return cls(
            architecture=str(architectures[0]),
            num_layers=integer("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=integer("head_dim", hidden_size // num_q_heads),
            hidden_size=hidden_size,
            intermediate_size=integer("intermediate_size"),
            vocab_size=integer("vocab_size"),
            max_position_embeddings=_stretched(config, integer("max_position_embeddings")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            **{key: integer(key) for key in ("kv_lora_rank", "qk_rope_head_dim") if config.get("kv_lora_rank")},
        )

    @classmethod
    def from_model_dir(cls, path: str | Path) -> ModelDims:
        """Reads `config.json` of a model directory; raises `ConfigError` when there is none to read."""
        return cls.from_hf_config(read_hf_config(path))


def _stretched(config: Mapping[str, Any], positions: int) -> int:
    """Positions a model can serve: with dynamic rope scaling `factor` times its original context, as in vLLM."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config.json: rope_parameters and rope_scaling are objects, found {scaling!r}")
    factor = scaling.get("factor")
    if "dynamic" not in (scaling.get("rope_type"), scaling.get("type")) or not isinstance(factor, (int, float)):
        return positions
    return int(positions * max(factor, 1))


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The dict of a model directory's `config.json`, or what a GGUF file says in its place.

    Raises `ConfigError` when it cannot be read.
    """
    directory = Path(path)
    if directory.suffix.lower() == ".gguf":
        from engine.gguf_config import gguf_hf_config

        return gguf_hf_config(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {str(directory)!r} does not exist; give --model a directory or a .gguf file"
        )
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{str(directory)!r} holds no config.json; it is not a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object")
    return config


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
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
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
        return found

    @property
    def model_dir(self) -> Path:
        """The model directory or GGUF file: `--model`, or the shipped testbed model.

        `ConfigError` when it is `gemma` and its packages are not installed.
        """
        if self.model == "gemma":
            from engine.gemma import gemma_path  # it needs ConfigError from here

            return gemma_path()
        return Path(self.model) if self.model else Path(__file__).parent / "testbed" / "model"

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

    def resolved_kv_format(self, dims: ModelDims) -> KVFormat:
        """The format of K and V: `--kv-cache-dtype`, or as the activations; `ConfigError` when it cannot hold them."""
        try:
            kv_format = resolve_kv_format(self.kv_cache_dtype, self.resolved_dtype(dims))
            kv_format.bytes_per_block_head(dims.head_dim, self.block_size)
        except ValueError as error:
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype} does not suit the model: {error}") from None
        if dims.latent_width and kv_format.quantized:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype} does not suit the model: multi-head latent attention caches "
                f"latents, which are kept in floating point only; use auto or one of {', '.join(DTYPES)}"
            )
        return kv_format

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
        """Every flag with its value in force, `--max-num-seqs` style; `--api-key` only says whether it is set."""
        values = {flag_of(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
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
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--prefix-caching-hash-algo", default="sha256", choices=("sha256",))
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
    return [flag_of(name), str(value)]
