"""Where files of the user's own lie, beside those in the package."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import platformdirs


def own_folder(variable: str, name: str) -> Path:
    """The folder an environment variable names, else `name` in the data folder."""
    if configured := os.environ.get(variable):
        return Path(configured)
    data = os.environ.get("KVONCALL_DATA", "")
    if not data or "://" in data:  # the store is a server: there is no data folder but the usual one
        data = _usual_data_folder()
    return Path(data) / name


@functools.cache
def _usual_data_folder() -> str:
    return platformdirs.user_data_dir("kvoncall", appauthor=False)
