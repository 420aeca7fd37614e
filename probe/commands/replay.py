"""`kvoncall replay`: an incident on a drill engine of its own."""

from __future__ import annotations

import argparse

from probe.commands.output import add_data_dir, open_store, print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("id", nargs="?", help="the incident (see --list)")
    parser.add_argument("--list", action="store_true", help="name the incidents")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--variant", metavar="NAME", help="another form of the incident, where it has some")
    parser.add_argument("--no-remedy", action="store_true", help="leave the remedy out: the check must then fail")
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """Runs one incident, or lists them."""
    from probe.replay.scenario import VARIANTS, ReplayError, get_scenario, list_scenarios

    if options.list:
        scenarios = list_scenarios()
        if options.json:
            print_json([{"id": s.id, "title": s.title, "variants": list(VARIANTS.get(s.id, ()))} for s in scenarios])
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

    with open_store(options) as store:
        runner = ReplayRunner(
            store,
            scenario,
            interactive=False,
            remedy=not options.no_remedy,
            progress=report,
        )
        result = runner.run()
    if options.json:
        print_json(result)
    else:
        print(summary(result))
    return 0 if result["verified"] else 1
