"""The flags of `kvoncall plan`. Those of a server carry the names of its engine; all spellings are one value."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.memory.units import GIB, parse_memory

LONGEST = -1  # --max-model-len auto


def add_options(parser: argparse.ArgumentParser) -> None:
    """Model, GPUs, engine and flags, stated figures, and what to show."""
    parser._negative_number_matcher = re.compile(r"^-\d.*$")  # "-80GiB" is a value, to be refused as such
    parser.set_defaults(again=parser)
    _model(parser.add_argument_group("model"))
    _gpus(parser.add_argument_group("GPUs"))
    _server(parser.add_argument_group("server (names of vLLM; those of SGLang and TensorRT-LLM are taken too)"))
    _stated(parser.add_argument_group("stated figures, in GiB of one GPU; each replaces an estimate"))
    _shown(parser.add_argument_group("what to show"))


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", metavar="NAME", help="a preset (--list-models), a directory or a config.json")
    add("--model-config", metavar="FILE|DIR|-", help="a Hugging Face config.json; - reads it from standard input")
    add("--layers", type=positive, metavar="N", help="plain dims: layers with attention")
    add("--kv-heads", type=positive, metavar="N")
    add("--head-dim", type=positive, metavar="N")
    add("--query-heads", type=positive, metavar="N")
    add("--mla-latent", type=positive, metavar="N", help="values a token and layer of multi-head latent attention")
    add("--window-layers", type=positive, metavar="N", help="how many of the layers keep only --window tokens")
    add("--window", type=positive, metavar="TOKENS")
    add("--hidden-size", type=positive, metavar="N")
    add("--intermediate-size", type=positive, metavar="N")
    add("--vocab-size", type=positive, metavar="N")
    add("--params", type=count, metavar="N", help="parameters of a model given by plain dims, for example 70B")
    add("--dtype", metavar="DTYPE", help="dtype of weights and activations (default: the config's)")
    add("--quantization", metavar="METHOD", help="weights in fp8, int8, int4, awq, gptq, bitsandbytes, mxfp4 or nvfp4")
    add("--draft-model", metavar="NAME|FILE", help="draft model of speculative decoding")
    add("--num-speculative-tokens", type=positive, metavar="N")
    add("--speculative-config", metavar="JSON", help="vLLM's form of the two above")


def _gpus(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--gpu", metavar="NAME", help="a preset, for example H100-80GB (--list-gpus)")
    add("--gpu-memory", type=memory, metavar="SIZE", help="what the driver reports of one GPU, for example 79.1GiB")
    add("--gpus", type=positive, metavar="N", help="GPUs in all (default: as many as tp x pp x dp)")
    add("--tp", type=positive, metavar="N", help="also --tensor-parallel-size")
    _also(group, "tp", positive, "--tensor-parallel-size", "-tp", "--tp-size", "--tp_size", "--num-shard")
    add("--pp", type=positive, metavar="N", help="also --pipeline-parallel-size")
    _also(group, "pp", positive, "--pipeline-parallel-size", "-pp", "--pp-size", "--pp_size")
    add("--dp", type=positive, metavar="N", help="also --data-parallel-size")
    _also(group, "dp", positive, "--data-parallel-size", "-dp", "--dp-size")
    add("--dcp", type=positive, metavar="N", help="also --decode-context-parallel-size")
    _also(group, "dcp", positive, "--decode-context-parallel-size", "-dcp")
    add("--enable-dp-attention", action="store_true", default=None)
    add("--stage-layers", type=numbers(int), metavar="N,N", help="layers of each pipeline stage")
    add("--host-memory", type=memory, metavar="SIZE", help="memory of the host, for offload")


def _server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engine", metavar="ENGINE[@VERSION]", help="vllm, sglang, tensorrt-llm, tgi or kvoncall (default: vllm)")
    add("--max-model-len", type=length, metavar="TOKENS", help="131072, 128K, or auto for the longest that fits")
    _also(group, "max_model_len", length, "--context-length", "--max_seq_len")
    add("--max-num-seqs", type=positive, metavar="N")
    _also(group, "max_num_seqs", positive, "--max-running-requests", "--max_batch_size")
    add("--max-num-batched-tokens", type=tokens, metavar="TOKENS")
    batched = ("--chunked-prefill-size", "--max_num_tokens", "--max-batch-prefill-tokens")
    _also(group, "max_num_batched_tokens", tokens, *batched)
    add("--block-size", type=positive, metavar="TOKENS")
    _also(group, "block_size", positive, "--page-size", "--tokens-per-block")
    add("--kv-cache-dtype", metavar="FORMAT")
    add("--kv-cache-dtype-skip-layers", nargs="+", metavar="LAYER")
    add("--gpu-memory-utilization", type=float, metavar="SHARE")
    shares = ("--mem-fraction-static", "--kv_cache_free_gpu_memory_fraction", "--cuda-memory-fraction")
    _also(group, "gpu_memory_utilization", float, *shares)
    add("--enforce-eager", action=argparse.BooleanOptionalAction, default=None)
    add("--disable-cuda-graph", dest="enforce_eager", action="store_true", default=None, help=argparse.SUPPRESS)
    add("--disable-hybrid-kv-cache-manager", action=argparse.BooleanOptionalAction, default=None)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    add("--num-gpu-blocks-override", type=positive, metavar="N")
    add("--kv-cache-memory-bytes", type=memory, metavar="SIZE")
    add("--max-total-tokens", dest="max_kv_tokens", type=tokens, metavar="TOKENS", help="SGLang's cap on the pool")
    add("--kv-offloading-size", type=float, metavar="GIB", help="KV in host memory: GiB over all ranks")
    add("--kv-offloading-per-rank", action="store_true", default=None, help="the size above is taken by every rank")
    add("--max-lora-rank", type=positive, metavar="N")
    add("--max-loras", type=positive, metavar="N")


def _also(group: argparse._ArgumentGroup, dest: str, kind: Callable[[str], Any], *names: str) -> None:
    """Other engines' names of a flag: taken, not listed."""
    group.add_argument(*names, dest=dest, type=kind, help=argparse.SUPPRESS)


