"""`kvoncall isolation`: exit codes, what is stored, what is said first, and sentences for mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probe.cli import main
from probe.isolation.options import CHECKS, IsolationOptions
from probe.store import Store

FEW = ("--probes", "5", "--prefix-tokens", "64")
Isolation = Callable[..., tuple[int, str, str]]


@pytest.fixture
def isolation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Isolation:
    """`isolation(*args)` -> exit code, stdout, stderr, over one data directory."""

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["isolation", "--data-dir", str(tmp_path / "data"), *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_a_leak_is_shown_stored_and_code_1(isolation: Isolation, server: Any, tmp_path: Path) -> None:
    server.cache.leaks = True
    with Store.open(tmp_path / "data") as store:
        store.targets.upsert("prod", url=server.url, kind="external")
    code, out, err = isolation("--target", "prod", "--checks", "leak-canary,cache-salt", *FEW, "--json")
    assert code == 1
    value = json.loads(out)
    assert (value["verdict"], value["target"], value["model"], value["error"]) == (
        "leak shown",
        "prod",
        "testbed",
        None,
    )
    assert value["sentence"] == "leak shown: 5 answers with another tenant's text in 5 probes"
    assert [check["check"] for check in value["checks"]] == ["leak-canary", "cache-salt"]
    assert value["requests_sent"] == len(server.bodies) <= value["budget"]["requests"]
    assert f"at most {value['budget']['requests']} requests" in err.splitlines()[0]
    with Store.open(tmp_path / "data") as store:
        (event,) = store.events.recent(target="prod", kinds=["isolation_round"])
        samples = store.samples.latest("prod")
    assert event.data == value
    assert (event.severity, event.message) == ("warning", value["sentence"])
    found = {(s.metric, s.labels["check"]): s.value for of in samples.values() for s in of}
    assert found == {
        ("isolation_probes", "leak-canary"): 5, ("isolation_leaks", "leak-canary"): 5,
        ("isolation_probes", "cache-salt"): 10, ("isolation_leaks", "cache-salt"): 0,
    }  # fmt: skip
    assert len({sample.ts for of in samples.values() for sample in of}) == 1


def test_samples_are_on_disk_when_the_event_is(
    isolation: Isolation, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probe.store.events import Events

    seen: list[int] = []
    add = Events.add

    def watched(self: Events, *args: Any, **more: Any) -> Any:
        with Store.open(tmp_path / "data") as store:
            seen.append(len(store.samples.latest("prod").get("isolation_leaks", [])))
        return add(self, *args, **more)

    with Store.open(tmp_path / "data") as store:
        store.targets.upsert("prod", url=server.url, kind="external")
    monkeypatch.setattr(Events, "add", watched)
    assert isolation("--target", "prod", "--variant", "leak-canary", "--probes", "5")[0] == 0
    assert seen == [1]


def test_no_leak_is_code_0_and_a_number_of_probes(isolation: Isolation, server: Any, tmp_path: Path) -> None:
    server.cache.scope = "session"
    code, out, _ = isolation("--target", server.url, "--checks", "leak-canary,cache-salt", "--probes", "10")
    assert code == 0
    assert out.startswith("no leak in 20 probes (upper bound 25.9% of such requests, with 95% confidence)\n")
    assert "cache-salt           no leak" in out
    with Store.open(tmp_path / "data") as store:
        (event,) = store.events.recent(target=server.url, kinds=["isolation_round"])
    assert event.severity == "info"
    for said in (out, json.dumps(event.data)):
        assert "safe" not in said.lower()


def test_too_few_pairs_are_code_3_and_leave_no_clean_sample(isolation: Isolation, server: Any, tmp_path: Path) -> None:
    server.cache.scope, server.cache.tells = "session", False
    with Store.open(tmp_path / "data") as store:
        store.targets.upsert("prod", url=server.url, kind="external")
    code, out, _ = isolation("--target", server.url, "--variant", "side-channel", *FEW)
    assert (code, out.startswith("inconclusive: ")) == (3, True)
    with Store.open(tmp_path / "data") as store:
        assert store.samples.latest("prod") == {}


def test_a_server_that_fails_midway_is_code_2_and_keeps_what_was_seen(
    isolation: Isolation, server: Any, tmp_path: Path
) -> None:
    server.fault = lambda n: 503 if n >= 12 else 0
    code, out, _ = isolation("--target", server.url, "--checks", "leak-canary,cache-salt", "--json")
    value = json.loads(out)
    assert (code, value["verdict"], value["requests_failed"], value["requests_sent"]) == (2, "inconclusive", 3, 15)
    assert value["error"] == f"{server.url}/v1/completions refused: HTTP 503, the test says so"
    (canary,) = value["checks"]
    assert (canary["verdict"], canary["probes"]) == ("inconclusive", 2)
    assert canary["sentence"].endswith("in 2 probes, when the round was stopped")


def test_a_server_that_refuses_everything_is_code_2_and_a_sentence(isolation: Isolation, server: Any) -> None:
    server.fault = lambda n: 401
    code, out, err = isolation("--target", server.url)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == f"kvoncall: {server.url}/v1/completions refused: HTTP 401, the test says so"
    assert len(server.bodies) == 1


def test_a_server_without_logprobs_is_judged_by_answers(isolation: Isolation, server: Any) -> None:
    server.knows_logprobs = False
    code, out, _ = isolation("--target", server.url, "--variant", "leak-canary", "--probes", "5", "--json")
    (check,) = json.loads(out)["checks"]
    assert (code, check["probes"], check["effect"]) == (0, 5, None)


def test_it_can_ask_by_chat(isolation: Isolation, server: Any) -> None:
    code, out, _ = isolation("--target", server.url, "--chat", *FEW, "--json")
    value = json.loads(out)
    assert (code, value["verdict"]) == (1, "leak shown")  # a shared cache: the side channel
    assert all("messages" in body for body in server.bodies)
    assert len(value["checks"]) == 4


def test_only_text_and_ids_of_its_own_are_sent(isolation: Isolation, server: Any) -> None:
    isolation("--target", server.url, *FEW, "--salted")
    for body, headers in zip(server.bodies, server.headers, strict=True):
        assert body["user"].startswith("kvoncall-probe-")
        assert headers["x-tenant-id"].startswith("kvoncall-probe-")
        assert body.get("cache_salt", "kvoncall-probe-").startswith("kvoncall-probe-")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--checks", "leaks"], "checks are some of leak-canary, side-channel, cache-salt, once each, not leaks"),
        (["--checks", ","], "once each, not none"),
        (["--probes", "4"], "probes must be 5 to 5000, not 4"),
        (["--prefix-tokens", "8"], "a prefix needs at least 64 tokens, not 8"),
        (["--prefix-tokens", "4096", "--target", "SERVER"], "a prefix of 4096 tokens does not fit a context of 2048"),
        (["--target", "nobody"], "there is no target 'nobody' (none is stored)"),
        (["--target", "http://127.0.0.1:9", "--scope", "session"], "--engine-flags and --scope need --target embedded"),
        (["--scope", "world"], "--prefix-cache-scope"),
        (["--engine-flags", "'"], "--engine-flags cannot be read"),
        (["--target", "SERVER", "--api-key-env", "KVONCALL_NO_SUCH_KEY"], "KVONCALL_NO_SUCH_KEY is empty"),
        (["--target", "http://127.0.0.1:9"], "http://127.0.0.1:9 did not answer"),
        (["--variant", "all"], "invalid choice"),
    ],
)
def test_mistakes_are_one_sentence(isolation: Isolation, server: Any, args: list[str], says: str) -> None:
    code, out, err = isolation(*(server.url if arg == "SERVER" else arg for arg in args))
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not server.bodies


def test_the_command_lines_defaults_are_the_options(isolation: Isolation, server: Any) -> None:
    server.fault = lambda n: 503 if n >= 40 else 0
    _, out, _ = isolation("--target", server.url, "--json")
    assert json.loads(out)["options"] == {**IsolationOptions().to_dict(), "checks": list(CHECKS)}


def test_the_embedded_engine_leaks_by_its_scope(isolation: Isolation, tmp_path: Path) -> None:
    small = ("--target", "embedded", "--variant", "side-channel", *FEW, "--json")
    code, out, _ = isolation(*small)
    value = json.loads(out)
    assert (code, value["verdict"], value["scope"]) == (1, "leak shown", "global")
    tokens = value["checks"][0]
    assert (tokens["check"], tokens["effect"]) == ("side-channel-tokens", 64)
    assert tokens["leaks"] == tokens["probes"] >= 5
    code, out, _ = isolation(*small, "--scope", "session")
    value = json.loads(out)
    tokens, ttft = value["checks"]
    assert (tokens["verdict"], tokens["leaks"], value["scope"]) == ("no leak", 0, "session")
    assert tokens["data"]["own_hits"] == len(tokens["data"]["own"]) > 0
    assert (ttft["leaks"], code) == (0, 0 if ttft["verdict"] == "no leak" else 3)
    with Store.open(tmp_path / "data") as store:
        assert len(store.events.recent(target="lab", kinds=["isolation_round"])) == 2
