"""The benchmark of formats decodes what it says it does; its speeds are not for a test to judge."""

from __future__ import annotations

from typing import Any

import pytest

from engine.engine import LLMEngine
from probe.bench import formats
from probe.bench.formats import bench_formats


def test_every_timed_step_decodes_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: dict[str, list[int]] = {}
    step = LLMEngine.step

    def counted(engine: LLMEngine) -> list[Any]:
        outputs = step(engine)
        tokens.setdefault(engine.config.kv_cache_dtype, []).append(len(outputs))
        return outputs

    monkeypatch.setattr(LLMEngine, "step", counted)
    monkeypatch.setattr(formats, "TURNS", 3)
    lines: list[str] = []
    found = bench_formats(
        "", report=lines.append, formats=("float32", "int8_per_token_head", "int4_kivi"), num_requests=3
    )
    assert len(lines) == 3
    assert found["full_precision"] == "float32"
    assert "float32" not in found, "it is what the others are compared with"
    assert found["decode_steps"] == 2 * formats.STEPS  # the first turn warms up
    assert tokens.keys() == {"auto", "int8_per_token_head", "int4_kivi"}
    for steps in tokens.values():
        assert steps[-3 * formats.STEPS :] == [3] * 3 * formats.STEPS
    for name, per_token in (("int8_per_token_head", 576), ("int4_kivi", 352)):
        assert found[name]["ratio_min_max"][0] <= found[name]["ratio"] <= found[name]["ratio_min_max"][1]
        assert found[name]["kv_bytes_per_token"] == per_token
    assert found["lowest_ratio"] == min(found[name]["ratio"] for name in ("int8_per_token_head", "int4_kivi"))
