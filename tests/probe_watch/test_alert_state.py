"""The state machine, observation by observation, and what of it reaches the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from probe.alerts.evaluator import TargetEvaluator, resolved_by_hand
from probe.alerts.rules import DEFAULT_RULES, EVICTION_STORM, KV_SATURATED
from probe.alerts.state import Progress, step
from probe.store import Alert, LeaseLostError, Sample, Store, Target

T0 = 1_800_000_000.0
RULE = dataclasses.replace(EVICTION_STORM, hold_s=20.0, keep_firing_s=10.0)
WORDS = {"b": "breach", "o": "ok", "f": "below_floor", "n": "no_data"}


def run(verdicts: str, every: float = 5.0, rule: object = RULE, gap: float = 20.0) -> list[str]:
    """States after each observation; "resolved" where an alert ended."""
    progress, states = Progress(), []
    for index, letter in enumerate(verdicts):
        progress, changes = step(rule, progress, WORDS[letter], T0 + every * index, gap)  # type: ignore[arg-type]
        states.append(changes[-1][1] if changes and changes[-1][1] == "resolved" else progress.state)
    return states


@pytest.mark.parametrize(
    ("verdicts", "states"),
    [
        ("oo", "ii"),
        ("bbbbb", "ppppf"),  # held for 20 s
        ("bbbob", "pppip"),  # cleared in time: nothing fired, the hold time starts over
        ("bbbfb", "pppip"),
        ("bbbbbooo", "ppppfffr"),  # clear for 10 s
        ("bbbbboboo", "ppppfffff"),  # a breach in between starts that over
        ("bbbbbobooo", "ppppfffffr"),
        ("bbbnnnbbbbb", "pppiiippppf"),  # pending is what is seen to hold: without data it ends and starts over
        ("bbbbbnnnn", "ppppfffff"),
        ("bbbbbonno", "ppppfffff"),
        ("nnn", "iii"),
        ("nnb", "iip"),
        ("bbn", "ppi"),
        ("bbbbbofoo", "ppppfffri"),  # too little traffic is clear, too
        ("bbbbbooob", "ppppfffrp"),  # a new alert
    ],
)
def test_life_of_an_alert(verdicts: str, states: str) -> None:
    names = {"i": "inactive", "p": "pending", "f": "firing", "r": "resolved"}
    assert run(verdicts) == [names[s] for s in states]


def test_no_hold_fires_at_once() -> None:
    rule = dataclasses.replace(RULE, hold_s=0.0, keep_firing_s=0.0)
    assert run("bo", rule=rule) == ["firing", "resolved"]
    _, changes = step(rule, Progress(), "breach", T0, 20.0)
    assert changes == (("inactive", "pending"), ("pending", "firing"))


def test_a_long_silence_counts_as_one_gap() -> None:
    """Observations far apart do not prove that the condition held in between."""
    assert run("bbb", every=1_000.0, gap=8.0) == ["pending"] * 3
    assert run("bbbb", every=1_000.0, gap=8.0)[-1] == "firing"


DRILL = Target(1, "t", "http://h", "drill", "kvoncall", [], {}, 1.0, 0.1, True, T0)


def samples(at: float, preempted: float, finished: float, *, usage: float = 0.99, waiting: float = 8.0) -> list[Sample]:
    labels = {"engine": "0", "model_name": "m"}
    values = {
        "preemptions_total": preempted,
        "requests_finished_total": finished,
        "requests_running": 4.0,
        "requests_waiting": waiting,
        "kv_usage_ratio": usage,
    }
    return [*(Sample("t", n, labels, at, v) for n, v in values.items()), Sample("t", "up", {}, at, 1.0)]


def evaluate_for(evaluator: TargetEvaluator, start: float, seconds: int, preempts: float, store: Store) -> float:
    """One scrape and one evaluation a second, saved each time; returns the time after the last."""
    for i in range(seconds):
        now = start + i
        evaluator.add_samples(samples(now, preempts * (now - T0), 10 * (now - T0)))
        store.alerts.save(evaluator.evaluate(now))
    return start + seconds


def states(store: Store) -> dict[str, str]:
    return {r.rule: r.state for r in store.alerts.readings("t")}


def only(alerts: Iterable[Alert], rule: str) -> Alert:
    (found,) = [alert for alert in alerts if alert.rule == rule]
    return found


@pytest.fixture
def watched(store: Store) -> Store:
    store.targets.upsert("t", url="http://h", kind="drill", engine="kvoncall", scrape_interval_s=1.0, time_scale=0.1)
    return store


def test_storm_from_pending_to_resolved_in_the_store(watched: Store) -> None:
    store, evaluator = watched, TargetEvaluator(DRILL, DEFAULT_RULES)
    replay = store.replays.create("eviction-storm", "t", {})
    now = evaluate_for(evaluator, T0, 4, 2.0, store)
    assert states(store)["eviction-storm"] == "pending"
    alert = only(store.alerts.active("t"), "eviction-storm")
    assert (alert.state, alert.firing_at, alert.replay_id) == ("pending", None, replay.id)
    now = evaluate_for(evaluator, now, 6, 2.0, store)
    alert = only(store.alerts.active(), "eviction-storm")
    assert (alert.state, alert.runbook, alert.threshold, alert.window_s) == ("firing", "eviction-storm", 0.05, 30.0)
    assert alert.numerator == 2.0 * 9
    assert alert.denominator == 10.0 * 9 + 4
    assert alert.value == alert.numerator / alert.denominator
    # The storm ends: the window drains, then the alert stays for its keep-firing time and resolves.
    base = 2.0 * (now - 1 - T0)
    for i in range(60):
        evaluator.add_samples(samples(now + i, base, 10 * (now + i - T0), usage=0.3, waiting=0.0))
        store.alerts.save(evaluator.evaluate(now + i))
    assert store.alerts.active() == []
    (done,) = store.alerts.history()
    assert (done.id, done.state) == (alert.id, "resolved")
    assert done.value is not None
    assert done.value > 0.05  # what it fired for, not what it ended with
    changes = store.alerts.transitions(done.id)
    assert [(a, b) for _, a, b, _ in changes] == [
        ("inactive", "pending"),
        ("pending", "firing"),
        ("firing", "resolved"),
    ]
    assert changes[2][3] is not None
    assert changes[2][3] <= 0.05
    assert [t for t, *_ in changes] == [done.pending_at, done.firing_at, done.resolved_at]


@pytest.mark.parametrize(("preempts", "firing"), [(2.0, {"eviction-storm", "kv-saturated"}), (0.0, {"kv-saturated"})])
def test_one_alert_does_not_hide_another(watched: Store, preempts: float, firing: set[str]) -> None:
    """KV usage is 99% with a queue all the time. A storm explains that, but who is told is not decided here."""
    evaluate_for(TargetEvaluator(DRILL, DEFAULT_RULES), T0, 40, preempts, watched)
    assert states(watched) == {rule.id: "firing" if rule.id in firing else "inactive" for rule in DEFAULT_RULES}
    reading = next(r for r in watched.alerts.readings("t") if r.rule == "kv-saturated")
    assert reading.verdict == "breach"


def test_a_pending_alert_that_clears_leaves_nothing(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, [KV_SATURATED])
    evaluate_for(evaluator, T0, 4, 0.0, watched)
    (pending,) = watched.alerts.active()
    for i in range(4, 20):
        evaluator.add_samples(samples(T0 + i, 0, 10 * i, usage=0.1, waiting=0.0))
        watched.alerts.save(evaluator.evaluate(T0 + i))
    assert states(watched) == {"kv-saturated": "inactive"}
    assert watched.alerts.active() == []
    assert watched.alerts.history() == []
    assert watched.alerts.get(pending.id) is None
    assert watched.alerts.transitions(pending.id) == []
    # Its id is not given to another alert.
    evaluate_for(TargetEvaluator(DRILL, [KV_SATURATED]), T0 + 20, 4, 0.0, watched)
    assert watched.alerts.active()[0].id > pending.id


@pytest.mark.parametrize("seconds", [6, 10])
def test_states_survive_a_restart(watched: Store, seconds: int) -> None:
    """A new evaluator goes on where the old one was: pending keeps the time seen, firing stays one alert."""
    now = evaluate_for(TargetEvaluator(DRILL, DEFAULT_RULES), T0, seconds, 4.0, watched)
    before = only(watched.alerts.active(), "eviction-storm")
    reborn = TargetEvaluator(DRILL, DEFAULT_RULES)
    reborn.restore(watched.alerts.active(), [])
    for i in range(seconds):  # found in the store
        reborn.add_samples(samples(T0 + i, 4.0 * i, 10 * i))
    evaluate_for(reborn, now + 10, 4, 4.0, watched)
    after = only(watched.alerts.active(), "eviction-storm")
    assert after.id == before.id
    assert after.pending_at == before.pending_at
    if before.state == "pending":
        # 10 s passed unseen: they do not count as hold time.
        assert before.progress_s == 4.0
        assert (after.state, after.progress_s) == ("firing", 0.0)
        assert after.firing_at is not None
        assert after.firing_at > now + 10
    assert only(watched.alerts.history(), "eviction-storm").id == before.id


def test_a_pending_alert_without_data_leaves_nothing(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, [EVICTION_STORM])
    now = evaluate_for(evaluator, T0, 4, 2.0, watched)
    assert states(watched) == {"eviction-storm": "pending"}
    watched.alerts.save(evaluator.evaluate(now + 10))
    (reading,) = watched.alerts.readings("t")
    assert (reading.verdict, reading.state) == ("no_data", "inactive")
    assert watched.alerts.active() == []
    assert watched.alerts.history() == []


def test_stale_data_freezes_the_alert_and_says_so(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, [EVICTION_STORM])
    now = evaluate_for(evaluator, T0, 10, 2.0, watched)
    watched.alerts.save(evaluator.evaluate(now))
    (firing,) = watched.alerts.active()
    for i in range(4, 125, 4):
        watched.alerts.save(evaluator.evaluate(now + i))
    (frozen,) = watched.alerts.active()
    assert (frozen.state, frozen.value, frozen.summary) == ("firing", firing.value, firing.summary)
    assert frozen.coverage == "no data for 125 s: preemptions_total"
    assert watched.alerts.readings("t")[0].verdict == "no_data"


def test_an_evaluation_that_could_not_be_written_is_reported_again(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, [dataclasses.replace(KV_SATURATED, hold_s=0.0)])
    evaluator.add_samples(samples(T0, 0, 0))
    first = evaluator.evaluate(T0)
    assert first[0].transitions
    evaluator.revert()
    second = evaluator.evaluate(T0 + 1)
    assert second[0].transitions == first[0].transitions


def test_an_engine_back_before_anybody_looked_still_makes_one_alert(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, DEFAULT_RULES)
    for i in range(20):
        evaluator.add_samples(samples(T0 + i, 0, 10 * i, usage=0.1, waiting=0.0))
    died = watched.events.add("t", "engine_exit", "died", data={"reason": "oom"}, ts=T0 + 5)
    assert evaluator.add_events([died])
    assert not evaluator.add_events([died])
    watched.alerts.save(evaluator.evaluate(T0 + 19.5))
    assert states(watched)["oom"] == "firing"
    watched.alerts.save(evaluator.evaluate(T0 + 19.6))
    assert [a.state for a in watched.alerts.history()] == ["resolved"]
    # One that a successor finds in the store, over and done with, is history.
    successor = TargetEvaluator(DRILL, DEFAULT_RULES)
    successor.restore([], [died])
    for i in range(20):
        successor.add_samples(samples(T0 + i, 0, 10 * i, usage=0.1, waiting=0.0))
    watched.alerts.save(successor.evaluate(T0 + 19.7))
    assert len(watched.alerts.history()) == 1


def test_writes_need_the_lease(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, [KV_SATURATED])
    evaluator.add_samples(samples(T0, 0, 0))
    mine = watched.leases.acquire("monitor", "a", 60)
    assert mine is not None
    watched.alerts.save(evaluator.evaluate(T0), mine)
    watched.leases.release(mine)
    theirs = watched.leases.acquire("monitor", "b", 60)
    evaluator.add_samples(samples(T0 + 1, 0, 0, usage=0.0))
    with pytest.raises(LeaseLostError):
        watched.alerts.save(evaluator.evaluate(T0 + 1), mine)
    assert watched.alerts.readings()[0].updated_at == T0
    watched.alerts.save(evaluator.evaluate(T0 + 1), theirs)
    assert watched.alerts.readings()[0].updated_at == T0 + 1


def test_alerts_of_a_target_nobody_watches_end(watched: Store) -> None:
    evaluator = TargetEvaluator(DRILL, DEFAULT_RULES)
    evaluate_for(evaluator, T0, 10, 2.0, watched)
    assert {(a.rule, a.state) for a in watched.alerts.active()} == {
        ("eviction-storm", "firing"),
        ("kv-saturated", "pending"),
    }
    watched.targets.deactivate("t")
    ended = [resolved_by_hand(a, "the target is no longer watched", T0 + 11) for a in watched.alerts.active()]
    watched.alerts.save(ended)
    assert watched.alerts.active() == []
    (done,) = watched.alerts.history()
    assert (done.state, done.coverage) == ("resolved", "the target is no longer watched")
    assert watched.alerts.readings() == []
