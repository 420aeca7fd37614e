"""The engine of a page is told by its names, and which versions have them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from probe.dialects import load_dialect
from probe.dialects.detect import Detection, detect

Page = Callable[[str], dict[str, Metric]]


def found(families: dict[str, Metric]) -> Detection:
    detection = detect(families)
    assert detection is not None
    return detection


@pytest.mark.parametrize(
    ("name", "engine", "spelling", "first", "last"),
    [
        ("vllm-0.33.0-under-load", "vllm", "vllm:", "0.32.0", "0.33.0"),
        ("vllm-v0", "vllm", "vllm:", "0.6.6", "0.9.0"),
        ("vllm-v1-old", "vllm", "vllm:", "0.7.3", "0.11.2"),
        ("sglang-old", "sglang", "sglang:", "0.5.2", "0.5.23"),
        ("sglang-new", "sglang", "sglang:", "0.5.15.post1", "0.5.23"),
        ("sglang-underscore", "sglang", "sglang_", "0.5.15.post1", "0.5.23"),
        ("trtllm-first", "tensorrt-llm", "trtllm_", "1.0.0", "1.1.0rc5"),
        ("trtllm-second", "tensorrt-llm", "trtllm_", "1.3.0rc5", "main"),
        ("trtllm-third", "tensorrt-llm", "trtllm_", "main", "main"),
        ("tgi", "tgi", "tgi_", "3.3.7", "3.3.7"),
        ("triton", "triton", "nv_trt_llm_", "0.7.0", "1.0.0"),
    ],
)
def test_engine_and_versions(page: Page, name: str, engine: str, spelling: str, first: str, last: str) -> None:
    detection = found(page(name))
    assert (detection.engine, detection.spelling, detection.version) == (engine, spelling, None)
    assert (detection.versions[0], detection.versions[-1]) == (first, last)
    assert detection.evidence.endswith(".")
    assert "\n" not in detection.evidence


def test_the_embedded_engine_comes_before_the_names_it_borrows(page: Page) -> None:
    own = {f.name: f for f in text_string_to_metric_families("# TYPE kvoncall:kv_blocks gauge\nkvoncall:kv_blocks 1\n")}
    assert found(page("vllm-v0") | own).engine == "kvoncall"


def test_a_vllm_inside_triton_is_a_vllm(page: Page) -> None:
    server = {name: family for name, family in page("triton").items() if not name.startswith("nv_trt_llm_")}
    assert found(page("vllm-v0") | server).engine == "vllm"
    assert found(server).engine == "triton"  # the Python backend: the server's own metrics are all there is


def test_other_pages_are_nobodys() -> None:
    text = "# TYPE go_goroutines gauge\ngo_goroutines 3\n# TYPE request_success counter\nrequest_success_total 1\n"
    assert detect({f.name: f for f in text_string_to_metric_families(text)}) is None
    assert detect({}) is None


def test_a_name_no_version_has_is_said(page: Page) -> None:
    both = page("vllm-v0") | page("vllm-0.33.0-under-load")
    detection = found(both)
    assert detection.versions == ()
    assert "no version read has all of them" in detection.evidence


def test_detection_loads_the_spelling(page: Page) -> None:
    detection = found(page("sglang-underscore"))
    dialect = load_dialect(detection.engine, None, detection.spelling)
    source = dialect.source_at("kv_usage_ratio")
    assert source is not None
    assert source.name == "sglang_token_usage"
    assert "sglang_token_usage" in dialect.exposed_names()
