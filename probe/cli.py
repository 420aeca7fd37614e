"""The `kvoncall` command: a thin map from words to rooms.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done and true, 1 the answer is no
(a replay did not verify, an arm answers worse than its baseline, a leak was shown, a benchmarked kernel was
wrong, a compiled one spills), 2 the command could not be carried out (one sentence says why), 3 the isolation
probe is inconclusive, 130 interrupted. `serve` has the engine's own codes (3 port in use, 12 out of memory). Rooms
are imported when they are used, so that `kvoncall` itself answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.config import ConfigError

COMMANDS = """\
kvoncall: operations dashboard and incident toolkit for the KV cache of LLM serving

  streamlit run app             the dashboard with a live engine

  kvoncall serve …              the embedded engine's server (vLLM's flags)
  kvoncall watch                collector and alert evaluator without the app
  kvoncall replay ID            an incident: reproduce, alert, remedy, verify   (--list, --json, --no-remedy)
  kvoncall quality              what KV formats do to answers: accuracy, perplexity, agreement, canary, lm-eval
  kvoncall isolation            does the prefix cache of any OpenAI endpoint keep tenants apart? leaks and side channel
  kvoncall runbooks list|show   what to do about an alert
  kvoncall bench WHAT           attention, decode, formats, scheduler, prefix, memory or all; aot: registers and spills
                                of the kernels; recall: what each KV format still finds

`kvoncall COMMAND --help` tells more. Data lives in --data-dir, or KVONCALL_DATA, or the user's data folder.
"""

KERNEL_BENCHES = {
    "attention": "kernels.bench.attention",
    "aot": "kernels.aot",
    "recall": "kernels.bench.recall",
}  # these read their own flags, as `serve` does


class UsageError(Exception):
    """The command line does not make sense; the message is one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help tells more)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(COMMANDS, end="")
        return 0
    if args[0] == "serve":
        from engine.server import main as serve

        return serve(args[1:])
    try:
        if args[0] == "bench" and args[1:2] and args[1] in KERNEL_BENCHES:
            return _kernel_bench(KERNEL_BENCHES[args[1]], args[2:])
        options = _parser().parse_args(args)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except KeyboardInterrupt:
        print("kvoncall: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; Python would complain again at exit
        return 1
    except _reported_errors() as error:
        print(f"kvoncall: {error}", file=sys.stderr)
        return 2


def _reported_errors() -> tuple[type[Exception], ...]:
    """The errors whose message is already one sentence for the user."""
    reported: list[type[Exception]] = [UsageError, ConfigError]
    modules = {
        "probe.store": "StoreError",
        "probe.targets": "TargetError",
        "probe.isolation.client": "ProbeError",
        "probe.quality.suite": "QualityError",
        "probe.replay.scenario": "ReplayError",
        "runbooks.load": "RunbookError",
        "engine.supervisor": "EngineStartError",
    }
    for module, name in modules.items():
        if module in sys.modules:  # a room that was never imported cannot have raised
            reported.append(getattr(sys.modules[module], name))
    return tuple(reported)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvoncall", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    watch = command("watch", _watch, "Collect metrics and evaluate alerts without the app, until interrupted.")
    watch.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="attach a server before watching (may be repeated)",
    )
    watch.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="stop after this long")
    _data_dir(watch)

    replay = command(
        "replay",
        _replay,
        "Replay an incident on a drill engine of its own: reproduce, alert, remedy, "
        "verify. Exits 0 when the remedy is verified, 1 when not.",
    )
    replay.add_argument("id", nargs="?", help="the incident (see --list)")
    replay.add_argument("--list", action="store_true", help="name the incidents")
    replay.add_argument("--json", action="store_true", help="print one JSON object")
    replay.add_argument("--variant", metavar="NAME", help="another form of the incident, where it has some")
    replay.add_argument("--no-remedy", action="store_true", help="leave the remedy out: the check must then fail")
    _data_dir(replay)

    _quality_options(
        command(
            "quality",
            _quality,
            "Measure what KV-cache formats do to answers: questions with exact answers over many turns, perplexity, "
            "KL divergence and agreement against a baseline. Exits 1 when an arm is worse than its baseline.",
        )
    )

    _isolation_options(
        command(
            "isolation",
            _isolation,
            "Probe an OpenAI endpoint from outside: does one tenant get another's text, or tell from times and token "
            "counts what another has cached, and is cache_salt honoured? States its budget first and sends only text "
            "of its own. Exits 0 when no leak was found, 1 when one is shown, 3 when inconclusive.",
        )
    )

    runbooks = command("runbooks", _runbooks, "List the runbooks, or show one.")
    runbooks.add_argument("action", choices=("list", "show"))
    runbooks.add_argument("id", nargs="?")
    runbooks.add_argument("--json", action="store_true")

    bench = command(
        "bench",
        _bench,
        "Measure speed and memory on this machine, as ratios taken in one run. `bench attention`, `aot` and `recall` "
        "have flags of their own: see `kvoncall bench attention --help`. Exits 1 when a kernel's result was wrong.",
    )
    bench.add_argument("what", choices=("all", *KERNEL_BENCHES, "decode", "formats", "scheduler", "prefix", "memory"))
    bench.add_argument("--json", action="store_true")
    bench.add_argument("--model", default="", metavar="DIR", help="model directory (default: the testbed model)")
    bench.add_argument(
        "--against",
        metavar="URL",
        help="decode: also compare through HTTP with a server of the same model, such as vLLM",
    )
    return parser


