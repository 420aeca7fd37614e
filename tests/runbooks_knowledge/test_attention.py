"""MHA, GQA, MQA and MLA in true bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.memory.deployment import Deployment
from engine.memory.model_presets import model_preset
from engine.memory.plan import plan
from engine.memory.shape import LayerGroup
from runbooks.knowledge.attention import attention_table, row_of

LLAMA = model_preset("Llama-3-70B")


def test_llama_3_70b() -> None:
    table = attention_table(LLAMA)
    assert {row.kind: row.bytes_16 for row in table} == {"MHA": 32768, "GQA": 4096, "MQA": 512, "MLA": 1152}
    own = [row for row in table if row.own]
    assert [row.kind for row in own] == ["GQA"]
    assert own[0].all_16 == 80 * 4096
    assert own[0].bytes_8 == 2048
    assert own[0].bytes_4 == 8 * 2 * (64 + 4)  # codes of 128 values and a float32 scale, of K and of V
    assert own[0].share_of_mha == pytest.approx(1 / 8)


def test_deepseek_keeps_a_latent() -> None:
    table = attention_table(model_preset("DeepSeek-V3"))
    assert [row.kind for row in table if row.own] == ["MLA"]
    assert row_of(table, "MLA").bytes_16 == 1152
    assert row_of(table, "MHA").bytes_16 == 128 * (192 + 128) * 2


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-8B", "DeepSeek-V3", "Llama-2-7B", "Falcon-7B"])
def test_the_models_own_row_is_what_the_planner_bills(name: str) -> None:
    shape = model_preset(name)
    own = next(row for row in attention_table(shape) if row.own)
    billed = plan(Deployment(shape, version="0.33.0", kv_cache_bytes=1 << 36, max_model_len=2048)).kv_bytes_per_token
    assert own.all_16 == billed


def test_models_without_kv_or_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="keeps no KV"):
        attention_table(replace(LLAMA, layers=(LayerGroup(4, "recurrent", state_bytes=8),)))
    with pytest.raises(ConfigError, match="query heads"):
        attention_table(replace(LLAMA, num_q_heads=None))


def test_rows_are_json_with_chinese() -> None:
    row = row_of(attention_table(LLAMA), "MLA").to_dict()
    assert row["zh"]["meaning"]
    assert row["bytes_16"] == 1152
