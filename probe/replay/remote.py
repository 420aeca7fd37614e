"""A real server as the subject of a replay: watched under a name of the replay's own, restarted only by its operator.

The server is scraped as a target beside whatever watches it already, so that the replay's shortened windows change
nothing for those. A restart counts only when the process behind the metrics page is another one afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from probe.collect.changes import START_TIME
from probe.collect.scrape import metrics_url
from probe.load.endpoint import Endpoint, EndpointError, describe
from probe.replay.restart import VARIABLE, RestartCommand, flag_words
from probe.store import Store
from probe.targets import TargetError, look_at

READY_POLL_S = 1.0


class RemoteServer:
    """One server that answers at `url`. `options`: how its metrics are reached (`probe.collect.access`)."""

    what = "server"
    opening = "looking at the server"

    def __init__(
        self,
        store: Store,
        name: str,
        url: str,
        *,
        time_scale: float,
        scrape_interval_s: float,
        restart: RestartCommand | None = None,
        api_key: str | None = None,
        options: dict[str, Any] | None = None,
        ready_timeout_s: float = 900.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._url = url.rstrip("/")
        self._time_scale = time_scale
        self._scrape_interval_s = scrape_interval_s
        self._restart = restart
        self.api_key = api_key
        self._options = options
        self._ready_timeout_s = ready_timeout_s
        self._progress = progress
        self._changes: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._registered = False
        self.name = name
        self.flags: list[str] = []

    @property
    def base_url(self) -> str:
        """Where the OpenAI API answers."""
        return self._url.removesuffix("/metrics").removesuffix("/prometheus")

    def start(self) -> Endpoint:
        """Looks at the server and has it watched; raises `EndpointError`."""
        endpoint = describe(self.base_url, api_key=self.api_key)
        try:
            look = look_at(self._url, self._options)
        except TargetError as error:
            raise EndpointError(str(error)) from None
        self._facts = look.facts
        self._store.targets.upsert(
            self.name,
            url=look.url,
            kind="drill",
            engine=look.detection.engine,
            facts=look.facts,
            scrape_interval_s=self._scrape_interval_s,
            time_scale=self._time_scale,
            options=self._options,
        )
        self._registered = True
        return endpoint

    def facts(self) -> dict[str, Any]:
        """What its metrics told when it was last looked at."""
        return dict(self._facts)

    def changed(self, changes: Mapping[str, Any]) -> list[str]:
        """The changed flags alone: the rest of the command line is the operator's."""
        self._changes = dict(changes)
        return flag_words(changes)

    def why_not_restarted(self, flags: list[str]) -> str | None:
        """A restart needs a change, a command of the operator's, and a yes to it."""
        if not self._changes:
            return "nothing is to be changed"
        if self._restart is None:
            return (
                f"no restart command is configured; restart it yourself with {' '.join(flags) or 'the change above'}, "
                f"or give --restart-command (or {VARIABLE})"
            )
        line = self._restart.line(self._changes)
        if self._progress is not None:
            self._progress(f"restart command: {line}")
        return None if self._restart.confirm(line) else "the restart command was not confirmed"

    def restart(self, flags: list[str]) -> Endpoint:
        """Runs the operator's command and waits for another process to serve; raises `EndpointError`."""
        assert self._restart is not None
        before = self._process_start()
        data = {"flags": flags, "unexpected": False}
        self._store.events.add(self.name, "engine_restart", "restarted by the operator's command", data=data)
        self._restart.run(self._changes)
        self._await_other_process(before)
        self.flags = list(flags)
        return self.start()

    def exits_since(self, _ts: float) -> list[dict[str, Any]]:
        """Nothing tells why a server of others ended; that it is gone shows in the load and in the scrapes."""
        return []

    def close(self) -> None:
        """Takes it out of the replay's watch; the server itself runs on."""
        if self._registered:
            self._store.targets.deactivate(self.name)

    def _await_other_process(self, before: float | None) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        problem = "it does not answer"
        while time.monotonic() < deadline:
            try:
                describe(self.base_url, api_key=self.api_key)
                now = self._process_start()
                if before is None or (now is not None and now > before):
                    return
                problem = "the same process as before serves"
            except EndpointError as error:
                problem = str(error)
            time.sleep(READY_POLL_S)
        raise EndpointError(f"the restart command ran, but after {self._ready_timeout_s:g} s: {problem}")

    def _process_start(self) -> float | None:
        """When the serving process began (Unix seconds), by its own metrics; None where it does not say."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = httpx.get(metrics_url(self._url), headers=headers, timeout=5.0, trust_env=False)
            answer.raise_for_status()
            families = list(text_string_to_metric_families(answer.text))
        except (httpx.HTTPError, ValueError):
            return None
        started = (f for f in families if f.name == START_TIME and f.samples)
        return next((family.samples[0].value for family in started), None)
