"""The real programs that read what is exported."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[..., subprocess.CompletedProcess[str]]


def _program(name: str) -> Program:
    found = shutil.which(name)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{name} is missing")
        pytest.skip(f"{name} is not installed")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="session")
def promtool() -> Program:
    """`promtool(…)` runs it."""
    return _program("promtool")


@pytest.fixture(scope="session")
def amtool() -> Program:
    """`amtool(…)` runs it."""
    return _program("amtool")
