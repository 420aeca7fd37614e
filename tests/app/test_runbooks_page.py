"""The runbooks page: the list, a page opened from an alert, applying a change to a drill and to the embedded engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from probe.store import Sample, Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]

CHANGE = {
    "flag": "--max-num-seqs", "from": 48, "to": 6, "why": "3184 tokens / 500 a request = 6",
    "expected": "no preemption",
    "cost": "queueing", "restart": True, "verify": "rate(vllm:num_preemptions_total[1m]) == 0",
    "rollback": "restart with --max-num-seqs 48",
}  # fmt: skip


def waiting_replay(store: Store) -> str:
    """A drill that stands before its change."""
    replay = store.replays.create("eviction-storm", "embedded")
    data = {"summary": "lower the admission", "changes": [CHANGE], "refused": [], "missing": []}
    store.replays.append(replay.id, "recommend", "lower the admission", data)
    store.replays.set_step(replay.id, "apply")
    store.replays.set_status(replay.id, "waiting_apply")
    return replay.id


def test_list_has_every_runbook(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("runbooks")
    page.assert_calm()
    for runbook in ("oom", "eviction-storm", "kv-saturated", "target-missing"):
        assert f"Open -> runbooks?runbook={runbook}" in page.text


def test_page_without_context_is_the_text_alone(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("runbooks", runbook="oom")
    page.assert_calm()
    assert "## Diagnosis" in page.text
    assert "Open this runbook from an alert" in page.at.info[0].value
    assert not page.at.button


def test_unknown_runbook_is_one_sentence(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("runbooks", runbook="nope")
    page.assert_calm()
    assert "no runbook named 'nope'" in page.errors[0]


def test_from_an_alert_the_changes_are_computed_for_its_target(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open
) -> None:
    use(seeded, fake_engine("running"))
    alert = seeded.alerts.active()[0]
    page = open_page("runbooks", runbook="eviction-storm", alert=str(alert.id))
    page.assert_calm()
    assert "For embedded" in page.text
    cards = [m.value for m in page.at.markdown if "needs a restart" in m.value or "no restart" in m.value]
    assert any("`--num-gpu-blocks-override` &nbsp; now `200` → **`not set`**" in card for card in cards)
    assert "**Why:**" in page.text
    assert "**Roll back:**" in page.text
    assert page.at.code[0].value.splitlines() == [
        "- kvoncall serve --max-num-seqs 48 --num-gpu-blocks-override 200",
        "+ kvoncall serve --max-num-seqs 48",
    ]
    assert not page.button("Apply change").disabled


def test_waiting_drill_shows_its_own_recommendation_and_the_button(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    replay = waiting_replay(seeded)
    page = open_page("runbooks", runbook="eviction-storm", replay=replay)
    page.assert_calm()
    assert "`--max-num-seqs` &nbsp; now `48` → **`6`**" in page.text
    assert "3184 tokens / 500 a request = 6" in page.text
    assert "+ kvoncall serve --max-num-seqs 6 --num-gpu-blocks-override 200" in page.at.code[0].value
    assert page.button("Apply change")


def dialog(name: str, *setup: str) -> AppTest:
    """A confirmation alone, opened on every run."""
    script = "\n".join((
        "from app.runtime import get_runtime",
        f"from app.ui.runbooks_page import Proposal, {name}",
        f"proposal = Proposal([{CHANGE!r}], [], 'lower the admission')",
        *setup,
    ))  # fmt: skip
    return AppTest.from_string(script, default_timeout=60).run()


def test_drill_change_needs_a_reason_and_is_requested_once(seeded: Store, use: Use) -> None:
    use(seeded)
    replay = waiting_replay(seeded)
    shown = dialog("confirm_drill", f"confirm_drill(get_runtime().store.replays.get({replay!r}), proposal)")
    shown.button(key="apply-confirm").click().run()
    assert "Give a reason" in shown.error[0].value
    assert not seeded.replays.apply_requested(replay)
    shown.text_input(key="apply-reason").input("storm on the drill")
    shown.button(key="apply-confirm").click().run()
    assert not shown.exception
    assert seeded.replays.apply_requested(replay)
    assert "storm on the drill" in seeded.replays.journal(replay)[-1].message


def test_applied_drill_has_no_button_any_more(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    replay = waiting_replay(seeded)
    seeded.replays.request_apply(replay)
    page = open_page("runbooks", runbook="eviction-storm", replay=replay)
    assert "Apply change" not in [b.label for b in page.at.button]


def test_verified_drill_says_verified(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    replay = waiting_replay(seeded)
    seeded.replays.finish(replay, "done", {"verified": True, "before": {"failed": 3}, "after": {"failed": 0}})
    page = open_page("runbooks", runbook="eviction-storm", replay=replay)
    page.assert_calm()
    assert ":green-badge[✔ verified]" in page.text


def test_embedded_change_restarts_with_the_changed_flags(seeded: Store, use: Use, fake_engine: Open) -> None:
    engine = fake_engine("running")
    use(seeded, engine)
    shown = dialog("confirm_embedded", "confirm_embedded(proposal)")
    shown.button(key="apply-confirm").click().run()
    assert engine.calls == []
    shown.text_input(key="apply-reason").input("storm")
    shown.button(key="apply-confirm").click().run()
    assert engine.calls == [("restart", "storm", ["--max-num-seqs", "6", "--num-gpu-blocks-override", "200"])]


def test_target_that_is_not_ours_gets_advice_without_a_button(seeded: Store, use: Use, open_page: Open) -> None:
    facts = {"cache_config_info": {"block_size": "16", "num_gpu_blocks": "1000", "gpu_memory_utilization": "0.9"}}
    seeded.targets.upsert("prod", url="http://127.0.0.1:1", kind="external", facts=facts)
    use(seeded)
    page = open_page("runbooks", runbook="eviction-storm", target="prod")
    page.assert_calm()
    assert "For prod" in page.text
    assert "Apply change" not in [b.label for b in page.at.button]


def test_what_no_flag_does_is_told_as_steps(store: Store, use: Use, open_page: Open) -> None:
    facts = {"version": "0.10.2", "cache_config_info": {"block_size": "16", "num_gpu_blocks": "1000"}}
    store.targets.upsert("prod", url="http://127.0.0.1:1", kind="external", engine="vllm", facts=facts)
    now = time.time()
    for metric, value in (("isolation_probes", 40.0), ("isolation_leaks", 40.0)):
        store.samples.write([Sample("prod", metric, {"check": "side-channel-tokens"}, now - 5, value)])
    store.samples.flush()
    use(store)
    page = open_page("runbooks", runbook="prefix-isolation-breach", target="prod")
    page.assert_calm()
    steps = next(m.value for m in page.at.markdown if m.value.startswith("1. "))
    assert "cache_salt" in steps.replace("\\", "")
