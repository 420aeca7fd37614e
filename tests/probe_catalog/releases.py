"""Small releases of engines, with every way in which real ones declare flags and metrics."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

VLLM = {
    "vllm/__init__.py": "raise SystemExit('a release must not be imported')\n",
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig\nfrom .model import ModelConfig\n",
    "vllm/config/cache.py": """
from typing import ClassVar, Literal
from dataclasses import field
from pydantic import Field
raise SystemExit("a release must not be run")

BASE = 8
Narrow = Literal["fp8", "int4"]
CacheDType = Literal["auto", Narrow]

@config
class CacheConfig:
    LIMIT: ClassVar[int] = 4
    block_size: int = Field(default=None, gt=0)
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    cache_dtype: CacheDType | str = "auto"
    skip_layers: list[str] = field(default_factory=list)
    enable_prefix_caching: bool = True
    sizes: list[int] = field(default_factory=lambda: [BASE, BASE * 2])
    transfer: "TransferConfig | None" = None
    extra: dict[str, int] | None = None
    hash_algo: Literal["sha256", "xxhash"] = "sha256"

@dataclass
class TransferConfig:
    connector: str | None = None
""",
    "vllm/config/model.py": """
import enum
from typing import TYPE_CHECKING, Any, Literal, Optional, Union
if TYPE_CHECKING:
    from vllm.config.cache import Narrow
else:
    Narrow = Any

class Format(enum.Enum):
    AUTO = "auto"
    HF = "hf"

@config
class ModelConfig:
    model: str = "some/model"
    dtype: Union[Narrow, Literal["auto"]] = "auto"
    load_format: str | Literal["pt"] = Format.AUTO.value
    max_len: Optional[int] = None
    token: bool | str | None = None
    seed: int = compute_seed()
""",
    "vllm/engine/arg_utils.py": """
import argparse
import json
from vllm.config import CacheConfig, ModelConfig

GONE = "is deprecated and will be removed"

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        group = parser.add_argument_group(title="ModelConfig")
        if not ("serve" in sys.argv[1:]):
            group.add_argument("--model", **model_kwargs["model"])
        group.add_argument("--dtype", **model_kwargs["dtype"])
        group.add_argument("--load-format", **model_kwargs["load_format"])
        group.add_argument("--max-model-len", **model_kwargs["max_len"])
        group.add_argument("--hf-token", **model_kwargs["token"])
        group.add_argument("--seed", **model_kwargs["seed"])
        cache_kwargs = get_kwargs(CacheConfig)
        cache_kwargs["hash_algo"]["choices"].remove("xxhash")
        cache_kwargs["skip_layers"]["type"] = json.loads
        group.add_argument("--block-size", **cache_kwargs["block_size"])
        group.add_argument("--gpu-memory-utilization", "--device-memory-utilization", dest="x",
                           **cache_kwargs["gpu_memory_utilization"])
        group.add_argument("--kv-cache-dtype", **cache_kwargs["cache_dtype"])
        group.add_argument("--kv-cache-dtype-skip-layers", **cache_kwargs["skip_layers"])
        group.add_argument("--enable-prefix-caching", **{**cache_kwargs["enable_prefix_caching"], "default": None})
        group.add_argument("--sizes", **cache_kwargs["sizes"])
        group.add_argument("--kv-transfer-config", **cache_kwargs["transfer"])
        group.add_argument("--extra", **cache_kwargs["extra"])
        group.add_argument("--prefix-caching-hash-algo", **cache_kwargs["hash_algo"])
        group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
        group.add_argument("--old-way", action=argparse.BooleanOptionalAction, default=None, help=f"--old-way {GONE}")
        group.add_argument("--older-way", action="store_true", deprecated=True)
        group.add_argument("--policy", type=str, choices=["fcfs", "priority"], default="fcfs")
        group.add_argument("--devices", choices=["cpu"] + ([platform.kind] if platform.kind else []), default="cpu")
        return parser

class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser, async_args_only=False):
        if not async_args_only:
            parser = EngineArgs.add_cli_args(parser)
        parser.add_argument("--enable-log-requests", action="store_true")
""",
    "vllm/entrypoints/openai/cli_args.py": """
import json
from vllm.engine.arg_utils import AsyncEngineArgs

@config
class BaseFrontendArgs:
    port: int = 8000
    origins: list[str] = field(default_factory=lambda: ["*"])

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs["origins"]["type"] = json.loads
        return frontend_kwargs

    @classmethod
    def add_cli_args(cls, parser):
        frontend_kwargs = get_kwargs(cls)
        frontend_kwargs = cls._customize_cli_kwargs(frontend_kwargs)
        for key, value in frontend_kwargs.items():
            parser.add_argument(f"--{key.replace('_', '-')}", **value)
        return parser

@config
class FrontendArgs(BaseFrontendArgs):
    api_key: str | None = None

def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
    parser = FrontendArgs.add_cli_args(parser)
    parser = AsyncEngineArgs.add_cli_args(parser)
    return parser
""",
    "vllm/entrypoints/openai/run_batch.py": """
def make_arg_parser(parser):
    parser.add_argument("--input-file", type=str)
""",
    "vllm/v1/metrics/loggers.py": """
from prometheus_client import Counter, Gauge, Histogram

