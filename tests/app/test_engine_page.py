"""The engine page: live, stopped, crashed, hung; its dialogs refuse what is wrong in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.runtime import Runtime
from engine.supervisor import EngineExit
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


def test_running_engine_shows_requests_blocks_flags_and_plan(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, debug_server: str
) -> None:
    use(seeded, fake_engine("running", debug_server))
    page = open_page("engine")
    page.assert_calm()
    shown = page.text
    assert "● running" in shown
    assert "Running (1)" in shown
    assert "Waiting (1)" in shown
    assert "cmpl-7" in shown
    assert page.at.get("progress")[0].proto.text == "KV usage 24.6%: 49 of 199 blocks of 16 tokens"
    drawn = [element.proto.body for element in page.at.html]
    block_map = next(body for body in drawn if "<img" in body)
    legend = next(body for body in drawn if "shared <b>" in body)
    assert 'alt="KV blocks: 100 free, 50 cached, 40 used, 9 shared.' in block_map
    assert "shared <b>9</b>" in legend
    flags = next(t for t in page.tables if "default" in t.columns)
    assert flags.values.tolist() == [
        ["--max-num-seqs", "48", "64"],
        ["--num-gpu-blocks-override", "200", "not set"],
    ]
    plan = next(t for t in page.tables if "part" in t.columns).set_index("part")["value"]
    assert plan["KV cache"] == "6.2 MiB"
    assert plan["Tokens that fit"] == "3\u202f184"
    assert "not from a profiling run" in shown


def test_all_flags_are_listed_folded(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, debug_server: str
) -> None:
    use(seeded, fake_engine("running", debug_server))
    page = open_page("engine")
    listed = page.at.expander[-1].table[0].value
    assert {"--block-size", "--enable-prefix-caching", "--max-num-batched-tokens"} <= set(listed["flag"])


def test_crashed_engine_shows_why_it_died(seeded: Store, use: Use, open_page: Open, fake_engine: Open) -> None:
    message = "engine died: out of memory: tried to allocate 100 bytes (device memory 50 bytes)"
    died = EngineExit(12, "oom", message, ("line one", message), time.time() - 5, 61.0)
    use(seeded, fake_engine("crashed", last_exit=died))
    page = open_page("engine")
    page.assert_calm()
    assert "✖ crashed" in page.text
    assert message in page.text
    assert "exit code 12, after 1 min 1 s" in page.text
    assert "line one" in page.at.code[0].value
    assert page.at.expander[0].proto.expanded
    assert "Live figures appear when the engine is running." in [i.value for i in page.at.info]
    assert not page.button("Start").disabled
    assert page.button("Stop").disabled


def test_engine_that_does_not_answer_is_one_sentence(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open
) -> None:
    use(seeded, fake_engine("running", "http://127.0.0.1:9"))
    page = open_page("engine")
    page.assert_calm()
    assert page.errors == [
        "The engine does not answer at http://127.0.0.1:9/debug/requests; its process is stopped or starting."
    ]


def test_switched_off_engine_says_so(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("engine")
    page.assert_calm()
    assert "KVONCALL_NO_ENGINE" in page.at.info[0].value


def open_dialog(name: str, *args: str) -> AppTest:
    """A dialog alone: a script that opens it on every run (an `AppTest` click redraws the whole script)."""
    arguments = "".join(f"{arg!r}, " for arg in args)
    return AppTest.from_string(
        f"from app.runtime import get_runtime\nfrom app.ui.engine_page import {name}\n"
        f"{name}({arguments}get_runtime().engine)\n",
        default_timeout=60,
    ).run()


def press(dialog: AppTest) -> AppTest:
    return dialog.button(key="engine-confirm").click().run()


def test_buttons_open_their_dialogs(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, debug_server: str
) -> None:
    use(seeded, fake_engine("running", debug_server))
    page = open_page("engine")
    assert page.button("Start").disabled
    page.button("Restart").click().run()
    assert "the prefix cache is lost" in page.text
    page.button("Edit flags").click().run()
    assert page.at.text_area[0].value == "--max-num-seqs 48 --num-gpu-blocks-override 200"


@pytest.mark.parametrize("what", ["start", "stop", "restart"])
def test_change_needs_a_typed_reason(seeded: Store, use: Use, fake_engine: Open, what: str) -> None:
    engine = fake_engine("running")
    use(seeded, engine)
    dialog = press(open_dialog("confirm", what))
    assert [e.value for e in dialog.error] == ["Give a reason: it is kept with the event."]
    assert engine.calls == []
    dialog.text_input(key="engine-reason").input("memory looks odd")
    press(dialog)
    assert engine.calls == [(what, "memory looks odd", None)]


def test_edited_flags_reach_the_engine(seeded: Store, use: Use, fake_engine: Open) -> None:
    engine = fake_engine("running")
    use(seeded, engine)
    dialog = open_dialog("edit_flags")
    dialog.text_area(key="engine-flags").input("--max-num-seqs 16")
    dialog.text_input(key="engine-reason").input("try less")
    press(dialog)
    assert engine.calls == [("restart", "try less", ["--max-num-seqs", "16"])]


@pytest.mark.parametrize(
    ("text", "part"),
    [("--swap-space 4", "--swap-space"), ("--max-num-seqs many", "many"), ("--model '", "cannot be split")],
)
def test_wrong_flags_are_refused_in_one_sentence(
    seeded: Store, use: Use, fake_engine: Open, text: str, part: str
) -> None:
    engine = fake_engine("running")
    use(seeded, engine)
    dialog = open_dialog("edit_flags")
    dialog.text_area(key="engine-flags").input(text)
    dialog.text_input(key="engine-reason").input("try")
    press(dialog)
    assert engine.calls == []
    assert len(dialog.error) == 1
    assert part in dialog.error[0].value
    assert "Traceback" not in dialog.error[0].value
