"""A suite against a server: what is kept, what is left out, servers that go away, resuming, comparing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from probe.quality.run import run_suite
from probe.quality.suite import QualityError, SuiteSpec
from probe.store import QualityRun, Store

SPEC = SuiteSpec(turns=6, conversations=3, text_windows=1)


def run(store: Store, url: str, spec: SuiteSpec = SPEC, **more: Any) -> QualityRun:
    return run_suite(store, url, spec, **{"target": "t", "label": "auto", "patience_s": 0.0, **more})


def test_every_answer_is_kept_and_judged(store: Store, server: Any) -> None:
    server.answer = lambda prompt, right: "nonsense" if "+" in prompt[-7:] else right + " \n"
    server.debug = {
        "engine": "kvoncall",
        "version": "9",
        "flags": {"--seed": 0},
        "dims": {"vocab_size": 1046},
        "memory_plan": {"kv_cache_dtype": "mixed", "kv_layer_dtypes": ["a", "b"], "kv_bytes_per_token": 77},
    }
    done = run(store, server.url)
    assert done.status == "done"
    assert done.facts == {
        "engine": "kvoncall", "version": "9", "flags": {"--seed": 0}, "dims": {"vocab_size": 1046},
        "kv_cache_dtype": "mixed", "kv_layer_dtypes": ["a", "b"], "kv_bytes_per_token": 77,
    }  # fmt: skip
    assert (done.suite["kind"], done.suite["context"], done.model) == ("testbed", 512, "testbed")
    assert done.result is not None
    items = store.quality.items(done.id)
    asked = [item for item in items if item.right is not None]
    assert len(asked) == 18 == done.result["overall"]["items"]
    for item in asked:
        assert item.right == (item.task != "add")
        assert item.valid == (item.task != "add")
    added = done.result["tasks"]["add"]
    assert added["items"] > 0
    assert (added["right"], added["invalid"]) == (0, added["items"])
    for task in ("recall", "brackets"):
        assert done.result["tasks"][task]["accuracy"] == 1
    assert {(t["turn"], t["items"]) for t in done.result["turns"] if t["task"] == "all"} == {
        (n, 3) for n in range(1, 7)
    }
    assert done.result["likelihood"]["perplexity"] == pytest.approx(1 / 0.9, rel=1e-4)
    assert done.result["left_out"] == []


def test_requests_are_greedy_and_end_one_token_after_the_answer(store: Store, server: Any) -> None:
    run(store, server.url)
    asked = [body for body in server.bodies if "prompt_logprobs" not in body]
    assert {body["temperature"] for body in asked} == {0}
    assert {body["max_tokens"] for body in asked} <= set(range(3, 9))
    (window,) = [body["prompt"] for body in server.bodies if "prompt_logprobs" in body]
    assert len(window) < 512  # one token of output must fit


def test_comparison_pairs_items_and_measures_divergence(store: Store, server: Any) -> None:
    before = run(store, server.url)
    server.sureness = 0.4
    server.answer = lambda prompt, right: "00" if prompt.count("<eos>") == 5 else right
    after = run(store, server.url, baseline=before, label="int4")
    assert after.baseline_id == before.id
    assert after.result is not None
    found = after.result["against"]
    assert (found["baseline_id"], found["items"], found["lost"], found["gained"]) == (before.id, 18, 3, 0)
    assert found["drop"] == pytest.approx(3 / 18)
    assert found["low"] < 0 < found["drop"] < found["high"]  # 3 of 18 may be chance
    assert found["verdict"] == "inconclusive"
    told = after.result["likelihood"]
    true_kl = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)
    assert told["mean_kl"] == pytest.approx(true_kl, abs=1e-3)
    assert told["top1_agreement"] == 0
    assert [row["turn"] for row in told["by_turn"]] == [1, 2, 3, 4, 5, 6]


def test_a_subset_of_the_baseline_is_compared_with_its_part(store: Store, server: Any) -> None:
    before = run(store, server.url)
    few = SuiteSpec(turns=6, conversations=1, tasks=("recall",), text_windows=0)
    after = run(store, server.url, few, baseline=before)
    assert after.result is not None
    recalls = [item for item in store.quality.items(before.id) if item.key.startswith("recall/2000/")]
    assert after.result["against"]["items"] == len(recalls)


def test_other_questions_are_not_compared(store: Store, server: Any) -> None:
    before = run(store, server.url)
    with pytest.raises(QualityError, match="other questions"):
        run(store, server.url, SuiteSpec(turns=5, conversations=3), baseline=before)
    elsewhere = SuiteSpec(turns=6, conversations=3, first_seed=90, text_windows=0)
    with pytest.raises(QualityError, match="shares no item"):
        run(store, server.url, elsewhere, baseline=before)
    assert [r.id for r in store.quality.list()] == [before.id]


def test_without_logprobs_it_says_what_is_left_out(store: Store, server: Any) -> None:
    server.has_logprobs = False
    done = run(store, server.url)
    assert done.status == "done"
    assert done.result is not None
    assert done.result["likelihood"] is None
    (sentence,) = done.result["left_out"]
    assert "Perplexity, KL and agreement are left out" in sentence
    assert "prompt_logprobs is unknown here" in sentence
    assert done.result["overall"]["items"] == 18


def test_a_server_that_dies_midway_keeps_what_it_has_and_is_resumed(store: Store, server: Any) -> None:
    server.fault = lambda n: 503 if n >= 7 else 0
    with pytest.raises(QualityError, match=r"the test says so.*7 of 19 items are kept") as error:
        run(store, server.url, concurrency=1)
    assert error.value.run_id is not None
    partial = store.quality.get(error.value.run_id)
    assert partial is not None
    assert (partial.status, len(store.quality.items(partial.id))) == ("incomplete", 7)
    assert partial.result is not None
    assert "did not answer" in (partial.error or "")
    server.fault = lambda n: 0
    asked = len(server.bodies)
    done = run(store, server.url, resume=partial)
    assert (done.id, done.status, len(store.quality.items(done.id))) == (partial.id, "done", 19)
    assert len(server.bodies) - asked == 12  # only what had no answer


def test_a_server_that_comes_back_in_time_is_waited_for(store: Store, server: Any) -> None:
    back = threading.Timer(0.5, server.start)

    def away() -> None:
        server.stop()
        back.start()

    def fault(n: int) -> int:
        if n == 5:
            threading.Thread(target=away).start()
        return 503 if n == 5 else 0

    server.fault = fault
    done = run(store, server.url, patience_s=60.0)
    back.join()
    assert done.status == "done"
    assert len(store.quality.items(done.id)) == 19


def test_a_refusal_midway_is_final(store: Store, server: Any) -> None:
    server.fault = lambda n: 404 if n == 4 else 0
    with pytest.raises(QualityError, match="refused: HTTP 404"):
        run(store, server.url, patience_s=60.0)


def test_nobody_there(store: Store, server: Any) -> None:
    server.stop()
    with pytest.raises(QualityError, match="did not answer"):
        run(store, server.url)
    assert store.quality.list() == []


def test_resuming_on_another_model_is_refused(store: Store, server: Any) -> None:
    server.fault = lambda n: 500 if n >= 3 else 0
    with pytest.raises(QualityError) as error:
        run(store, server.url)
    partial = store.quality.get(error.value.run_id or "")
    server.model = "testbed-b"
    with pytest.raises(QualityError, match="start a new run"):
        run(store, server.url, resume=partial)


def test_concurrency_is_a_limit_and_progress_is_told(store: Store, server: Any) -> None:
    lines: list[str] = []
    run(store, server.url, concurrency=2, progress=lines.append)
    assert lines[-1] == "auto: 19 of 19 items"
    assert server.most_in_flight == 2


def test_vllm_tells_its_cache_format_by_metrics(store: Store, server: Any) -> None:
    server.metrics = 'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e4m3",engine="0"} 1.0\n'
    done = run(store, server.url, SuiteSpec(turns=2, conversations=1, text_windows=0))
    assert done.facts == {"engine": "vllm", "kv_cache_dtype": "fp8_e4m3"}


def test_plain_suite_asks_other_models_in_english(store: Store, servers: Callable[[], Any]) -> None:
    server = servers()
    server.model, server.max_model_len = "some-model", None
    server.solve = lambda prompt: "1234"
    spec = SuiteSpec(turns=4, conversations=2, text_windows=2, window_tokens=8)
    done = run(store, server.url, spec, text="one two three four five six seven eight nine ten eleven")
    assert done.suite["kind"] == "plain"
    windows = [item for item in store.quality.items(done.id) if item.task == "text"]
    assert [len(item.data["logprobs"]) for item in windows] == [7, 4]  # BOS leads both windows
    assert all("Q: " in body["prompt"] for body in server.bodies if "prompt_logprobs" not in body)


def test_chat_asks_the_chat_endpoint(store: Store, server: Any) -> None:
    server.solve = lambda prompt: "1234"
    done = run(store, server.url, SuiteSpec(kind="plain", turns=3, conversations=1, text_windows=0, chat=True))
    assert done.status == "done"
    assert all(body["messages"][-1]["role"] == "user" for body in server.bodies)
