"""`kvoncall doctor`: what is wrong with a target now, and what to change."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.commands.output import UsageError, add_data_dir, open_store, print_json, report

if TYPE_CHECKING:
    from probe.doctor.observed import Observed
    from runbooks.config_lint import LaunchLine


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="http://host:port, or a stored target's name")
    add("--prometheus", metavar="URL", help="read the last minutes from this Prometheus server; TARGET is its instance")
    add("--prometheus-auth-env", metavar="NAME", help="environment variable with its Authorization header")
    add(
        "--flags",
        metavar='"FLAGS"',
        help="the server's command line, or a YAML file of flags: linted, and used in advice",
    )
    add("--for", dest="seconds", type=float, metavar="SECONDS", help="how long to watch (15), or to look back (300)")
    add("--multi-tenant", action="store_true", help="requests of different customers meet in this server")
    add("--gpu", metavar="NAME", help="the GPU, for lint of formats and memory (`kvoncall plan --help` names them)")
    add(
        "--beside",
        type=float,
        action="append",
        default=[],
        metavar="SHARE",
        help="utilization of another server on the same GPU, started before this one (may be repeated)",
    )
    add("--verbose", action="store_true", help="also what could not be judged, and remarks about flags")
    add("--json", action="store_true", help="print one JSON object")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """0 nothing wrong, 1 findings, 3 too little was seen to say."""
    from probe.doctor.report import diagnose, text

    if options.seconds is not None and options.seconds <= 0:
        raise UsageError("--for takes more than 0 seconds")
    observed = _observe(options)
    known: dict[str, Any] = {"multi_tenant": True} if options.multi_tenant else {}
    if options.beside:
        known["beside"] = tuple(options.beside)
    if options.gpu:
        from engine.memory.model_presets import gpu

        known["gpu"] = gpu(options.gpu)
    diagnosis = diagnose(observed, _line(options.flags, observed), **known)
    if options.json:
        print_json(diagnosis.to_dict())
    else:
        print(text(diagnosis, verbose=options.verbose))
    return diagnosis.code


def _observe(options: argparse.Namespace) -> Observed:
    from probe.doctor import observed
    from probe.fleet import access_options

    if options.prometheus:
        access = access_options(options.prometheus_auth_env)
        seconds = options.seconds or observed.STORED_S
        return observed.from_prometheus(options.prometheus, options.target, seconds, access, report)
    if "://" in options.target:
        return observed.watch(options.target, options.seconds or observed.DEFAULT_S, report)
    with open_store(options) as store:
        return observed.of_stored(store, options.target, options.seconds, report)


def _line(flags: str | None, observed: Observed) -> LaunchLine | None:
    from runbooks.config_lint import LaunchLineError, read_line, read_yaml

    if flags is None:
        return None
    engine, version = observed.target.engine, observed.version
    try:
        file = Path(flags) if flags.endswith((".yaml", ".yml")) and " " not in flags else None
        if file is None:
            return read_line(engine, version, flags)
        return read_yaml(engine, version, file.read_text(encoding="utf-8"))
    except (LaunchLineError, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--flags cannot be used: {error}") from None
