"""`kvoncall bench`: speed and memory on this machine, as ratios taken in one run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

from probe.commands.output import UsageError, print_json, report

KERNEL_BENCHES = {
    "attention": "kernels.bench.attention",
    "aot": "kernels.aot",
    "recall": "kernels.bench.recall",
}  # these read their own flags, as `serve` does
BENCHES = ("decode", "formats", "scheduler", "prefix", "memory", "collect", "rules", "store")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("what", choices=("all", *KERNEL_BENCHES, *BENCHES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="", metavar="DIR", help="model directory (default: the testbed model)")
    parser.add_argument(
        "--against",
        metavar="URL",
        help="decode: also compare through HTTP with a server of the same model, such as vLLM",
    )


def run(options: argparse.Namespace) -> int:
    """Runs one bench or all."""
    from probe.bench import run_bench

    if options.what in KERNEL_BENCHES:
        raise UsageError(f"flags of `bench {options.what}` come after its name: kvoncall bench {options.what} --help")
    result = run_bench(
        options.what,
        model=options.model,
        against=options.against,
        report=report,
    )
    if options.json:
        print_json(result)
    else:
        for name, figures in result.items():
            print(name)
            for key, value in figures.items():
                print(f"  {key:44} {value}")
    return 0 if result.get("attention", {}).get("wrong", 0) == 0 else 1


def run_kernel_bench(module: str, args: Sequence[str]) -> int:
    """A bench that reads its own flags, as `kvoncall serve` does."""
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run(args)