def _quality_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", default="embedded", metavar="embedded|URL|NAME", help="engines of its own, or a running server")
    add("--model", default="", metavar="PATH", help="embedded: as `kvoncall serve --model` (default: the testbed)")
    add("--engine-flags", default="", metavar="FLAGS", help="embedded: further flags of the engines, as one word")
    add("--dtypes", metavar="A,B,C", help="embedded: values of --kv-cache-dtype; the first is the baseline")
    add("--turns", type=int, default=20, metavar="N", help="questions a conversation")
    add("--conversations", type=int, default=16, metavar="N")
    add("--tasks", default="recall,add,brackets", metavar="LIST", help="of recall, add, brackets; or none")
    add("--suite", default="auto", choices=("auto", "testbed", "plain"), help="language (auto: by the model)")
    add("--chat", action="store_true", help="ask through /v1/chat/completions")
    add("--context", type=int, metavar="TOKENS", help="fill conversations up to this (default: 2048 or what fits)")
    add("--windows", type=int, default=4, metavar="N", help="windows of text for likelihoods (0: none)")
    add("--text", type=Path, metavar="FILE", help="text to judge (default: the suite's own)")
    add("--baseline", metavar="RUN_ID|URL", help="compare with a stored run, or measure this server first")
    add("--resume", metavar="RUN_ID", help="go on with an incomplete run")
    add("--canary", action="store_true", help="ask a running server a small fixed set again and again")
    add("--every", type=float, default=600.0, metavar="SECONDS", help="canary: from one round's start to the next's")
    add("--rounds", type=int, metavar="N", help="canary: stop after so many (default: go on)")
    add("--lm-eval", metavar="TASKS", help="run the user's lm-eval harness instead; its own flags follow `--`")
    add("lm_eval_args", nargs="*", metavar="-- ARGS", help="flags for lm-eval")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    add("--list", action="store_true", help="name the stored runs")
    add("--json", action="store_true", help="print one JSON object")
    _data_dir(parser)


def _isolation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    checks = ("leak-canary", "side-channel", "cache-salt")
    add("--target", default="embedded", metavar="embedded|URL|NAME", help="an engine of its own, or a running server")
    add("--engine-flags", default="", metavar="FLAGS", help="embedded: further flags of the engine, as one word")
    add("--scope", metavar="SCOPE", help="embedded: as --engine-flags '--prefix-cache-scope SCOPE'")
    add("--model", default="", metavar="NAME", help="model to ask for; embedded: as `kvoncall serve --model`")
    add("--checks", default=",".join(checks), metavar="LIST", help=f"some of {', '.join(checks)}")
    add("--variant", choices=checks, help="one check alone")
    add("--probes", type=int, default=80, metavar="N", help="probes of each check")
    add("--tenants-by", default="all", choices=("all", "header", "user", "salt"), help="what callers differ by")
    add("--salted", action="store_true", help="each tenant also sends a cache_salt of its own")
    add("--chat", action="store_true", help="ask through /v1/chat/completions")
    add("--prefix-tokens", type=int, metavar="N", help="length of prefixes (default: 1024, or half the context)")
    add("--timeout", type=float, default=30.0, metavar="SECONDS", help="for one request")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's API key")
    add("--json", action="store_true", help="print one JSON object")
    _data_dir(parser)


