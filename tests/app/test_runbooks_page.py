"""The runbooks page: the list, a page opened from an alert, applying a change to a drill and to the embedded engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import yaml
from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from probe.store import Sample, Store
from runbooks.load import get_runbook, list_runbooks

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
    assert [b.label for b in page.at.button] == ["Add note"]


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


def test_search_finds_flags_incidents_and_words_of_the_text(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("runbooks", search="--kv-cache-dtype-skip-layers")
    page.assert_calm()
    opened = [line for line in page.text.splitlines() if line.startswith("Open -> runbooks?runbook=")]
    assert "Open -> runbooks?runbook=kv-quality-drop" in opened
    assert len(opened) < len(list_runbooks())
    page.at.text_input(key="search").set_value("xyzzy").run()
    assert "0 of" in page.text


def test_list_starts_with_the_alerts_in_force(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = seeded.alerts.active()[0]
    page = open_page("runbooks")
    assert f"computed for embedded -> runbooks?runbook=eviction-storm&alert={alert.id}" in page.text


def test_language_is_kept_in_the_url(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("runbooks", runbook="oom", lang="zh")
    page.assert_calm()
    assert page.at.query_params["lang"] == "zh"
    shown = get_runbook("oom", "zh")
    assert shown.title in page.text
    page.at.segmented_control(key="language-choice").set_value("en").run()
    assert "## Diagnosis" in page.text
    assert "lang" not in page.at.query_params


def test_checklist_of_an_alert_says_who_did_what(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = str(seeded.alerts.active()[0].id)
    page = open_page("runbooks", runbook="eviction-storm", alert=alert)
    first = page.at.checkbox[0]
    assert "normal 0" in first.label
    first.check().run()
    assert "needs an author" in page.errors[0]
    assert not page.at.checkbox[0].value
    page.at.text_input(key="author").set_value("kim").run()
    page.at.checkbox[0].check().run()
    page.assert_calm()
    assert page.at.checkbox[0].value
    assert "done by kim" in page.text
    assert seeded.notes.checklist("alert", alert)["diagnosis-1"].done
    # Somebody else takes it back elsewhere; the next look shows it.
    seeded.notes.tick("alert", alert, "diagnosis-1", text="as it read before", author="lee <b>", done=False)
    page.at.run()
    assert not page.at.checkbox[0].value
    assert "taken back by lee <b>" in page.text
    assert "The step read otherwise then: as it read before" in page.text


def test_notes_keep_what_was_written_as_it_was_written(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    alert = str(seeded.alerts.active()[0].id)
    page = open_page("runbooks", runbook="eviction-storm", alert=alert)
    page.at.text_input(key="author").set_value("kim").run()
    page.at.text_area(key="note-text").set_value("<script>x</script> **drain** :red[first]").run()
    page.button("Add note").click().run()
    page.assert_calm()
    assert [t.value for t in page.at.text] == ["<script>x</script> **drain** :red[first]"]
    assert page.at.text_area(key="note-text").value == ""
    (note,) = seeded.notes.list("alert", alert)
    seeded.notes.edit(note.id, author="lee", text="drain first", seen=1)
    page.at.segmented_control(key="note-about").set_value("this runbook").run()
    page.at.text_area(key="note-text").set_value("read the fleet page").run()
    page.button("Add note").click().run()
    assert [t.value for t in page.at.text] == [
        "drain first", "<script>x</script> **drain** :red[first]", "read the fleet page",
    ]  # fmt: skip
    assert "edited by lee" in page.text
    assert "Earlier wordings (1)" in page.text
    assert seeded.notes.list("runbook", "eviction-storm")[0].first.author == "kim"


def test_a_note_edited_by_two_is_not_overwritten(seeded: Store, use: Use) -> None:
    use(seeded)
    note = seeded.notes.add("runbook", "oom", author="kim", text="one")
    script = "\n".join((
        "from app.runtime import get_runtime",
        "from app.ui.runbook_notes import edit",
        "import streamlit as st",
        "st.session_state.setdefault('seen', get_runtime().store.notes.list('runbook', 'oom')[0])",
        "edit(st.session_state['seen'])",
    ))  # fmt: skip
    shown = AppTest.from_string(script, default_timeout=60).run()
    seeded.notes.edit(note.id, author="lee", text="two", seen=1)
    shown.text_input(key="note-edit-author").input("kim")
    shown.text_area(key="note-edit-text").input("three")
    shown.button(key="note-edit-confirm").click().run()
    assert "lee edited note" in shown.error[0].value
    assert seeded.notes.list("runbook", "oom")[0].current.text == "two"


def test_what_is_known_of_the_targets_version_and_the_change_to_take_along(
    store: Store, use: Use, open_page: Open, fire: Open
) -> None:
    now = time.time()
    info = {"block_size": "16", "num_gpu_blocks": "1000", "gpu_memory_utilization": "0.8", "cache_dtype": "auto"}
    facts = {"version": "0.10.2", "cache_config_info": info, "max_model_len": 4096, "model": "Llama-3.1-8B"}
    facts["gpu"] = "L4-24GB"
    store.targets.upsert("gpu-7", url="http://127.0.0.1:1", kind="external", engine="vllm", facts=facts)
    running = (("requests_running", 5.0), ("requests_waiting", 2.0))
    store.samples.write([Sample("gpu-7", metric, {"engine": "0"}, now - 30, value) for metric, value in running])
    fire(store, "gpu-7", now)
    use(store)
    page = open_page("runbooks", runbook="eviction-storm", alert=str(store.alerts.active()[0].id))
    page.assert_calm()
    advisories = next(table for table in page.tables if "advisory" in table.columns)
    assert "vllm#25787 (bug)" in set(advisories["advisory"])
    assert any(name.startswith("CVE-") for name in advisories["advisory"])
    assert "for vllm 0.10.2" in page.text
    card = next(m.value for m in page.at.markdown if "--gpu-memory-utilization" in m.value)
    assert "now `0.8` → **`0.88`**" in card
    assert "**Risk:**" in page.text
    assert "14448 tokens at 131072 bytes each" in page.text
    command = "vllm serve M --gpu-memory-utilization 0.8 --api-key $KEY"
    page.at.text_area(key="command-gpu-7").set_value(command).run()
    assert "-  --gpu-memory-utilization 0.8" in page.at.code[-1].value
    page.at.segmented_control(key="form").set_value("helm").run()
    page.assert_calm()
    values = yaml.safe_load(page.at.code[-1].value)["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"]
    assert "--api-key" in values
    assert values[values.index("--gpu-memory-utilization") + 1] != "0.8"
    page.at.text_area(key="command-gpu-7").set_value('vllm "serve').run()
    page.assert_calm()
    assert len(page.errors) == 1
