"""The `kvoncall` command: a thin map from words to rooms.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done and true, 1 the answer is no
(a replay did not verify, an arm answers worse than its baseline, a leak was shown, a rule file has findings, a
benchmarked kernel was wrong, a compiled one spills), 2 the command could not be carried out (one sentence says why),
3 the isolation probe or the doctor cannot tell, 130 interrupted. `serve` has the engine's own codes (3 port in use,
12 out of memory). Rooms are imported when they are used, so that `kvoncall` itself answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine.config import ConfigError
from probe.commands.output import UsageError

MAP = """\
kvoncall: operations dashboard and incident toolkit for the KV cache of LLM serving

  streamlit run app             the dashboard with a live engine

  kvoncall serve …              the embedded engine's server (vLLM's flags)
  kvoncall watch                collector and alert evaluator without the app
  kvoncall replay ID            an incident: reproduce, alert, remedy, verify   (--list, --json, --no-remedy)
  kvoncall quality              what KV formats do to answers: accuracy, perplexity, agreement, canary, lm-eval
  kvoncall isolation            does the prefix cache of any OpenAI endpoint keep tenants apart? leaks and side channel
  kvoncall rules list|export    the alert rules; for Prometheus, Alertmanager, Grafana and promtool
  kvoncall check FILES          lint your own Prometheus rules and Grafana dashboards for an engine's version
  kvoncall backtest RULE        would a rule have fired on what is stored?
  kvoncall plan …               memory plan: what fits, where it goes, what each lever buys (--levers, --check FILE)
  kvoncall flags ENGINE VER     flags of an engine's version; flags diff OLDER NEWER
  kvoncall catalog add WHEEL    flags and metrics of another release, read from its source; catalog list
  kvoncall doctor TARGET        what is wrong with a server now, what only looks like it, what to change
  kvoncall runbooks …           list, show, lint: what to do about an incident; advise ID: the change for a target
  kvoncall bench WHAT           attention, decode, formats, scheduler, prefix, memory, collect, rules, store or all;
                                aot: registers and spills of the kernels; recall: what each KV format still finds

`kvoncall COMMAND --help` tells more. Data lives in --data-dir, or KVONCALL_DATA, or the user's data folder.
"""

# Command -> what `--help` says. The module of the same name in `probe.commands` reads its flags and runs it.
COMMANDS = {
    "watch": "Collect metrics and evaluate alerts without the app, until interrupted.",
    "replay": "Replay an incident on a drill engine of its own: reproduce, alert, remedy, verify. Exits 0 when the "
    "remedy is verified, 1 when not.",
    "quality": "Measure what KV-cache formats do to answers: questions with exact answers over many turns, perplexity, "
    "KL divergence and agreement against a baseline. Exits 1 when an arm is worse than its baseline.",
    "isolation": "Probe an OpenAI endpoint from outside: does one tenant get another's text, or tell from times and "
    "token counts what another has cached, and is cache_salt honoured? States its budget first and sends only text "
    "of its own. Exits 0 when no leak was found, 1 when one is shown, 3 when inconclusive.",
    "rules": "List the alert rules, or export them: Prometheus rules, a PrometheusRule, Alertmanager's routes, a "
    "Grafana dashboard, or unit tests for promtool.",
    "check": "Lint Prometheus rules and Grafana dashboards against an engine's version or a live server: names that "
    "are dead there, rules that can never fire or are silent in an outage, wrong units. Exits 1 when it finds any.",
    "backtest": "Evaluate a rule again on stored samples: when it would have fired, for how long, how many pages a "
    "week, and how long before users felt it.",
    "plan": "Plan the memory of a server from its model, GPUs, engine and flags, or of a live one with --target: where "
    "it goes, what fits, what each lever would buy. Exits 0 when it fits, 1 when it does not fit or does not run so, "
    "or a --check missed.",
    "flags": "Print an engine's flags in a version: kind, default, values, since when, and for those about the KV "
    "cache what they do; or what changed between two versions, metrics included.",
    "doctor": "Watch a server for a window (or read what is stored, or a Prometheus server), and tell what is wrong, "
    "how sure that is, what only looks the same, and what to change; lint its flags, list advisories of its version. "
    "Exits 0 when nothing is wrong, 1 with findings, 3 when too little was seen to say.",
    "catalog": "Read the flags and metrics of another release of vLLM or SGLang from its wheel, sdist or source tree, "
    "without running it, tell what changed against the nearest older version known, and with --write keep it.",
    "runbooks": "List the runbooks, show one, lint them (flags, metrics, queries, commands and links, in every version "
    "a page states; exits 1 when it finds any), or compute the change that one advises for a target.",
    "bench": "Measure speed and memory on this machine, as ratios taken in one run. `bench attention`, `aot` and "
    "`recall` have flags of their own: see `kvoncall bench attention --help`. Exits 1 when a kernel's result was "
    "wrong.",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help tells more)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(MAP, end="")
        return 0
    if args[0] == "serve":
        from engine.server import main as serve

        return serve(args[1:])
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("kvoncall: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; Python would complain again at exit
        return 1
    except _reported_errors() as error:
        print(f"kvoncall: {error}", file=sys.stderr)
        return 2


def _run(args: list[str]) -> int:
    name = args[0]
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}; there are: serve, {', '.join(COMMANDS)}")
    module = importlib.import_module(f"probe.commands.{name}")
    if name == "bench" and args[1:2] and args[1] in module.KERNEL_BENCHES:
        return int(module.run_kernel_bench(module.KERNEL_BENCHES[args[1]], args[2:]))
    return int(module.run(parser(name).parse_args(args[1:])))


def parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command's flags."""
    made = _Parser(prog=f"kvoncall {name}", description=COMMANDS[name], allow_abbrev=False)
    importlib.import_module(f"probe.commands.{name}").add_options(made)
    return made


def _reported_errors() -> tuple[type[Exception], ...]:
    """The errors whose message is already one sentence for the user."""
    reported: list[type[Exception]] = [UsageError, ConfigError]
    modules = {
        "probe.store": "StoreError",
        "probe.targets": "TargetError",
        "probe.alerts.backtest": "BacktestError",
        "probe.check.command": "CheckError",
        "probe.export.naming": "ExportError",
        "probe.isolation.client": "ProbeError",
        "probe.quality.suite": "QualityError",
        "probe.replay.scenario": "ReplayError",
        "runbooks.load": "RunbookError",
        "runbooks.catalog_data": "CatalogError",
        "runbooks.command_edit": "CommandError",
        "engine.supervisor": "EngineStartError",
    }
    for module, name in modules.items():
        if module in sys.modules:  # a room that was never imported cannot have raised
            reported.append(getattr(sys.modules[module], name))
    return tuple(reported)


if __name__ == "__main__":
    sys.exit(main())