class PrometheusStatLogger:
    _gauge_cls = Gauge

    def __init__(self, config):
        labelnames = ["model_name", "engine"]
        running = self._gauge_cls(name="vllm:num_requests_running", labelnames=labelnames)
        preempted = self._counter_cls(name="vllm:num_preemptions", labelnames=labelnames + ["reason"])
        self.waiting = "waiting"
        lora = self._gauge_cls(name="vllm:lora_info", labelnames=[self.waiting, "running"])
        logger.warning("vllm:not_a_metric is only a word here")

    def info(self, config):
        name = "vllm:cache_config_info"
        self._gauge_cls(name=name, documentation="x", labelnames=config.keys())

    def spec(self, labelnames):
        counters = [self._counter_cls(name=name, documentation=doc, labelnames=labelnames)
                    for name, doc in [("vllm:drafts", "a"), ("vllm:accepted", "b")]]
""",
    "vllm/v1/offload/names.py": 'class Names:\n    LOADS = "vllm:offload_loads"\n    SIZE = "vllm:offload_size"\n',
    "vllm/v1/offload/spec.py": """
from vllm.v1.offload.names import Names

def definitions():
    found = {Names.LOADS: OffloadingCounterMetadata(documentation="x")}
    found[Names.SIZE] = OffloadingHistogramMetadata(documentation="y", labelnames=("tier",))
    return found
""",
    "vllm/entrypoints/sleep.py": """
from prometheus_client import Histogram
DURATION = Histogram("vllm:sleep_seconds", "Duration.", ["operation"])
""",
    "vllm/broken.py": "def (:\n",
    "vllm/tests/test_flags.py": 'parser.add_argument("--only-in-a-test")\n',
}

SGLANG_OLD = {
    "sglang/srt/server_args.py": """
import dataclasses
CHOICES = ["auto", "fp8_e5m2"]

@dataclasses.dataclass
class ServerArgs:
    mem_fraction_static: float = None
    page_size: int = 1
    radix: bool = False
    kv_cache_dtype: str = "auto"

    @staticmethod
    def add_cli_args(parser):
        more = CHOICES + ["bf16"]
        parser.add_argument("--mem-fraction-static", type=float, default=ServerArgs.mem_fraction_static)
        parser.add_argument("--page-size", type=int, default=ServerArgs.page_size)
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--kv-cache-dtype", type=str, default=ServerArgs.kv_cache_dtype, choices=more)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
        parser.add_argument("--forward-hooks", type=json_list_type, default=None)
""",
    "sglang/srt/metrics/collector.py": """
class Collector:
    def __init__(self, labels):
        from prometheus_client import Counter, Gauge
        self.retracted = Counter(name="sglang:num_retracted", labelnames=[*labels.keys(), "cause"])
        self.usage = Gauge(name="sglang:token_usage", labelnames=labels.keys())
""",
}

SGLANG_NEW = {
    "sglang/srt/server_args.py": """
from sglang.srt.arg_groups.argparse_actions import DeprecatedStoreTrueAction

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        parser.add_argument("--disable-cuda-graph", action=DeprecatedStoreTrueAction, new_flag="--x", help="Old.")

ServerArgs = defstruct("ServerArgs", [])
""",
    "sglang/srt/arg_groups/choices.py": 'POLICIES = ["lru", "lfu"]\n',
    "sglang/srt/arg_groups/fields/memory.py": """
from typing import List, Literal, Optional
from sglang.srt.arg_groups.choices import POLICIES

class Memory:
    _NS_PATH = "memory"
    mem_fraction_static: A[Optional[float], "Share of memory."] = None
    policy: A[str, Arg(help="Order.", choices=POLICIES + ["slru"])] = "lru"
    tp_size: A[int, Arg(help="GPUs.", aliases=["--tensor-parallel-size"])] = 1
    hicache: A[bool, Arg(help="Host tier.", cli_name="--enable-hicache")] = False
    mode: A[Literal["a", "b"], "Mode."] = "a"
    ports: A[Optional[List[int]], "Ports."] = None
    hidden: A[int, Arg(help="No flag.", no_cli=True)] = 0
    derived: A[int, Derived(doc="set later")] = 0
    plain: int = 3
""",
}


def make_tree(folder: Path, files: dict[str, str], metadata: tuple[str, str] | None = None) -> Path:
    """Files in a folder, with a `dist-info` beside the package if asked for."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if metadata is not None:
        name, version = metadata
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata_text(name, version))
    return folder


def metadata_text(name: str, version: str) -> str:
    """What METADATA and PKG-INFO hold."""
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nA text. Version: 9.9.9\n"


def make_wheel(file: Path, files: dict[str, str], name: str, version: str) -> Path:
    """A wheel."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in files.items():
            archive.writestr(member, text)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata_text(name, version))
    return file


def make_sdist(file: Path, files: dict[str, str], name: str, version: str, inner: str = "") -> Path:
    """An sdist; `inner` is a folder the package lies in, as in `python/sglang`."""
    members = {f"{name}-{version}/{inner}{member}": text for member, text in files.items()}
    members[f"{name}-{version}/PKG-INFO"] = metadata_text(name, version)
    with tarfile.open(file, "w:gz") as archive:
        for member, text in members.items():
            content = text.encode()
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file