def _stated(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kv-gib", type=gibibytes, metavar="X", help="KV memory as the engine's log states it")
    add("--stage-kv-gib", type=numbers(float), metavar="X,X", help="the same of each pipeline stage")
    add("--weights-gib", type=gibibytes, metavar="X")
    add("--activation-gib", type=gibibytes, metavar="X")
    add("--non-torch-gib", type=gibibytes, metavar="X")
    add("--cuda-graph-gib", type=gibibytes, metavar="X")
    add("--other-processes-gib", type=gibibytes, metavar="X")
    add("--tokens-per-request", type=tokens, metavar="N", help="what a typical request holds at its end")


def _shown(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--target", metavar="NAME|URL", help="read model, flags and pool off a running server")
    add("--template", metavar="ID", help="start from the flags of a template")
    add("--levers", action="store_true", help="what each change would buy")
    add("--compare", action="append", default=[], metavar="FLAGS", help="a second plan with other flags, as one word")
    add("--attention-table", action="store_true", help="MHA, GQA, MQA and latent attention in true bytes")
    add("--explain", action="store_true", help="the arithmetic, line by line")
    add("--check", type=Path, metavar="FILE", help="run published anchors of this JSON file through the planner")
    add("--list-models", action="store_true", help="names of model presets")
    add("--list-gpus", action="store_true", help="names of GPU presets")
    add("--json", action="store_true", help="print one JSON object")


def positive(text: str) -> int:
    """A whole number above 0."""
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def tokens(text: str) -> int:
    """Tokens: 131072, or vLLM's 128K (binary) and 128k (decimal)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text.strip())
    scale = {"k": 1000, "m": 10**6, "K": 1024, "M": 1 << 20}
    return positive(str(int(float(match[1]) * scale[match[2]]))) if match else positive(text)


def length(text: str) -> int:
    """`tokens`, or `LONGEST` for auto."""
    return LONGEST if text in ("auto", "-1") else tokens(text)


def count(text: str) -> int:
    """Parameters: 8030261248, 70B, 494M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kKmMbBtT]?)", text.strip())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write for example 70B")
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()])


def gibibytes(text: str) -> tuple[int, str]:
    """(bytes, note) of a number of GiB, or of an amount with its unit."""
    try:
        value = float(text)
    except ValueError:
        return memory(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be more than 0 GiB, found {text}")
    return int(value * GIB), ""


def memory(text: str) -> tuple[int, str]:
    """(bytes, note of the unit taken)."""
    try:
        return parse_memory(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers(kind: type) -> Any:
    """Several values in one word: 14,13."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 14,13") from None
        if any(value <= 0 for value in values):
            raise argparse.ArgumentTypeError(f"each must be more than 0, found {text}")
        return values

    return read
