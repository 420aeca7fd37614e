"""The capacity page: verdict, what-if, bad input in a sentence, comparison, and the other tabs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.runtime import Runtime
from engine.memory.deployment import Deployment
from engine.memory.model_presets import gpu, model_config, model_preset
from engine.memory.plan import plan
from probe.store import Store
from runbooks.flags import known_versions

Open = Callable[..., Any]
Use = Callable[..., Runtime]


@pytest.fixture
def capacity(store: Store, use: Use, open_page: Open) -> Open:
    """Opens the page with a query."""
    use(store)
    return lambda **query: open_page("capacity", **query)


def figures(page: Any) -> dict[str, str]:
    return {tile.label: tile.value.replace("\u202f", "") for tile in page.at.metric}


def test_a_link_opens_the_plan_it_describes(capacity: Open) -> None:
    page = capacity(model="llama-3.1-70b", gpu="h100", gpus="4", engine="vllm", version="0.19.1", max_model_len="24000")
    page.assert_calm()
    expected = plan(
        Deployment(model_preset("Llama-3.1-70B"), "vllm", "0.19.1", gpu("H100-80GB"), 4, 4, max_model_len=24_000)
    )
    assert page.at.success[0].value.startswith("**✔ Fits")
    shown = figures(page)
    assert shown["KV tokens"] == str(expected.kv_tokens)
    assert shown["KV blocks"] == str(expected.kv_blocks)
    assert shown["Of 24\u202f000 tokens"] == f"{expected.max_concurrency:.2f}"
    parts = page.tables[0].set_index("part")["size"]
    assert parts["weights"].replace("\u00a0", " ") == "32.9 GiB"
    assert "the articles' estimate" in page.text.casefold()
    assert any(line in page.text for line in expected.lines)
    assert "GQA, 8 KV heads" in page.text


def test_a_slider_moves_the_verdict_and_both_plans_are_compared(capacity: Open) -> None:
    page = capacity()
    assert page.at.success
    page.button("Keep as plan A").click().run()
    page.at.select_slider(key="max_model_len").set_value("1048576").run()
    page.assert_calm()
    assert "✖ Does not fit" in page.errors[0]
    assert "first lever" in page.errors[0]
    compared = next(table for table in page.tables if list(table.columns)[1:3] == ["A", "B"])
    rows = compared.set_index("")
    assert list(rows.loc["verdict"])[:2] == ["fits", "does not fit"]
    assert rows.loc["max_model_len", "changed"] == "≠"
    assert len(page.at.get("vega_lite_chart")) == 2
    page.button("Forget plan A").click().run()
    assert len(page.at.get("vega_lite_chart")) == 1


def test_changing_the_engine_keeps_the_rest(capacity: Open) -> None:
    page = capacity(model="Qwen3-8B", kv_cache_dtype="int4_per_token_head", version="0.32.0")
    page.assert_calm()
    for engine in ("sglang", "tensorrt-llm", "tgi"):
        page.at.selectbox(key="engine").set_value(engine).run()
        page.assert_calm()
        assert page.at.selectbox(key="model").value == "Qwen3-8B"
        assert page.at.selectbox(key="version").value == known_versions(engine)[-1]
        assert figures(page)["KV tokens"] != "0"


def test_a_pasted_config_is_planned_and_a_broken_one_is_one_sentence(capacity: Open) -> None:
    page = capacity(source="config.json")
    page.assert_calm()
    assert not page.at.metric
    field = page.at.text_area(key="config-text")
    config = model_config("Llama-3.1-8B")["config"]
    for text, sentence in (
        ('{"num_hidden_layers": ', "not JSON"),
        ("/etc/passwd", "no JSON object"),
        (json.dumps({**config, "num_hidden_layers": None}), "num_hidden_layers"),
    ):
        field.set_value(text).run()
        page.assert_calm()
        assert sentence in page.errors[0]
        assert len(page.errors) == 1
        assert not page.at.metric
    field.set_value(json.dumps(config)).run()
    page.assert_calm()
    assert page.errors == []
    assert figures(page)["KV of a token"] == "128.0 KiB"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"gpus": "3"}, "does not divide"),
        ({"gpu": "other", "gpu_memory": "-3"}, "more than zero"),
        ({"kv_cache_bytes": "much"}, "cannot read 'much'"),
    ],
)
def test_bad_input_is_said_beside_the_field(capacity: Open, query: dict[str, str], sentence: str) -> None:
    page = capacity(**query)
    page.assert_calm()
    assert sentence in page.errors[0]
    assert "see the sentence beside the field" in page.at.info[0].value


def test_what_the_url_asks_for_in_vain_is_said(capacity: Open) -> None:
    page = capacity(model="llama-9000", version="0.32.7", gpu="other", gpu_memory="80 GB")
    page.assert_calm()
    assert "no preset for the model 'llama-9000'" in page.at.warning[0].value
    assert "0.32.7" in page.text
    assert "was taken as GB" in page.text


def test_a_launch_command_is_planned_and_linted(capacity: Open) -> None:
    page = capacity()
    line = "vllm serve M --max-model-len 8192 --kv-cache-dtype fp8 --swap-space 4"
    page.at.text_area(key="launch-line").set_value(line).run()
    page.assert_calm()
    assert "Of 8\u202f192 tokens" in figures(page)
    assert "KV fp8" in page.text
    findings = next(table for table in page.tables if "instead" in table.columns)
    assert "--swap-space" in set(findings["flag"])
    page.at.text_area(key="launch-line").set_value('vllm serve "M').run()
    page.assert_calm()
    assert "cannot be read as a command line" in page.errors[0]


def test_the_pool_of_a_target_stands_beside_the_computed_one(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    page = open_page("capacity", source="target", shown="embedded")
    page.assert_calm()
    measured = page.tables[0].set_index("")
    assert list(measured.loc["KV blocks"]) == ["200", "200", "the same"]
    assert list(measured.loc["KV tokens"].map(lambda text: text.replace("\u202f", "")))[:2] == ["3184", "3184"]


def test_a_target_that_does_not_tell_its_model_asks_for_it(store: Store, use: Use, open_page: Open) -> None:
    facts = {"version": "0.32.0", "cache_config_info": {"block_size": "16", "num_gpu_blocks": "1000"}}
    store.targets.upsert("prod", url="http://127.0.0.1:1", kind="external", engine="vllm", facts=facts)
    use(store)
    page = open_page("capacity", source="target")
    page.assert_calm()
    assert "Say here which model it is" in page.text
    assert page.at.selectbox(key="model").label == "Model it serves"
    assert page.tables[0].set_index("").loc["KV blocks", "measured"] == "1\u202f000"


def test_a_template_gives_flags_and_goes_into_the_plan(capacity: Open) -> None:
    page = capacity(view="Templates", model="Llama-3.1-8B")
    page.assert_calm()
    command = next(code.value for code in page.at.code if code.value.startswith("vllm serve"))
    assert "--max-num-seqs" in command
    reasons = next(table for table in page.tables if "reason" in table.columns)
    assert all(reasons["reason"])
    page.button("Take it into the plan").click().run()
    page.assert_calm()
    assert page.at.text_area(key="launch-line").value == command
    assert "Of 8\u202f192 tokens" in figures(page)


def test_checklist_looks_at_the_target(seeded: Store, use: Use, open_page: Open) -> None:
    use(seeded)
    page = open_page("capacity", view="Checklist", check="embedded", lang="zh")
    page.assert_calm()
    seen = [row for table in page.tables if "what was seen" in table.columns for row in table.itertuples(index=False)]
    assert len(seen) > 30
    states = [row[0] for row in seen]
    assert any("✖ open" in state for state in states)
    assert any("✔ done" in state for state in states)
    assert any("KV" in row[1] and not row[1].isascii() for row in seen)


def test_chooser_counts_what_was_answered(capacity: Open) -> None:
    page = capacity(view="Choose an engine")
    page.assert_calm()
    assert "In maintenance mode" in page.text
    page.at.button_group(key="choose-hardware").set_value("amd").run()
    page.assert_calm()
    engines = [m.value for m in page.at.markdown if " points" in m.value]
    assert engines[-1].startswith("**TensorRT-LLM")
    assert "✖ cannot" in engines[-1]


def test_claims_of_the_articles_beside_the_truth(capacity: Open) -> None:
    page = capacity(view="Articles against the truth", topic="bytes")
    page.assert_calm()
    said = next(table for table in page.tables if "the article says" in table.columns)
    row = said[said["its figure"] == "950 GB"].iloc[0]
    assert row["computed"] == "0.67 GB"
    assert "✖ wrong" in row["verdict"]
