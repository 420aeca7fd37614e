"""The operator's own way to restart a server, run with the flags that a runbook advises.

Nothing is restarted unless a command was configured, and it is shown before it runs. `{flags}` in it stands for the
changed flags as words of a shell; the command also finds them in its environment: KVONCALL_FLAGS (the same words),
KVONCALL_FLAGS_JSON (`{"--max-num-seqs": 8, "--swap-space": null}`, null for one to leave out) and
KVONCALL_REMOVED_FLAGS (names of those).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.load.endpoint import EndpointError

PLACEHOLDER = "{flags}"
VARIABLE = "KVONCALL_RESTART_COMMAND"


def flag_words(changes: Mapping[str, Any]) -> list[str]:
    """The changed flags as words of a command line, in vLLM's spelling; removed ones are not among them."""
    words: list[str] = []
    for flag, value in changes.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]
    return words


@dataclass(frozen=True)
class RestartCommand:
    """A line for /bin/sh. `confirm` is asked with the line as it will run; what it prints goes to `log`."""

    template: str
    confirm: Callable[[str], bool]
    log: Path
    timeout_s: float = 600.0

    def line(self, changes: Mapping[str, Any]) -> str:
        """The command with the flags in it."""
        return self.template.replace(PLACEHOLDER, shlex.join(flag_words(changes)))

    def run(self, changes: Mapping[str, Any]) -> None:
        """Runs it and waits for its end; raises `EndpointError` when it fails or takes too long.

        Its output goes to a file, so that a server it leaves running in the background holds no pipe of ours.
        """
        environment = {
            **os.environ,
            "KVONCALL_FLAGS": shlex.join(flag_words(changes)),
            "KVONCALL_FLAGS_JSON": json.dumps(dict(changes)),
            "KVONCALL_REMOVED_FLAGS": " ".join(flag for flag, value in changes.items() if value is None),
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            try:
                done = subprocess.run(
                    ["/bin/sh", "-c", self.line(changes)],
                    env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=self.timeout_s,
                    check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise EndpointError(
                    f"the restart command did not end within {self.timeout_s:g} s; its output is in {self.log}. "
                    "It should return once the server is started in the background"
                ) from None
        if done.returncode:
            raise EndpointError(f"the restart command ended with code {done.returncode}; its output is in {self.log}")
