"""The articles' claims: computed figures are those that hold, and every text is there in both languages."""

from __future__ import annotations

import json

import pytest

from probe.catalog.metrics import metric_versions, metrics_at
from runbooks.knowledge.claims import TOPICS, Claim, claims, judged
from runbooks.knowledge.claims_code import broadcast, h2o_scores, int8_dequantize, int8_quantize
from runbooks.knowledge.text import data, localized, text_of

# Figures that hold, worked out apart from the code: (in the unit of the article's figure).
HOLDS = {
    "llama3-70b-2048": 80 * 8 * 128 * 2 * 2 * 2048 / 1e9,
    "llama3-8b-8k-32-heads": 32 * 8 * 128 * 2 * 2 * 8192 / 1e9,
    "llama3-8b-32k": 32 * 8 * 128 * 2 * 2 * 32768 / 1e9,
    "llama3-70b-32k-fp16": 10.737,
    "llama3-70b-32k-fp8": 5.369,
    "llama3-70b-32k-int4": 10.737 * (64 + 4) / 256,  # codes of 128 values, and a float32 scale
    "table-llama-mha": 32768,
    "table-llama-gqa": 4096,
    "table-llama-mqa": 512,
    "table-deepseek-mla": (512 + 64) * 2,
    "table-deepseek-mha": 128 * (192 + 128) * 2,
    "qwen2-72b-4096": 1342177280,
    "llama3-70b-128k": 42.95,
    "prefix-saves": 536,
}
VERDICTS = {
    "llama3-8b-8k-32-heads": "half",
    "qwen2-72b-4096": "right",
    "e5m2-is-a-value": "right",
    "capacity-formula": "half",
    "reduce-tp-against-oom": "wrong",
    "ampere-fp8-native": "wrong",
    "eviction-truncates": "wrong",
    "flag-enable-prefix-caching-false": "wrong",
    "flag-prefix-cache-ttl": "wrong",
    "flag-automatic-prefix-layout": "wrong",
    "env-scheduler-policy": "wrong",
    "flag-kv-transfer-config": "half",
    "tool-trtllm-quantize": "wrong",
    "metric-cache-usage-percent": "wrong",
    "metric-num-cache-evictions": "wrong",
    "metric-avg-generation-throughput": "wrong",
    "metric-underscores": "half",
    "kv-exceeds-weights": "wrong",
    "mixed-layers-config": "half",
}
# DESIGN names these kinds of errors in code.
CODE = (
    "code-mla-rope", "code-mla-expands", "code-int8-zero-point", "code-int8-scales", "code-int4-sign",
    "code-int4-shape", "code-int4-axis", "code-int4-per-channel", "code-int4-zero-row",
    "code-h2o-accumulate", "code-h2o-recent", "code-paged-typo",
    "code-paged-border", "code-paged-axis", "code-paged-free-list", "code-fork-shares-open-block",
    "code-streaming-hidden",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Claim]:
    def exposed(engine: str) -> dict[str, dict[str, object]]:
        return {version: dict(metrics_at(engine, version)) for version in metric_versions(engine)}

    return {one.id: one for one in claims(exposed)}


def test_figures_are_those_that_hold(found: dict[str, Claim]) -> None:
    for claim_id, figure in HOLDS.items():
        shown = found[claim_id].computed.en.split()[0].rstrip("%").replace(",", "")
        assert float(shown) == pytest.approx(figure, rel=0.005), claim_id


def test_verdicts(found: dict[str, Claim]) -> None:
    assert {claim_id: found[claim_id].verdict for claim_id in VERDICTS} == VERDICTS
    assert {found[claim_id].verdict for claim_id in CODE} == {"wrong"}


def test_every_claim_is_computed_and_explained(found: dict[str, Claim]) -> None:
    assert set(found) == {entry["id"] for entry in data("claims")["claims"]}
    for one in found.values():
        assert one.topic in TOPICS
        assert one.arithmetic, one.id
        for text in (one.claim, one.truth, one.said, one.computed, one.source, one.article):
            assert text.en, one.id
            assert text.zh, one.id
        assert "{" not in one.truth.en.replace("'{", "").replace("{", "", 0) or "num_pipelines" in one.claim.en


def test_without_metric_names_only_those_claims_are_missing(found: dict[str, Claim]) -> None:
    left = set(found) - {one.id for one in claims()}
    assert left == {one for one in found if one.startswith("metric-")} | {"tgi-enterprise"}


def test_both_languages_name_the_same_figures() -> None:
    for entry in data("claims")["claims"]:
        en, zh = text_of(entry["truth"]).placeholders()
        assert en == zh, entry["id"]


def test_json_in_one_language(found: dict[str, Claim]) -> None:
    one = found["llama3-70b-2048"].to_dict()
    assert json.loads(json.dumps(one)) == one
    assert localized(one, "zh")["truth"].startswith("实际为")
    assert "zh" not in localized(one, "en")
    assert localized(one, "en")["truth"].startswith("0.67 GB")


def test_figures_within_five_percent_are_right() -> None:
    assert judged(1.04, 1.0) == "right"
    assert judged(1.06, 1.0) == "wrong"
    with pytest.raises(ValueError, match="verdict"):
        judged(None, 1.0)


def test_the_articles_arithmetic_is_run_not_described() -> None:
    two_sided = [-1.0, 0.0, 1.0]
    back = int8_dequantize(*int8_quantize(two_sided, clamp_zero_point=True))
    assert back == pytest.approx(two_sided, abs=0.01)  # where the article's code is right, so is its copy
    assert h2o_scores([[[1.0]], [[0.5, 0.5]]], accumulate=True) == [1.5, 0.5]
    assert h2o_scores([[[1.0]], [[0.5, 0.5]]], accumulate=False) == [1.0, 0.5]
    assert broadcast((2, 1, 3), (4, 1)) == (2, 4, 3)
    assert broadcast((2, 3), (4, 3)) is None
