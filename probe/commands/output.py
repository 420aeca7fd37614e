"""What commands share: where the database lives, progress lines, JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probe.store import Store


class UsageError(Exception):
    """The command line does not make sense; the message is one sentence."""


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """`--data-dir`."""
    parser.add_argument(
        "--data-dir", type=_location, metavar="DIR|URL", help="where the database lives: a folder or a database's URL"
    )


def _location(text: str) -> Path | str:
    return text if "://" in text else Path(text)


def open_store(options: argparse.Namespace) -> Store:
    """The store the command line names; raises `StoreError`."""
    from probe.store import Store, default_data_dir

    return Store.open(options.data_dir or default_data_dir())


def log_dir(options: argparse.Namespace) -> Path:
    """Where engine logs go: beside the store, or in the temporary folder when the store is a server."""
    from probe.store import default_data_dir

    where = options.data_dir or default_data_dir()
    return (where if isinstance(where, Path) else Path(tempfile.gettempdir()) / "kvoncall") / "logs"


def report(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2))
