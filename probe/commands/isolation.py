"""`kvoncall isolation`: does a prefix cache keep tenants apart?"""

from __future__ import annotations

import argparse

from probe.commands.output import add_data_dir, print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
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
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """One round of the probe."""
    from probe.isolation import command

    outcome = command.run(options, report)
    if options.json:
        print_json(outcome.result.to_dict())
    else:
        print(command.text(outcome.result))
    return outcome.code
