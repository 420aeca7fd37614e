"""What a replay works on: a drill engine of its own, or a real server that its operator named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from probe.load.endpoint import Endpoint


class Subject(Protocol):
    """A server that is watched under `name` while the replay runs. `what`: how the journal calls it,
    `opening`: what `start` does to it.

    flags: its command line as far as the replay knows it.
    """

    name: str
    what: str
    opening: str
    flags: list[str]
    api_key: str | None

    @property
    def base_url(self) -> str:
        """Where it listens."""

    def start(self) -> Endpoint:
        """Has it running and watched; raises `EngineStartError` or `EndpointError`."""

    def facts(self) -> dict[str, Any]:
        """What it tells of itself: flags in force, memory, version."""

    def changed(self, changes: Mapping[str, Any]) -> list[str]:
        """The command line with these flags changed; None takes one back to its default."""

    def why_not_restarted(self, flags: list[str]) -> str | None:
        """Why the replay may not restart it with these flags; None where it may."""

    def restart(self, flags: list[str]) -> object:
        """Restarts it with these flags; raises `EngineStartError` or `EndpointError`."""

    def exits_since(self, ts: float, /) -> list[dict[str, Any]]:
        """Unasked exits from `ts` on, oldest first."""

    def close(self) -> None:
        """Takes it out of the watch, and ends what the replay started."""


@runtime_checkable
class Stoppable(Protocol):
    """A subject whose process the replay can stop where it stands."""

    def freeze(self) -> None:
        """Its port takes connections and answers nothing."""
