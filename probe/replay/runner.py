"""Carries a replay out: hypothesis, inject, observe, recommend, apply, verify.

Every step is written to the store's journal before it acts and after, each entry committed at once, so that a crash
in the middle leaves exactly how far it came. The verdict rests on what the second run measured and on the monitor's
own evaluation of the rule; nothing is assumed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.supervisor import EngineStartError
from probe.load.endpoint import EndpointError
from probe.monitor import Monitor
from probe.quality.suite import QualityError
from probe.replay import report
from probe.replay.drill import DrillEngine
from probe.replay.exercise import Bench, Exercise
from probe.replay.observation import Check, Observation
from probe.replay.scenario import ReplayError, Scenario
from probe.replay.subject import Subject
from probe.store import Alert, Replay, Store, default_data_dir
from runbooks.changes import Recommendation
from runbooks.load import get_runbook
from runbooks.recommend import from_facts, recommend

SCRAPED_WITHIN_S = 15.0
APPLY_POLL_S = 0.25
ALERT_POLL_S = 0.1


def close_interrupted(store: Store) -> list[Replay]:
    """Marks replays whose process is gone as interrupted and takes their engines out of the watch."""
    found = store.replays.mark_interrupted()
    for replay in found:
        store.replays.append(replay.id, replay.step or "hypothesis", "interrupted: the process that ran it is gone")
        if store.targets.get(replay.target) is not None:  # it may have ended before its engine was registered
            store.targets.deactivate(replay.target)
    return found


class ReplayRunner:
    """One replay. `replay_id` is known from the start; `run` does the rest and returns the report."""

    def __init__(
        self,
        store: Store,
        scenario: Scenario,
        *,
        interactive: bool,
        remedy: bool = True,
        progress: Callable[[str], None] | None = None,
        log_dir: Path | None = None,
        apply_timeout_s: float = 1800.0,
        alert_timeout_s: float = 15.0,
        drill: Callable[..., Subject] = DrillEngine,
        monitor: Callable[[Store], Monitor] = Monitor,
    ) -> None:
        """`interactive` waits for `store.replays.request_apply` before the change, at most `apply_timeout_s`.

        `remedy` False leaves the change out, so the same load meets the same flags. `alert_timeout_s` is how long
        after a load the alert may take to fire or to resolve.
        """
        self._store = store
        self._scenario = scenario
        self._interactive = interactive
        self._remedy = remedy
        self._progress = progress
        self._apply_timeout_s = apply_timeout_s
        self._alert_timeout_s = alert_timeout_s
        self._make_monitor = monitor
        close_interrupted(store)
        options = {"remedy": remedy, "interactive": interactive, "time_scale": scenario.time_scale}
        self.replay_id = store.replays.create(scenario.id, "", options).id
        self._target = f"drill-{self.replay_id[:8]}"
        store.replays.set_target(self.replay_id, self._target)
        self._step = "hypothesis"
        self._log_dir = log_dir or default_data_dir() / "logs"
        self._result: dict[str, Any] = report.blank(scenario, self._target, self.replay_id, remedy)
        self._drill = drill(
            store,
            self._target,
            scenario.flags(),
            log_dir=self._log_dir,
            time_scale=scenario.time_scale,
            scrape_interval_s=scenario.scrape_interval_s,
            threads=scenario.threads,
        )

    def run(self) -> dict[str, Any]:
        """The report (see `probe.replay.report`); raises `ReplayError` when the replay could not be carried out."""
        started = time.monotonic()
        status = "failed"
        try:
            with self._watched():
                self._run_steps()
            status = "done"
        except (EngineStartError, EndpointError, QualityError, ConfigError) as error:
            self._result["error"] = f"{self._step}: {error}"
            self._note(f"could not be carried out: {error}")
            raise ReplayError(f"replay {self._scenario.id} stopped at step {self._step}: {error}") from error
        except KeyboardInterrupt:
            status = "interrupted"
            self._note("interrupted by the operator")
            raise
        except BaseException as error:
            self._result["error"] = f"{self._step}: {type(error).__name__}: {error}"
            raise
        finally:
            self._result["duration_s"] = round(time.monotonic() - started, 1)
            self._store.replays.finish(self.replay_id, status, self._result)
        return self._result

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A monitor beside the replay, standing by when another process leads; the engine never outlives the replay."""
        monitor = self._make_monitor(self._store)
        monitor.start()
        try:
            yield
            self._result["alerts"] = report.alerts(self._store, self._target, self._scenario.rule)
        finally:
            try:
                self._drill.close()
            finally:
                monitor.stop()

    def _run_steps(self) -> None:
        scenario = self._scenario
        self._enter("hypothesis", scenario.hypothesis, {"article_case": dict(scenario.article_case)})
        bench, exercise, before = self._inject()
        self._observe(bench, before)
        advice = self._recommend(bench, exercise)
        flags = self._apply(bench, exercise, advice)
        self._verify(bench, exercise, flags)
        self._enter(
            "done", "verified" if self._result["verified"] else "not verified", {"checks": self._result["checks"]}
        )

    # Steps

    def _inject(self) -> tuple[Bench, Exercise, Observation]:
        self._enter("inject", self._drill.opening, {"flags": self._drill.flags})
        endpoint = self._drill.start()
        bench = Bench(
            self._store, self._drill, endpoint, self._scenario.scrape_interval_s, self._log_dir, self._note,
            self._drill.facts(),
        )  # fmt: skip
        self._await_first_scrape()
        self._note(f"{self._drill.what} runs and is scraped", {"memory_plan": bench.facts.get("memory_plan")})
        exercise = self._scenario.exercise(bench)
        self._result["load"] = exercise.description
        try:
            return bench, exercise, exercise.incident()
        finally:
            self._result.update(exercise.result())

    def _observe(self, bench: Bench, before: Observation) -> None:
        self._enter("observe", f"waiting for alert {self._scenario.rule}")
        alert = self._await_alert(lambda a: a.firing_at is not None, since=before.started_at)
        before = report.with_alert(before, alert)
        checks = self._scenario.reproduced(before)
        self._before = before
        self._result["before"] = report.phase(before, bench.facts)
        self._result["windows"]["before"] = [before.started_at, before.ended_at]
        self._result["engine_exit"] = before.engine_exit
        self._result["reproduced"] = all(c.ok for c in checks)
        self._keep_checks("reproduced", checks)
        self._note(report.sentence(checks, "reproduced"), {"observation": before.to_dict()})

    def _recommend(self, bench: Bench, exercise: Exercise) -> Recommendation:
        runbook = get_runbook(self._scenario.runbook)
        self._enter("recommend", f"runbook {runbook.id}: {runbook.title}")
        known = exercise.facts()
        self._result.update(exercise.result())
        advice = recommend(runbook.id, from_facts({**bench.facts, **known}))
        self._result["runbook"] = runbook.id
        self._result["recommendation"] = advice.summary
        self._result["refused"] = [r.to_dict() for r in advice.refused]
        self._result["changes"] = [c.to_dict() for c in advice.changes]
        self._result["steps"] = list(advice.steps)
        self._note(advice.summary, {**advice.to_dict(), "known": known})
        return advice

    def _apply(self, bench: Bench, exercise: Exercise, advice: Recommendation) -> list[str]:
        """The flags of the second run: changed, or the same when the remedy is left out."""
        flags = list(self._drill.flags)
        if self._interactive and self._remedy and advice.changes and not self._await_apply():
            self._result["applied"] = False
            return flags
        how = f"restarting the {self._drill.what}" if self._remedy else "the remedy is left out: same flags again"
        self._enter("apply", how)
        repair = exercise.repair() if self._remedy else None
        if repair is not None:
            self._result["repair"] = repair.sentence
            self._note(repair.sentence)
        if self._remedy:
            flags = self._drill.changed({**(repair.flags if repair else {}), **advice.flag_values()})
        if (reason := self._drill.why_not_restarted(flags)) is not None:
            self._result["applied"] = False
            self._note(f"not restarted: {reason}")
            return flags
        self._note("restart", {"flags": flags})
        bench.restart(flags)
        self._result["applied"] = self._remedy and bool(advice.changes or repair)
        self._note(f"{self._drill.what} runs", {"memory_plan": bench.facts.get("memory_plan"), "flags": flags})
        return flags

    def _await_apply(self) -> bool:
        self._enter("apply", "waiting for the change to be applied")
        self._store.replays.set_status(self.replay_id, "waiting_apply")
        deadline = time.monotonic() + self._apply_timeout_s
        while not self._store.replays.apply_requested(self.replay_id):
            if time.monotonic() > deadline:
                self._store.replays.set_status(self.replay_id, "running")
                self._note(f"nobody applied the change within {self._apply_timeout_s:g} s")
                return False
            time.sleep(APPLY_POLL_S)
        self._store.replays.set_status(self.replay_id, "running")
        return True

    def _verify(self, bench: Bench, exercise: Exercise, flags: list[str]) -> None:
        self._enter("verify", "the same again", {"flags": flags})
        if self._remedy and self._result["applied"] is False and self._result["changes"]:
            self._note("not verified: the change was never applied")
            return
        after = exercise.again()
        self._result.update(exercise.result())
        checks = self._scenario.verified(after)
        # What the load already disproved does not get better by waiting for the alert.
        if all(c.ok for c in checks if "alert" not in c.name):
            self._await_alert(lambda a: a.state == "resolved", since=self._before.started_at)
        after = self._with_outcome(after)
        checks = self._scenario.verified(after)
        self._result["after"] = report.phase(after, bench.facts)
        self._result["windows"]["after"] = [after.started_at, after.ended_at]
        self._keep_checks("verified", checks)
        self._result["verified"] = self._remedy and self._result["reproduced"] and all(c.ok for c in checks)
        self._note(report.sentence(checks, "verified"), {"observation": after.to_dict()})

    # What steps are made of

    def _await_first_scrape(self) -> None:
        deadline = time.monotonic() + SCRAPED_WITHIN_S
        while time.monotonic() < deadline:
            up = self._store.samples.latest(self._target).get("up", [])
            if any(sample.value == 1 for sample in up):
                return
            time.sleep(ALERT_POLL_S)
        raise EndpointError(f"nobody scraped {self._target} within {SCRAPED_WITHIN_S:g} s; is another monitor stuck?")

    def _alerts(self, since: float) -> list[Alert]:
        history = self._store.alerts.history(target=self._target)
        return [a for a in history if a.rule == self._scenario.rule and a.pending_at >= since and a.firing_at]

    def _await_alert(self, wanted: Callable[[Alert], bool], *, since: float) -> Alert | None:
        """The scenario's alert once it is as wanted, or None when it is not within the timeout."""
        deadline = time.monotonic() + self._alert_timeout_s
        while True:
            found = next((a for a in self._alerts(since) if wanted(a)), None)
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(ALERT_POLL_S)

    def _with_outcome(self, after: Observation) -> Observation:
        """The incident's alert as it is now, and whether any further one fired since the second load began."""
        alerts = self._alerts(self._before.started_at)
        refired = any(a.firing_at is not None and a.firing_at >= after.started_at for a in alerts)
        first = min(alerts, key=lambda a: a.pending_at, default=None)
        return report.with_alert(after, first, refired=refired)

    # Journal

    def _enter(self, step: str, message: str, data: dict[str, Any] | None = None) -> None:
        self._step = step
        self._store.replays.set_step(self.replay_id, step)
        self._note(message, data)

    def _note(self, message: str, data: dict[str, Any] | None = None) -> None:
        self._store.replays.append(self.replay_id, self._step, message, data)
        if self._progress is not None:
            self._progress(f"{self._step}: {message}")

    def _keep_checks(self, phase: str, checks: list[Check]) -> None:
        self._result["checks"][phase] = [c.to_dict() for c in checks]