def _data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the database lives")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _watch(options: argparse.Namespace) -> int:
    from probe.monitor import watch
    from probe.store import Store, default_data_dir
    from probe.targets import attach_target

    store = Store.open(options.data_dir or default_data_dir())
    try:
        for spec in options.target:
            target = attach_target(store, spec)
            print(f"attached {target.name} at {target.url} ({target.engine})", file=sys.stderr)
        return watch(store, seconds=options.seconds, report=lambda line: print(line, file=sys.stderr))
    finally:
        store.close()


def _replay(options: argparse.Namespace) -> int:
    from probe.replay.scenario import VARIANTS, ReplayError, get_scenario, list_scenarios

    if options.list:
        scenarios = list_scenarios()
        if options.json:
            _print_json([{"id": s.id, "title": s.title, "variants": list(VARIANTS.get(s.id, ()))} for s in scenarios])
        else:
            for scenario in scenarios:
                variants = f" (--variant {', '.join(VARIANTS[scenario.id])})" if scenario.id in VARIANTS else ""
                print(f"{scenario.id:16} {scenario.title}{variants}")
        return 0
    if not options.id:
        raise ReplayError("which incident? `kvoncall replay --list` names them")
    scenario = get_scenario(options.id, options.variant)

    from probe.replay.report import summary
    from probe.replay.runner import ReplayRunner
    from probe.store import Store, default_data_dir

    store = Store.open(options.data_dir or default_data_dir())
    try:
        runner = ReplayRunner(
            store,
            scenario,
            interactive=False,
            remedy=not options.no_remedy,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        result = runner.run()
    finally:
        store.close()
    if options.json:
        _print_json(result)
    else:
        print(summary(result))
    return 0 if result["verified"] else 1


def _quality(options: argparse.Namespace) -> int:
    from probe.quality import command, table

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.lm_eval_args and not options.lm_eval:
        raise UsageError(f"{options.lm_eval_args[0]!r} means nothing here: arguments belong to --lm-eval TASKS")
    if options.list:
        runs = command.list_runs(options)
        if options.json:
            _print_json(runs)
        else:
            print(table.listing(runs))
        return 0
    if options.lm_eval:
        value = command.run_harness(options, report)
        if options.json:
            _print_json(value)
        else:
            print(table.harness(value))
        return 0
    outcome = (command.run_canary if options.canary else command.measure)(options, report)
    if options.json:
        _print_json(outcome.value)
    else:
        print(table.report(outcome.value))
    return outcome.code


def _isolation(options: argparse.Namespace) -> int:
    from probe.isolation import command

    outcome = command.run(options, lambda line: print(line, file=sys.stderr, flush=True))
    if options.json:
        _print_json(outcome.result.to_dict())
    else:
        print(command.text(outcome.result))
    return outcome.code


def _runbooks(options: argparse.Namespace) -> int:
    from runbooks.load import RunbookError, get_runbook, list_runbooks

    if options.action == "list":
        runbooks = list_runbooks()
        if options.json:
            _print_json([{"id": r.id, "title": r.title, "severity": r.severity} for r in runbooks])
        else:
            for runbook in runbooks:
                print(f"{runbook.id:16} {runbook.severity:9} {runbook.title}")
        return 0
    if not options.id:
        raise RunbookError("which runbook? `kvoncall runbooks list` names them")
    runbook = get_runbook(options.id)
    if options.json:
        _print_json({"id": runbook.id, "meta": runbook.meta, "sections": runbook.sections})
    else:
        print(runbook.markdown)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from probe.bench import run_bench

    if options.what in KERNEL_BENCHES:
        raise UsageError(f"flags of `bench {options.what}` come after its name: kvoncall bench {options.what} --help")
    result = run_bench(
        options.what,
        model=options.model,
        against=options.against,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json:
        _print_json(result)
    else:
        for name, figures in result.items():
            print(name)
            for key, value in figures.items():
                print(f"  {key:44} {value}")
    return 0 if result.get("attention", {}).get("wrong", 0) == 0 else 1


def _kernel_bench(module: str, args: Sequence[str]) -> int:
    run: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
