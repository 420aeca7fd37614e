"""`kvoncall replay`: an incident on a drill engine of its own, or on a server that the operator names."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from probe.commands.output import UsageError, add_data_dir, log_dir, open_store, print_json, report

if TYPE_CHECKING:
    from probe.replay.scenario import Scenario
    from probe.store import Store


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("id", nargs="?", help="the incident (see --list)")
    parser.add_argument("--list", action="store_true", help="name the incidents")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--variant", metavar="NAME", help="another form of the incident, where it has some")
    parser.add_argument("--no-remedy", action="store_true", help="leave the remedy out: the check must then fail")
    add_data_dir(parser)
    server = parser.add_argument_group(
        "on a server of yours", "The load makes it preempt while it lasts: never name a server that others use."
    )
    server.add_argument("--target", metavar="NAME|URL", help="provoke the incident there, not on a drill engine")
    server.add_argument(
        "--restart-command",
        metavar="SHELL",
        help="how to restart it with changed flags, {flags} in it stands for them (default: KVONCALL_RESTART_COMMAND, "
        "else nothing is restarted); shown and asked for before it runs",
    )
    server.add_argument("--yes", action="store_true", help="run the restart command without asking")
    server.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the server's API key")


def run(options: argparse.Namespace) -> int:
    """Runs one incident, or lists them."""
    from probe.replay.scenario import ReplayError, get_scenario, get_server_scenario

    if options.list:
        return _list(options)
    if not options.id:
        raise ReplayError("which incident? `kvoncall replay --list` names them")
    if options.target and options.variant:
        raise UsageError("--variant belongs to drill engines; leave it out with --target")
    if not options.target and (options.restart_command or options.yes or options.api_key_env):
        raise UsageError("--restart-command, --yes and --api-key-env belong to --target; drill engines need none")
    scenario = get_server_scenario(options.id) if options.target else get_scenario(options.id, options.variant)

    from probe.replay.report import summary
    from probe.replay.runner import ReplayRunner

    with open_store(options) as store:
        runner = ReplayRunner(
            store,
            scenario,
            interactive=False,
            remedy=not options.no_remedy,
            progress=report,
            **(_on_server(options, store, scenario) if options.target else {}),
        )
        result = runner.run()
    if options.json:
        print_json(result)
    else:
        print(summary(result))
    return 0 if result["verified"] else 1


def _list(options: argparse.Namespace) -> int:
    from probe.replay.scenario import ON_SERVER, VARIANTS, list_scenarios

    scenarios = list_scenarios()
    if options.json:
        print_json(
            [
                {
                    "id": s.id,
                    "title": s.title,
                    "variants": list(VARIANTS.get(s.id, ())),
                    "on_server": s.id in ON_SERVER,
                }
                for s in scenarios
            ]
        )
        return 0
    for scenario in scenarios:
        variants = f" (--variant {', '.join(VARIANTS[scenario.id])})" if scenario.id in VARIANTS else ""
        server = " (also --target)" if scenario.id in ON_SERVER else ""
        print(f"{scenario.id:16} {scenario.title}{variants}{server}")
    return 0


def _on_server(options: argparse.Namespace, store: Store, scenario: Scenario) -> dict[str, Any]:
    """What the runner needs for a server: how it is reached and restarted, and time for its alerts."""
    from probe.replay.remote import RemoteServer
    from probe.replay.restart import VARIABLE, RestartCommand
    from probe.targets import api_key_from, find_server

    name, url = find_server(store, options.target)
    known = store.targets.get(name)
    template = options.restart_command or os.environ.get(VARIABLE)
    restart = None
    if template:
        restart = RestartCommand(template, _always if options.yes else _asked, log_dir(options) / "restart.log")

    def subject(store: Store, name: str, _flags: list[str], **more: Any) -> RemoteServer:
        return RemoteServer(
            store,
            name,
            url,
            time_scale=more["time_scale"],
            scrape_interval_s=more["scrape_interval_s"],
            restart=restart,
            api_key=api_key_from(options.api_key_env),
            options=known.options if known is not None else None,
            progress=report,
        )

    return {"drill": subject, "alert_timeout_s": 1200.0 * scenario.time_scale}


def _always(_line: str) -> bool:
    """A yes given beforehand."""
    return True


def _asked(_line: str) -> bool:
    """A yes typed under the line; without a terminal nobody can be asked."""
    if not sys.stdin.isatty():
        report("nobody is there to confirm it: add --yes to run it")
        return False
    return input("run it? [y/N] ").strip().lower() in ("y", "yes")
