"""Webhook and apprise over real HTTP; secrets come from the environment or secrets.toml and show up nowhere."""

from __future__ import annotations

import logging
import socket
import sqlite3
import threading
from pathlib import Path

import pytest

from probe.notify.dispatcher import Dispatcher, receiver_states, send_test
from probe.notify.message import Message, MessageAlert, body, title
from probe.notify.receivers import parse_receiver
from probe.notify.secret_refs import SecretError, redact, resolve
from probe.notify.senders import Sender
from probe.store import Store
from probe.store.database import FILE_NAME

from .conftest import RULES, START, Clock, Hook, move

SECRET = "s3cr3tPathOfTheHook"


def message(*states: str) -> Message:
    labels = {"alertname": "oom", "target": "a", "severity": "critical"}
    alerts = [
        MessageAlert(s, labels, {"summary": "engine died"}, START, None, "http://kv/alerts?alert=1") for s in states
    ]
    return Message("r", {"target": "a"}, alerts)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No secrets.toml of this machine is found."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("KVONCALL_SECRETS", raising=False)
    return home


def test_secrets_are_found_where_they_may_be(
    store: Store, no_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOOK", " http://x ")
    assert resolve("env:HOOK", store.where) == "http://x"
    assert resolve("http://plain", store.where) == "http://plain"
    with pytest.raises(SecretError, match=r"variable NO_SUCH is empty"):
        resolve("env:NO_SUCH", store.where)
    with pytest.raises(SecretError, match=r"No secrets.toml is there"):
        resolve("secret:hook", store.where)
    places = [Path(store.where).parent, no_home / ".streamlit", tmp_path / "named"]
    for place in reversed(places):
        place.mkdir(exist_ok=True)
        (place / "secrets.toml").write_text(f'hook = "from {place.name}"\n[slack]\nurl = "in a table"\n')
    assert resolve("secret:hook", store.where) == "from data"
    assert resolve("secret:slack.url", "postgresql://h/d") == "in a table"
    assert resolve("secret:hook", "postgresql://h/d") == "from .streamlit"
    monkeypatch.setenv("KVONCALL_SECRETS", str(places[2] / "secrets.toml"))
    assert resolve("secret:hook", store.where) == "from named"
    with pytest.raises(SecretError, match="lacks other"):
        resolve("secret:other", store.where)
    (places[2] / "secrets.toml").write_text(f"hook = {SECRET}")
    with pytest.raises(SecretError, match="is not TOML") as broken:
        resolve("secret:hook", store.where)
    assert SECRET not in str(broken.value)
    monkeypatch.setenv("KVONCALL_SECRETS", str(tmp_path / "gone"))
    with pytest.raises(SecretError, match="which is no file"):
        resolve("secret:hook", store.where)


def test_redacting_takes_every_long_piece() -> None:
    text = redact("POST /services/T0123456/abcdefgh failed", ["https://h/services/T0123456/abcdefgh?key=zzzzzzzz"])
    assert text == "POST /***/***/*** failed"


def test_a_webhook_carries_its_bearer_token(hook: Hook, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    monkeypatch.setenv("HOOK", hook.url)
    receiver = parse_receiver({"name": "r", "kind": "webhook", "url": "env:HOOK", "bearer": "env:HOOK_TOKEN"})
    assert Sender(store.where)(receiver, message("firing")).ok
    assert hook.posts[0][0]["Authorization"] == f"Bearer {SECRET}"


def test_errors_are_one_sentence(hook: Hook, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        receiver = parse_receiver({"name": "r", "kind": "webhook", "url": closed})
        refused = Sender(store.where)(receiver, message("firing"))
    assert (refused.error, refused.again, refused.unconfirmed) == ("It refused the connection.", True, False)
    hook.pause = threading.Event()
    slow = Sender(store.where, timeout_s=0.2)(
        parse_receiver({"name": "r", "kind": "webhook", "url": hook.url}), message()
    )
    hook.pause.set()
    assert (slow.error, slow.again, slow.unconfirmed) == ("It did not answer within 0.2 s.", True, True)
    monkeypatch.setenv("HOOK", "ftp://x")
    wrong = Sender(store.where)(parse_receiver({"name": "r", "kind": "webhook", "url": "env:HOOK"}), message())
    assert (wrong.error, wrong.again) == ("The address is not http:// or https://: correct it.", False)
    for url, again in (("nosuchservice://abc", False), (f"json://{hook.url.split('/')[2]}/x", True)):
        monkeypatch.setenv("HOOK", url)
        hook.answers = [500]
        failed = Sender(store.where)(
            parse_receiver({"name": "r", "kind": "apprise", "url": "env:HOOK"}), message("firing")
        )
        assert (failed.ok, failed.again) == (False, again)


def test_apprise_delivers_title_and_text(hook: Hook, store: Store) -> None:
    url = f"json://{hook.url.split('/')[2]}/x"
    sent = Sender(store.where)(parse_receiver({"name": "r", "kind": "apprise", "url": url}), message("firing"))
    assert sent.ok
    post = hook.posts[0][1]
    assert post["title"] == "[FIRING:1] oom on a"
    assert post["type"] == "failure"
    assert "firing: oom on a (critical)\nengine died\nhttp://kv/alerts?alert=1" in post["message"]


def test_words_of_a_message() -> None:
    assert title(message("resolved")) == "[RESOLVED] oom on a"
    assert title(message("firing", "resolved")) == "[FIRING:1] oom on a"
    assert body(message("firing", "resolved")).count("\n\n") == 1


@pytest.mark.parametrize("kind", ["webhook", "apprise"])
def test_a_secret_shows_up_nowhere(
    hook: Hook, data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    scheme = "http" if kind == "webhook" else "json"
    monkeypatch.setenv("HOOK", f"{scheme}://user:{SECRET}@{hook.url.split('/')[2]}/{SECRET}")
    caplog.set_level(logging.DEBUG)
    hook.answers = [200, 403, 403]
    with Store.open(data_dir) as store:
        store.receivers.save({"name": "r", "kind": kind, "url": "env:HOOK"})
        move(store, "oom", "firing", START)
        Clock(Dispatcher(store, RULES)).to(15)
        (row,) = store.notifications.list()
        said = [str(send_test(store, "r")), str(receiver_states(store)), str(row), caplog.text]
        said += [str(store.events.recent()), str(store.receivers.list())]
    assert hook.posts[0][0]["Authorization"].startswith("Basic ")
    dump = "\n".join(sqlite3.connect(data_dir / FILE_NAME).iterdump())
    assert SECRET not in "\n".join([*said, dump])


def test_a_missing_secret_is_said_before_anything_is_sent(store: Store, no_home: Path) -> None:
    store.receivers.save({"name": "r", "kind": "webhook", "url": "env:NO_SUCH_HOOK"})
    (state,) = receiver_states(store)
    assert state.problem == "The environment variable NO_SUCH_HOOK is empty: put the value there and restart."
    assert state.last is None
    assert send_test(store, "r").error == state.problem
