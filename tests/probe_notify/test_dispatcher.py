"""One notification per transition: over restarts, leader changes, mutes, failures and crashes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from probe.notify.dispatcher import BACKOFF_S, CLAIM_S, Dispatcher, receiver_states, send_test
from probe.notify.grouping import DIED, MAX_TRIES
from probe.notify.message import Message
from probe.notify.receivers import Receiver
from probe.notify.senders import Sent
from probe.store import Lease, Store, StoreError

from .conftest import RULES, START, Clock, Hook, move

HOUR = 3_600.0


def receive(store: Store, hook: Hook, **options: Any) -> None:
    store.receivers.save({"name": "hook", "kind": "webhook", "url": hook.url, **options})


def states(store: Store) -> list[tuple[str, str]]:
    return [(n.transition, n.state) for n in reversed(store.notifications.list())]


def test_a_ten_minute_breach_is_one_firing_and_one_resolved(data_dir: Path, hook: Hook) -> None:
    """Through two restarts and a change of the leader."""
    with Store.open(data_dir) as first, Store.open(data_dir) as second:
        receive(first, hook)
        move(first, "oom", "firing", START)
        now = START
        for store, until in ((first, 5), (first, 200), (second, 450), (first, 600)):
            clock = Clock(Dispatcher(store, RULES), now, step_s=20)
            clock.to(until)
            now = clock.now
        assert hook.messages == [("firing", [("firing", "oom")])]
        move(second, "oom", "resolved", START + 600)
        for store, until in ((second, 605), (first, 900), (second, 2 * HOUR)):
            clock = Clock(Dispatcher(store, RULES), now, step_s=300)
            clock.to(until)
            now = clock.now
        assert hook.messages[1:] == [("resolved", [("resolved", "oom")])]
        assert states(first) == [("firing", "sent"), ("resolved", "sent")]


def test_two_dispatchers_at_once_never_send_twice(data_dir: Path, hook: Hook) -> None:
    with Store.open(data_dir) as first, Store.open(data_dir) as second:
        receive(first, hook)
        for number in range(5):
            move(first, "oom", "firing", START, target=f"t{number}")

        async def both() -> None:
            dispatchers = [Dispatcher(first, RULES), Dispatcher(second, RULES)]
            for step in range(20):
                await asyncio.gather(*(d.tick(START + 10 + step) for d in dispatchers))
                await asyncio.gather(*(d.drain() for d in dispatchers))

        asyncio.run(both())
        assert sorted(post["groupLabels"]["target"] for _, post in hook.posts) == ["t0", "t1", "t2", "t3", "t4"]


def test_only_the_holder_of_the_lease_sends(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    assert store.leases.acquire("monitor", "another", 60.0)
    gone = Lease("monitor", "me", 1, START)

    async def tick() -> None:
        await clock.dispatcher.tick(START + 60, gone)
        await clock.dispatcher.drain()

    asyncio.run(tick())
    assert hook.posts == []
    assert states(store) == [("firing", "pending")]


def test_outbox_and_transition_are_one_transaction(store: Store, hook: Hook) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    assert states(store) == [("firing", "pending")]
    lost = Lease("monitor", "me", 1, START)
    alert = store.alerts.active()[0]
    with pytest.raises(StoreError):
        store.alerts.save([], lost)
    move(store, "oom", "resolved", START + 1)
    assert states(store) == [("firing", "pending"), ("resolved", "pending")]
    assert [t[2] for t in store.alerts.transitions(alert.id)] == ["pending", "firing", "resolved"]


def test_three_alerts_of_a_target_are_one_message(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    for rule in ("eviction-storm", "ttft-slo-burn", "itl-slo-burn"):
        move(store, rule, "firing", START)
    move(store, "oom", "firing", START, target="b")
    clock.to(9)
    assert hook.posts == []
    clock.to(60)
    groups = {post["groupLabels"]["target"]: len(post["alerts"]) for _, post in hook.posts}
    assert groups == {"a": 3, "b": 1}
    assert len(hook.posts) == 2


def test_a_later_alert_waits_for_the_group_and_names_what_still_fires(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    clock.to(20)
    move(store, "gpu-memory-creep", "firing", START + 20)
    clock.step_s = 20
    clock.to(300)
    assert len(hook.posts) == 1
    clock.to(320)
    assert hook.messages[1] == ("firing", [("firing", "gpu-memory-creep"), ("firing", "oom")])
    move(store, "oom", "resolved", START + 400)
    clock.step_s = 60
    clock.to(700)
    assert hook.messages[2] == ("firing", [("resolved", "oom"), ("firing", "gpu-memory-creep")])
    assert len(hook.posts) == 3


def test_grouping_can_be_set(store: Store, hook: Hook, clock: Clock) -> None:
    store.receivers.set_options(group_by=["severity"], group_wait_s=0, base_url="http://kv.example")
    receive(store, hook)
    for target in "abc":
        move(store, "oom", "firing", START, target=target, severity="critical")
    clock.to(5)
    ((_, post),) = hook.posts
    assert post["groupLabels"] == {"severity": "critical"}
    assert [a["labels"]["target"] for a in post["alerts"]] == ["a", "b", "c"]
    alert = store.alerts.active("a")[0]
    assert post["alerts"][0]["generatorURL"] == f"http://kv.example/alerts?alert={alert.id}"
    assert "runbook=oom" in post["alerts"][0]["annotations"]["runbook_url"]


def test_repeats_while_it_fires(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    clock.step_s = 600
    clock.to(3.9 * HOUR)
    assert len(hook.posts) == 1
    clock.to(9 * HOUR)
    assert [m[0] for m in hook.messages] == ["firing"] * 3
    assert states(store) == [("firing", "sent"), ("repeat-1", "sent"), ("repeat-2", "sent")]


def test_a_receiver_that_comes_later_is_told_what_fires(store: Store, hook: Hook, clock: Clock) -> None:
    move(store, "oom", "firing", START)
    move(store, "kv-saturated", "firing", START, target="b")
    move(store, "kv-saturated", "resolved", START + 5, target="b")
    clock.to(60)
    receive(store, hook)
    clock.to(90)
    assert hook.messages == [("firing", [("firing", "oom")])]


def test_a_receiver_takes_what_it_asks_for(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook, severities=["critical"], matchers=['target=~"prod-.*"'])
    move(store, "oom", "firing", START, target="prod-1", severity="critical")
    move(store, "oom", "firing", START, target="test-1", severity="critical")
    move(store, "kv-saturated", "firing", START, target="prod-1", severity="warning")
    clock.to(60)
    assert hook.messages == [("firing", [("firing", "oom")])]
    store.receivers.remove("hook")
    move(store, "oom", "resolved", START + 60, target="prod-1")
    clock.to(400)
    assert len(hook.posts) == 1
    assert states(store) == [("firing", "sent")]


def test_alerts_of_a_drill_are_sent_on_request_only(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    store.receivers.save({"name": "drills", "kind": "webhook", "url": hook.url, "drills": True})
    store.replays.create("oom", "a", {})
    assert move(store, "oom", "firing", START).replay_id is not None
    clock.to(60)
    assert [post["receiver"] for _, post in hook.posts] == ["drills"]
    assert "drill" in hook.posts[0][1]["alerts"][0]["annotations"]


@pytest.mark.parametrize("mute", ["silence", "acknowledgement", "inhibition"])
def test_a_muted_alert_is_held_and_told_when_the_mute_ends(store: Store, hook: Hook, clock: Clock, mute: str) -> None:
    receive(store, hook, matchers=['rule="eviction-storm"'])
    alert = move(store, "eviction-storm", "firing", START)
    if mute == "silence":
        silence = store.silences.add("target=a", ends_at=START + 1_000, author="ann", reason="upgrade", now=START)
    elif mute == "acknowledgement":
        store.alerts.acknowledge(alert.id, author="ann", reason="looking", now=START)
    else:
        move(store, "oom", "firing", START)
    clock.step_s = 50
    clock.to(500)
    clock.step_s = 5
    assert hook.posts == []
    if mute == "silence":
        store.silences.expire(silence.id, author="bob", now=START + 500)
    elif mute == "acknowledgement":
        store.alerts.unacknowledge(alert.id, author="ann", now=START + 500)
    else:
        move(store, "oom", "resolved", START + 500)
    clock.to(520)
    assert hook.messages == [("firing", [("firing", "eviction-storm")])]


def test_what_resolves_while_muted_is_never_told(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    store.silences.add("target=a", ends_at=START + 5_000, author="ann", reason="upgrade", now=START)
    move(store, "oom", "firing", START)
    clock.to(50)
    move(store, "oom", "resolved", START + 100)
    clock.step_s = 500
    clock.to(6_000)
    assert hook.posts == []
    assert states(store) == [("firing", "dropped"), ("resolved", "dropped")]


def test_a_mute_ends_repeats_but_not_the_resolution(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    alert = move(store, "oom", "firing", START)
    clock.to(20)
    store.alerts.acknowledge(alert.id, author="ann", reason="restarting it", kind="known", now=START + 20)
    clock.step_s = 1_200
    clock.to(9 * HOUR)
    assert len(hook.posts) == 1
    move(store, "oom", "resolved", START + 9 * HOUR)
    clock.to(9.1 * HOUR)
    assert [m[0] for m in hook.messages] == ["firing", "resolved"]


def test_a_refusal_that_may_pass_is_tried_again(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    hook.answers = [503, 429]
    move(store, "oom", "firing", START)
    clock.to(15)
    (row,) = store.notifications.list()
    assert (row.state, row.tries, row.error) == ("pending", 1, "It answered HTTP 503.")
    clock.to(120)
    (row,) = store.notifications.list()
    assert (row.state, row.tries, row.error, row.unconfirmed) == ("sent", 3, None, False)
    assert len(hook.posts) == 3


def test_five_tries_then_failed_and_visible(store: Store, hook: Hook, clock: Clock) -> None:
    receive(store, hook)
    hook.answers = [500] * MAX_TRIES
    move(store, "oom", "firing", START)
    clock.step_s = 40
    clock.to(20 + sum(BACKOFF_S) + 200)
    assert len(hook.posts) == MAX_TRIES
    (state,) = receiver_states(store)
    assert state.counts == {"failed": 1}
    assert state.last is not None
    assert (state.last.state, state.last.tries, state.last.error) == ("failed", 5, "It answered HTTP 500.")
    (event,) = store.events.recent(kinds=["notification_failed"])
    assert event.message == "Receiver hook was not told that oom is firing: It answered HTTP 500."
    move(store, "oom", "resolved", clock.now)
    clock.step_s = 300
    clock.to(2 * HOUR)
    assert len(hook.posts) == MAX_TRIES  # nobody knew of it, so nobody is told that it is over


@pytest.mark.parametrize("code", [400, 404, 302])
def test_a_refusal_for_good_is_not_tried_again(store: Store, hook: Hook, clock: Clock, code: int) -> None:
    receive(store, hook)
    hook.answers = [code]
    move(store, "oom", "firing", START)
    clock.step_s = 50
    clock.to(900)
    assert len(hook.posts) == 1
    assert states(store) == [("firing", "failed")]


def test_a_crash_between_sending_and_marking_sends_once_more(data_dir: Path, hook: Hook) -> None:
    """At least once: the successor cannot know. The resolution is sent because the firing may have arrived."""
    with Store.open(data_dir) as store:
        receive(store, hook)
        move(store, "oom", "firing", START)
        (row,) = store.notifications.list()
        assert store.notifications.claim([row.id], "dead", START + 10, CLAIM_S) == {row.id}
        clock = Clock(Dispatcher(store, RULES), START + 10)
        clock.to(10 + CLAIM_S - 1)
        assert hook.posts == []  # the claim holds
        clock.to(10 + CLAIM_S + 10)
        assert hook.messages == [("firing", [("firing", "oom")])]
        (row,) = store.notifications.list()
        assert (row.state, row.tries, row.unconfirmed) == ("sent", 2, True)


def test_a_message_that_kills_its_sender_is_given_up(store: Store, hook: Hook) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    (row,) = store.notifications.list()
    for number in range(MAX_TRIES):
        at = START + number * CLAIM_S
        assert store.notifications.claim([row.id], f"dead {number}", at, CLAIM_S) == {row.id}
    Clock(Dispatcher(store, RULES), START + MAX_TRIES * CLAIM_S).to(MAX_TRIES * CLAIM_S + 30)
    (row,) = store.notifications.list()
    assert (row.state, row.error, row.unconfirmed) == ("dropped", DIED, True)
    assert hook.posts == []


def test_a_crash_is_followed_by_the_resolution_alone_where_it_came_meanwhile(store: Store, hook: Hook) -> None:
    receive(store, hook)
    move(store, "oom", "firing", START)
    (row,) = store.notifications.list()
    store.notifications.claim([row.id], "dead", START + 10, CLAIM_S)
    move(store, "oom", "resolved", START + 30)
    Clock(Dispatcher(store, RULES), START + 30).to(400)
    assert hook.messages == [("resolved", [("resolved", "oom")])]
    assert states(store) == [("firing", "dropped"), ("resolved", "sent")]


def test_a_hanging_receiver_holds_up_neither_the_tick_nor_others(store: Store, hook: Hook) -> None:
    let_go = threading.Event()
    sent: list[str] = []

    def send(receiver: Receiver, message: Message) -> Sent:
        if receiver.name == "slow":
            assert let_go.wait(30)
        sent.append(receiver.name)
        return Sent()

    for name in ("slow", "fast"):
        store.receivers.save({"name": name, "kind": "webhook", "url": hook.url})
    move(store, "oom", "firing", START)

    async def run() -> None:
        dispatcher = Dispatcher(store, RULES, send=send)
        await dispatcher.tick(START + 10)
        while sent != ["fast"]:
            await asyncio.sleep(0.01)
        await dispatcher.tick(START + 20)
        let_go.set()
        await dispatcher.drain()
        await dispatcher.tick(START + 30)
        await dispatcher.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sent == ["fast", "slow"]


def test_a_clock_set_back_freezes_nothing(store: Store, hook: Hook) -> None:
    receive(store, hook)
    hook.answers = [503]
    move(store, "oom", "firing", START)
    Clock(Dispatcher(store, RULES)).to(15)
    move(store, "oom", "firing", START - 10 * HOUR, target="b")
    Clock(Dispatcher(store, RULES), START - 10 * HOUR).to(20 - 10 * HOUR)
    assert len(store.notifications.list(states=["sent"])) == 2


def test_send_test_says_what_happened(store: Store, hook: Hook) -> None:
    receive(store, hook)
    assert send_test(store, "hook").ok
    assert hook.messages == [("firing", [("firing", "kvoncall-test")])]
    hook.answers = [403]
    assert send_test(store, "hook").error == "It answered HTTP 403."
    with pytest.raises(StoreError, match="no receiver named 'nobody'"):
        send_test(store, "nobody")
    assert store.notifications.list() == []
