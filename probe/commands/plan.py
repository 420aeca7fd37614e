"""`kvoncall plan`: where the memory of a server goes, what fits, and what would change it."""

from __future__ import annotations

import argparse
import json

from probe.commands.output import add_data_dir, print_json
from probe.plan import options as flags


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    flags.add_options(parser)
    add_data_dir(parser)


def run(options: argparse.Namespace) -> int:
    """Plans, checks anchors, or lists presets; 0 fits, 1 does not fit, does not run so, or a check missed."""
    from engine.memory.hf_config import read_config
    from probe.plan import command

    if options.check:
        return _check(options)
    if options.list_models or options.list_gpus:
        if options.json:
            print_json(command.model_list() if options.list_models else command.gpu_list())
        else:
            print(command.model_list_text() if options.list_models else command.gpu_list_text())
        return 0
    if options.model_config == "-":  # read once, whatever is compared
        options.model_config = json.dumps(read_config("-")[0])
    made = command.planned(options)
    if options.json:
        print_json(command.as_data(options, made))
    else:
        print(command.as_text(options, made))
    return command.FITS if made.plan.fits and not command.against(made) else command.DOES_NOT_FIT


def _check(options: argparse.Namespace) -> int:
    from probe.plan import check

    rows = check.check(options.check)
    print_json(check.to_json(rows)) if options.json else print(check.text(rows))
    return 0 if all(row.passed for row in rows) else 1
