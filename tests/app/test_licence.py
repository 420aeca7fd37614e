"""The licence notice of Gemma: shown until the operator accepts it, no background traffic before that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.embedded import EmbeddedEngine
from app.licence import ACCEPTED, notice
from app.runtime import Runtime
from engine import gemma
from engine.supervisor import SupervisorStatus
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]


@pytest.mark.parametrize("page", ["engine", "overview"])
def test_notice_is_shown_until_it_is_accepted(
    seeded: Store, use: Use, open_page: Open, fake_engine: Open, page: str
) -> None:
    engine = fake_engine("stopped")
    engine.notice = gemma.NOTICE
    use(seeded, engine)
    shown = open_page(page)
    shown.assert_calm()
    assert "ai.google.dev/gemma/terms" in shown.text
    shown.button("Accept the licence").click().run()
    assert engine.notice is None
    assert not shown.at.warning
    assert "Accept the licence" not in [b.label for b in shown.at.button]


def test_traffic_waits_for_the_acceptance_which_is_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", "gemma"]
    engine = EmbeddedEngine(store, flags, log_dir=tmp_path, load_rps=0)
    running = SupervisorStatus("running", 1, "http://127.0.0.1:5", tuple(flags), 0.0, 0, None)
    try:
        monkeypatch.setattr(engine.supervisor, "status", lambda: running)
        assert engine.pending_notice() == gemma.NOTICE
        assert engine._load_url() is None
        engine.accept_notice()
        assert engine.pending_notice() is None
        assert engine._load_url() == "http://127.0.0.1:5"
        engine.accept_notice()
        assert len(store.events.recent(kinds=[ACCEPTED])) == 1
    finally:
        monkeypatch.undo()
        engine.close()


def test_the_testbed_model_has_no_notice() -> None:
    assert notice([]) is None
    assert notice(["--model", "testbed-outliers"]) is None
