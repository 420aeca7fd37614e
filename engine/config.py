"""What an engine is started with: the values of its flags, and which go together.

Flags carry vLLM's names, so that a runbook's change applies to the embedded engine letter for letter;
`--device-memory` and `--exit-with-parent` are ours and say so. Pure Python: importing this module must
stay cheap (the app, the runbooks and the supervisor read flags without loading torch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cache_identity import PREFIX_SCOPES
from engine.errors import ConfigError
from engine.flags import DTYPES, MIB, FlagParser, add_flags, parse_bytes
from engine.kv_formats import layer_kv_formats, layer_problems, split_layer_words
from engine.model_dims import ModelDims, read_hf_config
from kernels.formats import KVFormat

__all__ = [
    "MIB", "ConfigError", "EngineConfig", "ModelDims", "apply_changes", "build_parser", "flag_of", "parse_bytes",
    "read_hf_config",
]  # fmt: skip

_SHIPPED_MODELS = {"": "model", "testbed-outliers": "model_outliers"}  # --model -> directory in engine/testbed


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
    engine_fault: str = "none"
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
        for name in ("prefix_cache_public", "lora_modules"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # the parser gives lists
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
            ("max_lora_rank", 1),
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
        if self.engine_fault != "none" and not self.allow_unsafe_replay:
            found.append(
                f"--engine-fault {self.engine_fault} breaks the engine on purpose; it exists to replay incidents: add "
                f"--allow-unsafe-replay on an engine that serves nobody, or leave it out"
            )
        if self.prefix_cache_scope not in PREFIX_SCOPES:
            found.append(
                f"--prefix-cache-scope must be one of {', '.join(PREFIX_SCOPES)}, got {self.prefix_cache_scope!r}"
            )
        found += self._lora_problems()
        return found + layer_problems(self.kv_cache_dtype_skip_layers, self.kv_cache_dtype_layers)

    def _lora_problems(self) -> list[str]:
        if not self.lora_modules:
            return []
        if not self.enable_lora:
            return ["--lora-modules needs --enable-lora"]
        names = []
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                return [
                    f"cannot read --lora-modules {module!r}; write NAME=PATH, for example support=/adapters/support"
                ]
            names.append(name)
        for name in (self.served_model_name, *names):
            if names.count(name) + (name == self.served_model_name) > 1:
                return [f"--lora-modules gives the name {name!r} twice, or it is the model's own; choose another"]
        return []

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


def build_parser(prog: str = "kvoncall serve") -> FlagParser:
    """The engine's command line. Parsing errors raise `ConfigError`; only `--help` exits."""
    parser = FlagParser(prog=prog, description="Serve a model on the embedded engine.", allow_abbrev=False)
    add_flags(parser, EngineConfig())
    return parser


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
            if isinstance(defaults[name], tuple) and isinstance(value, str):
                value = value.split()
            values[name] = vars(build_parser().parse_args(_flag_words(name, value)))[name]
    return EngineConfig(**values).to_args()


def _flag_words(name: str, value: Any) -> list[str]:
    """The words that set one flag on a command line."""
    if isinstance(value, bool):
        return [flag_of(name) if value else "--no-" + flag_of(name)[2:]]
    if isinstance(value, list | tuple):
        return [flag_of(name), *map(str, value)]
    return [flag_of(name), str(value)]
