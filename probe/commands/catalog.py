"""`kvoncall catalog`: versions the flag catalog knows, and another one read from a release."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from probe.commands.output import UsageError, print_json, report


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("action", choices=("add", "list"))
    parser.add_argument("release", nargs="?", type=Path, metavar="WHEEL|SDIST|FOLDER")
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="where the release holds both, or neither by name")
    parser.add_argument("--version", help="where the release does not say it")
    parser.add_argument("--write", action="store_true", help="put the version into the user's catalog")
    parser.add_argument(
        "--catalog-dir", type=Path, metavar="DIR", help="the user's catalog; default: in the data folder"
    )
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Adds a release, or lists what is known."""
    if options.catalog_dir is not None:  # everything that reads the catalog in this process looks there
        os.environ["KVONCALL_CATALOG"] = str(options.catalog_dir)
    if options.action == "list":
        return _list(options)
    if options.release is None:
        raise UsageError("`kvoncall catalog add` needs a release: a wheel, an sdist, or an unpacked tree")
    return _add(options)


def _list(options: argparse.Namespace) -> int:
    from runbooks.catalog_data import engines, load, overlay_dir

    catalogs = {engine: data for engine in engines() if (data := load(engine)) is not None}
    if options.json:
        found = {engine: {"versions": list(d.versions), "read": d.read} for engine, d in catalogs.items()}
        print_json({"folder": str(overlay_dir()), "engines": found})
        return 0
    for engine, data in catalogs.items():
        span = " to ".join(dict.fromkeys((data.versions[0], data.versions[-1])))
        print(f"{engine}: {len(data.flags)} flags, {len(data.versions)} versions, {span}\n    read: {data.read}")
    print(f"own additions: {overlay_dir()}")
    return 0


def _add(options: argparse.Namespace) -> int:
    from probe.catalog.add import read_release, write
    from probe.catalog.text import changes

    report(f"reading {options.release}; nothing of it is run")
    added = read_release(options.release, engine=options.engine, version=options.version)
    written = write(added, options.catalog_dir) if options.write else None
    if options.json:
        print_json(added.to_dict() | {"written": None if written is None else str(written)})
        return 0
    print(f"{added.engine} {added.version}: {len(added.flags)} flags, {len(added.metrics)} metrics")
    if added.base is None:
        print("no version of it was known before")
    else:
        what = "the catalog has this version; against what it says" if added.known else f"against {added.base}"
        print(f"{what}:\n{changes(added.changes)}")
    print(f"written to {written}" if written else "not written; --write puts it into the catalog")
    return 0
